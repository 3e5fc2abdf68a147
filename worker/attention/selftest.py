"""Self-test of the attention kernels against the reference on the serving device, at a worker's start.

A compiler or driver may be wrong for one architecture and right for all others, and tests on other machines cannot show
it. Every kernel of a model therefore first runs on a few small rows, with NaN at all places that a row must not read or
write, and in the padding of a static batch. A pass is recorded in the user's cache folder for these kernels, this
architecture, these versions and these shapes; the next start skips it.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from kvforge.models.store import default_cache_dir
from kvforge.worker.device.check import require_all_right, require_right
from kvforge.worker.device.device import WAY_OUT, Device

from .batch import Int32Array, PagedBatch
from .interface import AttentionOptions, KvLayer, PagedAttention
from .latent_plan import GROUP_MIN, PART_MIN
from .quantised import dequantise, is_quantised
from .reference import ReferenceAttention
from .shared_plan import MANY_ROWS

# Largest difference from the reference, relative to its largest number.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# Rows: blocks and tokens before the new ones, and the number of new ones (decodes: 1).
_DECODES = ((0, 0), (0, 1), (1, -1), (1, 0), (3, 2), (40, 5))
_PREFILLS = ((0, 0, 3), (1, -1, 2), (2, 3, 70), (0, 0, 200))
_COMMON = 1000  # tokens that rows have in common: three parts of a row
log = logging.getLogger("worker")


@dataclass(frozen=True)
class AttentionShape:
    """One kind of layer.

    Attributes:
        heads: Query heads.
        kv_heads: KV heads.
        head_size: Numbers of a head.
        options: Attention options of its layers, but their sinks.
        sinks: Whether they have any.
        latent: As in KvLayer.
    """

    heads: int
    kv_heads: int
    head_size: int
    options: AttentionOptions
    sinks: bool = False
    latent: int = 0

    def __str__(self) -> str:
        if self.latent:
            return (
                f"{self.heads} query heads, latents of {self.latent} with rotary keys of {self.head_size - self.latent}"
            )
        window = f", window {self.options.window}" if self.options.window else ""
        softcap = f", soft cap {self.options.softcap:g}" if self.options.softcap else ""
        sinks = ", sinks" if self.sinks else ""
        return f"{self.heads} query heads, {self.kv_heads} KV heads of {self.head_size}{window}{softcap}{sinks}"


def self_test(
    attention: PagedAttention,
    device: Device,
    shapes: Iterable[AttentionShape],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    remembered_in: Path | None = None,
) -> None:
    """Test every kernel that layers of these shapes use. The reference itself needs no test.

    Args:
        attention: The implementation.
        device: The device.
        shapes: Shapes of the layers.
        dtype: Dtype of the model.
        kv_dtype: Dtype of the pool.
        block_size: Tokens per block.
        remembered_in: Folder for records of passes; None: `selftest` in the user's cache folder.

    Raises:
        KernelError: Names the kernel and the shape that are wrong or cannot be compiled.
        GpuError: The device failed.
    """
    if isinstance(attention, ReferenceAttention):
        return
    folder = default_cache_dir() / "selftest" if remembered_in is None else remembered_in
    for shape in dict.fromkeys(shapes):
        passed = folder / _key(device, shape, dtype, kv_dtype, block_size)
        if passed.exists():
            continue
        began = time.perf_counter()
        where = f"{shape}, blocks of {block_size}, {_name(dtype)} over {_name(kv_dtype)}"
        way_out = f"use attention = 'reference', or {WAY_OUT}"
        checks = _checks(attention, device, shape, dtype, kv_dtype, block_size)
        require_all_right(
            device, [partial(require_right, device, kernel, where, check, way_out) for kernel, check in checks]
        )
        log.debug("self-test passed for %s in %.1f s", shape, time.perf_counter() - began)
        _remember(passed, f"{device.name}: {shape}, {_name(dtype)} over {_name(kv_dtype)}\n")


def _checks(
    attention: PagedAttention,
    device: Device,
    shape: AttentionShape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the kernels by name, each with a check that returns the fault, or ""."""
    decodes = [(max(blocks * block_size + more, 0), 1) for blocks, more in _DECODES]
    if shape.latent:
        decodes.append((PART_MIN * GROUP_MIN + 5, 1))  # a row of two groups
    prefills = [(max(blocks * block_size + more, 0), count) for blocks, more, count in _PREFILLS]
    mixed = [prefills[0], decodes[1], prefills[1], *decodes[2:4]]

    def bench() -> _Bench:
        # Checks may run side by side, and an instance has one workspace.
        own = copy.deepcopy(attention) if device.compile_threads > 1 else attention
        return _Bench(own, device, shape, dtype, kv_dtype, block_size)

    def shared(count: int) -> str:
        return bench().attend_shared(count)

    yield "write", lambda: bench().write(mixed, rotated=0)
    if not shape.latent:
        yield "rotary write", lambda: bench().write(mixed, rotated=shape.head_size - shape.head_size % 2)
    yield "decode", lambda: bench().attend(decodes)
    multiprocessors = device.architecture[1]
    if multiprocessors:  # more rows than multiprocessors may use other tiles
        many = [decodes[row % len(decodes)] for row in range(multiprocessors + 1)]
        yield "decode of many rows", lambda: bench().attend(many)
    yield "padded decode", lambda: bench().attend_padded(decodes)
    if not shape.latent:
        # Launches of many rows may have other programs.
        for count in (40, MANY_ROWS + 12) if multiprocessors else (4,):
            yield "decode of common blocks", partial(shared, count)
    yield "prefill", lambda: bench().attend(prefills)
    yield "mixed-batch", lambda: bench().attend(mixed)


@dataclass(frozen=True)
class _Bench:
    attention: PagedAttention
    device: Device
    shape: AttentionShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int

    def write(self, rows: list[tuple[int, int]], rotated: int) -> str:
        """Test storing the rows' new tokens. rotated: rotated numbers of a head, 0: none."""
        batch, tokens, layers = self._batch(rows), sum(count for _, count in rows), []
        query, key, value = self._inputs(tokens)
        angles = self._random(tokens, max(rotated, 2)) * 3
        queries = []
        for attention in (self.attention, ReferenceAttention()):
            layers.append(self._layer(rows))
            if rotated:
                arguments = query.clone(), key, value, angles.cos(), angles.sin()
                queries.append(attention.write_rotated(*arguments, layers[-1], batch))
            else:
                _store(attention, key, value, layers[-1], batch)
        problem = _difference("the rotated query", queries[0], queries[1], TOLERANCE[self.dtype]) if rotated else ""
        # After a rotation, rounding to a quantised format may differ by one step.
        tolerance = 0.08 if is_quantised(self.kv_dtype) else TOLERANCE[self.dtype]
        stored = [_stored(layer) for layer in layers]
        for name, got, want in zip(("K", "V"), *stored, strict=True):
            problem = problem or _difference(f"the stored {name}", got, want, tolerance)
        return problem

    def attend(self, rows: list[tuple[int, int]]) -> str:
        """Test attention of the rows' new tokens."""
        query, layer = self._written(rows)
        results = [
            attention.attend(query, layer, self._batch(rows), self._options)
            for attention in (self.attention, ReferenceAttention())
        ]
        return _difference("attention", results[0], results[1], self._tolerance)

    def attend_padded(self, rows: list[tuple[int, int]]) -> str:
        """Test a padded static batch, as captured graphs use it, with NaN in the padding."""
        query, layer = self._written(rows)
        tables, starts, _ = self._tables(rows)
        batch = PagedBatch.static(len(rows) + 3, tables.shape[1], self.block_size, self.device)
        batch.fill(tables, starts + 1)
        padding = torch.full((3, *query.shape[1:]), torch.nan, dtype=self.dtype, device=query.device)
        sevens = torch.full_like(padding[:, : self.shape.kv_heads], 7.0)  # unlike NaN they would be visible in the pool
        padded_query = torch.cat((query, padding))
        before = [cache.clone() for cache in (layer.keys, layer.values)]
        _, key, value = self._inputs(len(rows))
        _store(self.attention, torch.cat((key, sevens)), torch.cat((value, sevens)), layer, batch)
        others = torch.ones(before[0].shape[0] * self.block_size, dtype=torch.bool, device=query.device)
        others[batch.kv_slots_on_device[: len(rows)].long()] = False
        for name, old, new in zip(("K", "V"), before, (layer.keys, layer.values), strict=True):
            old_bytes, new_bytes = (cache.contiguous().view(torch.uint8).flatten(0, 1)[others] for cache in (old, new))
            if not torch.equal(old_bytes, new_bytes):
                return f"padding changes {name}"
        got = self.attention.attend(padded_query, layer, batch, self._options)[: len(rows)]
        want = ReferenceAttention().attend(query, layer, self._batch(rows), self._options)
        return _difference("attention", got, want, self._tolerance)

    def attend_shared(self, count: int) -> str:
        """Test decodes that begin alike, where half part from the others early: the bits are those of each alone."""
        sharing = self.attention.always_sharing()
        if sharing is None:
            return ""
        common = _COMMON // self.block_size
        later = _COMMON - common * self.block_size
        # The tokens that rows have in common are written for the first two alone.
        rows = [(_COMMON + row if row < 2 else later + row % 3, 1) for row in range(count)]
        query, layer = self._written(rows)
        tables, starts, counts = self._tables(rows)
        tables[2:, common:], starts[2:] = tables[2:, : tables.shape[1] - common], starts[2:] + common * self.block_size
        own = tables[1, common * 3 // 4 : common].copy()
        tables[:, :common] = tables[0, :common]
        tables[1::2, common * 3 // 4 : common] = own
        alone, together, want = (
            attention.attend(query, layer, self._built(tables, starts, counts), self._options)
            for attention in (self.attention, sharing, ReferenceAttention())
        )
        if not torch.equal(alone, together):
            return "rows that are read together have other bits than alone"
        return _difference("attention", together, want, self._tolerance)

    @property
    def _options(self) -> AttentionOptions:
        """The layer's options, with sinks from far below to far above the scores."""
        options = self.shape.options
        return replace(options, sinks=self._random(self.shape.heads, seed=2) * 5) if self.shape.sinks else options

    @property
    def _tolerance(self) -> float:
        """The tolerance of the coarser of the model's and the pool's dtype; float16 for a quantised pool."""
        stored = torch.float16 if is_quantised(self.kv_dtype) else self.kv_dtype
        return max(TOLERANCE[self.dtype], TOLERANCE[stored])

    def _written(self, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, KvLayer]:
        """Return queries of the new tokens, and a layer with the rows' tokens and NaN everywhere else."""
        layer = self._layer(rows)
        tables, starts, _ = self._tables(rows)
        cached = starts > 0
        if cached.any():
            before = self._built(tables[cached], np.zeros(int(cached.sum()), np.int32), starts[cached])
            _, key, value = self._inputs(before.tokens, seed=1)
            _store(ReferenceAttention(), key, value, layer, before)
        batch = self._batch(rows)
        query, key, value = self._inputs(batch.tokens)
        _store(ReferenceAttention(), key, value, layer, batch)
        return query, layer

    def _batch(self, rows: list[tuple[int, int]]) -> PagedBatch:
        return self._built(*self._tables(rows))

    def _built(self, tables: Int32Array, starts: Int32Array, counts: Int32Array) -> PagedBatch:
        return PagedBatch.build(tables, starts, counts, self.block_size, self.device)

    def _tables(self, rows: list[tuple[int, int]]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return tables, starts and counts. Blocks are in falling order; past a row's end is block 0, all NaN."""
        starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        needed = -(-(starts + counts) // self.block_size)
        tables = np.zeros((len(rows), int(needed.max()) + 1), np.int32)
        block = self._blocks(rows)
        for row, count in enumerate(needed):
            tables[row, :count] = np.arange(block - 1, block - 1 - count, -1)
            block -= int(count)
        return tables, starts, counts

    def _blocks(self, rows: list[tuple[int, int]]) -> int:
        return 1 + sum(-(-(start + count) // self.block_size) for start, count in rows)

    def _layer(self, rows: list[tuple[int, int]]) -> KvLayer:
        """Return a layer with NaN for every number, or for its scale."""
        place = (self._blocks(rows), self.block_size, self.shape.kv_heads)
        nan = [torch.full((*place, self.shape.head_size), torch.nan, device=self._on) for _ in range(2)]
        scales: list[torch.Tensor] = []
        if is_quantised(self.kv_dtype):
            nan = [cache.nan_to_num(77.0) for cache in nan]
            scales = [torch.full(place, torch.nan, device=self._on) for _ in range(2)]
        caches = [cache.to(self.kv_dtype) for cache in nan]
        if self.shape.latent:
            return KvLayer.of_latents(caches[0], self.shape.latent, *scales[:1])
        return KvLayer(*caches, *scales)

    def _inputs(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value of this many tokens; always the same."""
        heads, kv_heads, size = self.shape.heads, self.shape.kv_heads, self.shape.head_size
        packed = self._random(tokens, heads + 2 * kv_heads, size, seed=seed)
        query, key, value = packed.to(self.dtype).split((heads, kv_heads, kv_heads), dim=1)
        return query, key, value

    def _random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self._on)

    @property
    def _on(self) -> torch.device:
        return self.device.torch_device


def _store(
    attention: PagedAttention, key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch
) -> None:
    """Store K and V, or K as latents."""
    if layer.latent:
        attention.write_latent(key[:, 0], layer, batch)
    else:
        attention.write(key, value, layer, batch)


def _stored(layer: KvLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as numbers."""
    return dequantise(layer.keys, layer.key_scales), dequantise(layer.values, layer.value_scales)


def _difference(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """Return the fault of `got`, or "". NaN must be exactly where `want` has it."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isnan(), want.isnan()):
        count = int((got.isnan() != want.isnan()).sum())
        return f"{what} has or lacks NaN wrongly in {count} of {got.numel()} places"
    largest = float(want.nan_to_num().abs().max())
    difference = float((got - want).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().max())
    if difference <= tolerance * largest:
        return ""
    return f"{what} differs by {difference:.1e}; numbers go up to {largest:.1e}, relative tolerance {tolerance:.0e}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _key(device: Device, shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int) -> str:
    """Return a key of everything that a result depends on."""
    from kvforge.worker.device.targets import current_target

    digest = hashlib.sha256()
    for room in ("attention", "cpu", "device"):
        for path in sorted((Path(__file__).parents[1] / room).glob("*.py")):
            digest.update(path.read_bytes())
    compilers = [_version(name) for name in ("triton", "numba", "llvmlite")]
    versions = (torch.__version__, *compilers, device.toolkit, torch.backends.cpu.get_cpu_capability())
    what = (current_target(device), device.name, *versions, shape, dtype, kv_dtype, block_size)
    digest.update(repr(what).encode())
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _remember(path: Path, text: str) -> None:
    """Record a pass. An unwritable folder only costs the next start a few seconds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        log.info("the self-test's result is not recorded: %s", error)
