"""Compares what will serve with the model itself before anything is served.

A ragged batch in two chunks runs through the serving path (fused layers if there are any, and paged attention). Its
logits are compared with those of transformers' own layers and eager attention on each sequence alone. This catches
faults that no rule foresees: state carried outside attention, positions derived from the batch's layout, a bias added
elsewhere.

In 16 bits, transformers' own attention may itself be far from the exact result (Qwen2.5 in bfloat16, which has large
biases of K: 11 % of the largest logit, against 2 % here). If the two differ by more than rounding usually explains,
both are compared with the same weights in float32, and ours must not be the further one.

A router with close scores may choose other experts after another rounding, and then chance decides which one is
further. Layers can run in float32 as a whole, transformers' own and described ones: if both agree in float32, and are
about equally far from it in 16 bits, ours may be the further one. A described router that agrees in float32 may be the
further one by chance alone: its kernels are compared with their references separately.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.reference import ReferenceAttention
from kvforge.worker.attention.windows import WindowTables
from kvforge.worker.kernels.packed import PackedRows
from kvforge.worker.kernels.wide import WideOperations

from .families import counts_positions
from .mixers import MIXING
from .model import ATTENTION_NAME, LoadedModel, use_attention
from .probe import RECORDED_TOKENS, query_norms

log = logging.getLogger(__name__)

# Largest difference of logits that rounding explains, relative to the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# The same if rows of x are quantised to 8 bits before products.
QUANTISED_TOLERANCE = 1.5e-1
# At this distance from float32, right and wrong cannot be distinguished, whatever transformers computes.
NOTHING_PROVED = 0.5
# Largest ratio of the distances from float32 of two roundings of one model.
ALIKE = 2.0
# Largest difference that rounding explains of a query's norm at two positions, relative to the norm.
NORM_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
# Position of the first of the tokens that distant ones are compared with. An RG-LRU does not scale its input at 0.
NEAR = 1
# A batch of two: tokens of each, and how many the first pass feeds (the second: a chunk and a decode).
LENGTHS, FIRST = np.array([7, 4], np.int32), np.array([4, 3], np.int32)

Sequences = list[npt.NDArray[np.int64]]
Logits = list[torch.Tensor]  # one per sequence, [tokens, vocab] float32


@dataclass(frozen=True)
class Reference:
    """Expected logits of the two sequences.

    Attributes:
        eager: From transformers' own layers and attention.
        exact: In float32, if they were needed.
    """

    eager: Logits
    exact: Logits | None = None


@torch.no_grad()
def verify(model: LoadedModel, reference: Reference | None = None, quantised: bool = False) -> Reference:
    """Compare paged with eager attention on two short sequences, with blocks in falling order.

    Args:
        model: The loaded model.
        reference: Result of an earlier call, from before the weights were packed, so that a fault of packing is not on
            both sides. None: compute it.
        quantised: Whether the weights were quantised since; `reference` then only measures the change of the logits.

    Returns:
        The reference.

    Raises:
        UnsupportedModel: The logits differ by more than rounding explains.
    """
    name = type(model.module).__name__
    if model.info.context_tokens_max < LENGTHS.max():
        raise UnsupportedModel(name, "its context is shorter than 8 tokens")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, count) for count in LENGTHS]
    before = reference if quantised else None
    if reference is None:
        _compare_distant_queries(model)
    if reference is None or quantised:
        reference = Reference(_eager_logits(model, sequences))
    got, wanted = _paged_logits(model, sequences), reference.eager
    tolerance = max(TOLERANCE[model.dtype], TOLERANCE.get(model.geometry.dtype.torch_dtype, 0.0))
    if before is not None:
        tolerance = max(tolerance, QUANTISED_TOLERANCE)
        log.debug("quantising changed logits by %.1e of the largest", distance(got, before.eager))
    apart = distance(got, wanted)
    if apart <= tolerance:
        return reference
    dtype = str(model.dtype).removeprefix("torch.")
    if not _finite(got) and not _finite(wanted):
        other = "float32" if dtype == "bfloat16" else "bfloat16 or float32"
        raise UnsupportedModel(name, f"its logits in {dtype} are not finite: load it with dtype {other}")
    if model.dtype == torch.float32:
        problem = f"paged attention differs from transformers' own by {apart:.1e} of the largest logit"
        raise UnsupportedModel(name, problem)
    exact = reference.exact or _exact_logits(model, sequences)
    ours, theirs = distance(got, exact), distance(wanted, exact)
    if not ours <= max(tolerance, min(theirs, NOTHING_PROVED) if math.isfinite(theirs) else 0.0):
        alike = NOTHING_PROVED if _has_described_router(model) and math.isfinite(theirs) else ALIKE * theirs
        if ours <= min(alike, NOTHING_PROVED) and _right_in_float32(model, sequences, exact):
            problem = (
                "%s: in %s logits are %.1e of the largest from float32, transformers' own %.1e; in float32 they agree"
            )
            log.warning(problem, name, dtype, ours, theirs)
            return replace(reference, exact=exact)
        problem = f"in {dtype} its logits are {ours:.1e} of the largest away from those in float32, with transformers'"
        raise UnsupportedModel(name, f"{problem} own attention {theirs:.1e}")
    log.debug("in %s logits are %.1e of the largest from float32, transformers' own %.1e", dtype, ours, theirs)
    return replace(reference, exact=exact)


def _compare_distant_queries(model: LoadedModel) -> None:
    """Compare how queries grow with their position, which no short sequence shows, with the description.

    Raises:
        UnsupportedModel: They grow otherwise.
    """
    if model.fused is None or counts_positions(model.module):
        return
    most = model.info.context_tokens_max - RECORDED_TOKENS
    near = query_norms(model.module, NEAR, model.device)
    for first in sorted({most // 3, most}):
        far = query_norms(model.module, first, model.device)
        attending = [layer for layer in model.fused.layers if layer.attends]
        for index, (layer, one, other) in enumerate(zip(attending, near, far, strict=True)):
            places = torch.arange(RECORDED_TOKENS, device=one.device)
            if layer.head_norms is not None and layer.head_norms.after_rotation:
                continue  # a weight after the rotation makes the norm depend on the position
            if layer.query_scale is not None:
                factors = [
                    layer.query_scale.factors(each, model.dtype).flatten() for each in (places + NEAR, places + first)
                ]
                one = one * factors[1] / factors[0]
            if bool(((other - one).abs() > NORM_TOLERANCE[model.dtype] * one.abs()).any()):
                problem = f"layer {index} scales queries from position {first} on otherwise than described"
                raise UnsupportedModel(type(model.module).__name__, problem)


def distance(got: Logits, wanted: Logits) -> float:
    """Return the largest difference, relative to each sequence's largest logit; NaN if any number is."""
    parts = [
        (one - other).abs().max() / other.abs().max().clamp_min(1e-6) for one, other in zip(got, wanted, strict=True)
    ]
    return float(torch.stack(parts).max())


def _finite(logits: Logits) -> bool:
    return all(bool(each.isfinite().all()) for each in logits)


@contextlib.contextmanager
def in_float32(module: Any) -> Iterator[None]:
    """Compute in float32 from the model's weights.

    Each part's weights are widened when it is called and restored when it returns, so that only one part's exist twice.
    A layer with a recurrent state reads weights of its parts without calling them: they are widened with it. A head may
    be given numbers in the dtype that its weight had before the call (Mamba): they are widened too.
    """
    kept: dict[int, list[list[tuple[dict[str, Any], dict[str, Any]]]]] = {}

    def widen(part: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        parts = part.modules() if MIXING in part.__dict__ else (part,)
        tables = [held for each in parts for held in (each._parameters, each._buffers)]
        kept.setdefault(id(part), []).append([])
        for held in tables:
            narrow = {name: tensor for name, tensor in held.items() if _is_narrow(tensor)}
            kept[id(part)][-1].append((held, narrow))
            for name, tensor in narrow.items():
                wide, is_parameter = tensor.detach().float(), isinstance(tensor, torch.nn.Parameter)
                held[name] = torch.nn.Parameter(wide, requires_grad=False) if is_parameter else wide
        _read_packed(part, wide=True)
        if not isinstance(part, torch.nn.Linear):
            return None
        return tuple(each.float() if isinstance(each, torch.Tensor) and _is_narrow(each) else each for each in given)

    def put_back(part: Any, *_: Any) -> None:
        for held, narrow in kept[id(part)].pop():
            held.update(narrow)
        _read_packed(part, wide=False)

    hooks = []
    try:
        for part in module.modules():
            hooks.append(part.register_forward_pre_hook(widen))
            hooks.append(part.register_forward_hook(put_back, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for left in kept.values():  # parts left by an exception before their hooks ran
            for tables in left:
                for held, narrow in tables:
                    held.update(narrow)
        for part in module.modules():
            _read_packed(part, wide=False)


def _read_packed(part: Any, *, wide: bool) -> None:
    """Choose how a layer with a recurrent state reads packed weights without calling them: in float32, or as stored."""
    for each in part.modules() if MIXING in part.__dict__ else ():
        if isinstance(each, PackedRows):
            each.is_wide = wide


def _is_narrow(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float32


def _exact_logits(model: LoadedModel, sequences: Sequences) -> Logits:
    """Return the logits in float32.

    Raises:
        UnsupportedModel: The model cannot be computed in float32.
    """
    try:
        with in_float32(model.module):
            return _eager_logits(model, sequences)
    except RuntimeError as error:  # parts that share weights, or not enough memory
        problem = f"paged attention differs from transformers' own, and float32 cannot tell which is right: {error}"
        raise UnsupportedModel(type(model.module).__name__, problem) from error


def _right_in_float32(model: LoadedModel, sequences: Sequences, exact: Logits) -> bool:
    """Return whether the model with plain paged attention matches eager attention in float32.

    Then only rounding differs. Kernels are compared with the reference separately.
    """
    states = tuple(replace(each, dtype=torch.float32) for each in model.geometry.states)
    geometry = replace(model.geometry, kv_dtype="float32", states=states)
    wide = replace(model, dtype=torch.float32, geometry=geometry)
    if model.fused is not None:
        plain = replace(model.fused, operations=WideOperations(), attention=ReferenceAttention())
        with in_float32(model.module):  # recurrent layers are transformers' own
            return distance(_paged_logits(replace(wide, fused=plain), sequences), exact) <= TOLERANCE[torch.float32]
    context, attention = model.context, model.context.attention
    context.attention = ReferenceAttention()
    try:
        with in_float32(model.module):
            return distance(_paged_logits(wide, sequences), exact) <= TOLERANCE[torch.float32]
    except RuntimeError as error:  # as above
        log.info("no trial in float32: %s", error)
        return False
    finally:
        context.attention = attention


def _has_described_router(model: LoadedModel) -> bool:
    return model.fused is not None and any(each.mixture is not None for each in model.fused.layers)


def _eager_logits(model: LoadedModel, sequences: Sequences) -> Logits:
    use_attention(model.module, "eager")
    try:
        found = []
        for sequence in sequences:
            token_ids = model.device.upload(sequence)[None]
            output = model.module(input_ids=token_ids, use_cache=False, return_dict=True)
            found.append(output.logits[0].float())
        return found
    finally:
        use_attention(model.module, ATTENTION_NAME)


def _paged_logits(model: LoadedModel, sequences: Sequences) -> Logits:
    geometry = model.geometry
    if geometry.dtype.scale_bytes:  # this tests the model; KV quantisation has its own tests
        geometry = replace(geometry, kv_dtype=str(model.dtype).removeprefix("torch."))
    geometry = replace(geometry, states=tuple(replace(each, kept=None) for each in geometry.states))  # so do states
    blocks = -(-int(LENGTHS.max()) // geometry.block_size)
    width = blocks * (1 + geometry.window_pages) + geometry.state_blocks
    tables = np.arange(2 * width, dtype=np.int32)[::-1].reshape(2, width).copy()
    pool = KvPool(geometry, 2 * width, model.device)
    try:
        starts = np.zeros(2, np.int32)
        got: list[list[torch.Tensor]] = [[], []]
        for counts in (FIRST, LENGTHS - FIRST):
            logits = _pass(model, pool, tables, starts, counts, sequences)
            for row, part in enumerate(torch.split(logits, counts.tolist())):
                got[row].append(part)
            starts = starts + counts
        return [torch.cat(parts) for parts in got]
    finally:
        pool.close()


def _pass(
    model: LoadedModel,
    pool: KvPool,
    tables: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    sequences: Sequences,
) -> torch.Tensor:
    geometry = pool.geometry  # pages have the size of this pool's dtype
    blocks = -(-int(LENGTHS.max()) // geometry.block_size)
    tables, rings, states = np.split(tables, [blocks, blocks * (1 + geometry.window_pages)], axis=1)
    windows = None
    if geometry.window:
        windows = WindowTables(np.zeros(len(tables), np.int64), rings.reshape(len(tables), blocks, -1))
    batch = pool.batch(tables, starts, counts, states=states, windows=windows)
    spans = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    token_ids = np.concatenate([sequence[span] for sequence, span in zip(sequences, spans, strict=True)])
    upload = model.device.upload
    every = upload(np.arange(batch.tokens))
    return model.forward(upload(token_ids), upload(np.concatenate(spans)), every, batch, pool)
