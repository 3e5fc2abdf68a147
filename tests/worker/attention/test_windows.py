"""Layers that keep a window give the bits of layers that keep everything."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.attention import (
    AttentionOptions,
    PagedAttention,
    PagedBatch,
    ReferenceAttention,
    choose_attention,
)
from kvforge.worker.attention.cpu_attention import CpuAttention
from kvforge.worker.attention.pool import KvGeometry, KvPool, LayerShape
from kvforge.worker.attention.windows import (
    ALIGNMENT,
    WindowLimits,
    base_of,
    keeping_windows,
    lowered_width,
    seen_blocks,
)
from kvforge.worker.cpu.attention_kernel import CHUNK, PART
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.targets import TARGETS
from tests.worker.attention.cases import sinks
from tests.worker.attention.window_rows import PagedRows

FULL, WINDOWED = 0, 1
ORDER = (WINDOWED, WINDOWED, FULL, WINDOWED, WINDOWED, WINDOWED, FULL, WINDOWED)  # six of eight: three pages a block
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
WRITTEN = 2  # passes that only write, where a kernel is interpreted


HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = pytest.param("triton", marks=[pytest.mark.soak, pytest.mark.skipif(not HAS_TRITON, reason="no triton")])


def passes(block_size: int) -> list[list[tuple[int, int, int]]]:
    """Return (row, start, count) of each pass: prompts in chunks beside decodes.

    One row passes the first multiple of ALIGNMENT that is one of the block size: from then on it is lowered.
    """
    first = math.lcm(block_size, ALIGNMENT)
    return [
        [(0, 0, first - 212), (1, 0, 5)],
        [(0, first - 212, 285), (1, 5, 1)],
        [(0, first + 73, 30), (1, 6, 30)],
        [(0, first + 103, 1), (1, 36, 1)],
        [(1, 37, 1), (0, first + 104, 1)],
    ]


def shapes(window: int) -> tuple[LayerShape, ...]:
    return tuple(LayerShape(KV_HEADS, HEAD_SIZE, window=window * kind) for kind in ORDER)


class Pair:
    """The same sequences in a pool that keeps everything, and in one that keeps windows."""

    def __init__(
        self, window: int, block_size: int, kv_dtype: str, device: Device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.window, self.device, self.dtype = window, device, dtype
        self.width = (math.lcm(block_size, ALIGNMENT) + 128) // block_size
        blocks = 2 * (self.width + 1)
        self.pools = [
            KvPool(KvGeometry(shapes(0), block_size, kv_dtype), blocks, device),
            KvPool(KvGeometry(shapes(window), block_size, kv_dtype), 5 * blocks, device),
        ]
        self.rows = [PagedRows(pool, 2, self.width, 16 * self.width, seed) for seed, pool in enumerate(self.pools)]
        self._generator = torch.Generator().manual_seed(3)

    def batches(self, rows: list[tuple[int, int, int]]) -> list[PagedBatch]:
        order, starts, counts = (list(each) for each in zip(*rows, strict=True))
        found = []
        for pool, paged in zip(self.pools, self.rows, strict=True):
            for row in rows:
                paged.reserve(*row)
            width = -(-max(start + count for _, start, count in rows) // pool.block_size)
            arrays = np.array(starts, np.int32), np.array(counts, np.int32)
            tables = np.where(paged.tables < pool.blocks, paged.tables, 0)[order, :width]
            found.append(pool.batch(tables, *arrays, windows=paged.windows(order, starts, counts)))
        return found

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        numbers = torch.randn((tokens, heads, HEAD_SIZE), generator=self._generator)
        return numbers.to(self.device.torch_device, self.dtype)

    def compare(
        self,
        attention: PagedAttention,
        batches: list[PagedBatch],
        options: AttentionOptions,
        attends: bool = True,
        layers: tuple[int, ...] = tuple(range(len(ORDER))),
    ) -> None:
        tokens = batches[0].tokens
        for layer in layers:
            kind = ORDER[layer]
            query, key, value = self.random(tokens, HEADS), self.random(tokens, KV_HEADS), self.random(tokens, KV_HEADS)
            own = replace(options, window=self.window if kind == WINDOWED else 0)
            found = []
            for pool, batch in zip(self.pools, batches, strict=True):
                cache, part = pool.layers[layer], pool.batch_of(layer, batch)
                writer = attention if attends else ReferenceAttention()
                writer.write(key.clone(), value.clone(), cache, part)
                found.append(attention.attend(query.clone(), cache, part, own) if attends else query)
            assert torch.isfinite(found[0]).all()
            assert torch.equal(*found)

    def release(self, rows: list[tuple[int, int, int]]) -> None:
        for row, start, count in rows:
            self.rows[1].release(row, start + count)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "kv_dtype"), [(40, "bfloat16"), (40, "int8"), (300, "fp8")])
def test_bits_on_a_gpu(window: int, kv_dtype: str) -> None:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    pair, attention = Pair(window, 16, kv_dtype, device, torch.bfloat16), choose_attention(device)
    for rows in passes(16):
        pair.compare(attention, pair.batches(rows), AttentionOptions(0.25, sinks=sinks(HEADS, device)))
        pair.release(rows)


def kernels(kind: str, device: Device) -> PagedAttention:
    return ReferenceAttention() if kind == "reference" else choose_attention(device, kind)


@pytest.mark.parametrize("kind", ["reference", "auto", INTERPRETED])
@pytest.mark.parametrize(
    ("window", "block_size", "kv_dtype", "softcap", "with_sinks"),
    [
        (3, 8, "float32", 0.0, False),  # smaller than a block
        (40, 16, "float32", 0.0, True),
        (64, 16, "int8", 30.0, False),
        (50, 12, "fp8", 0.0, True),  # blocks that do not divide the tiles
        (2000, 16, "float32", 0.0, False),  # larger than the sequences
    ],
)
def test_bits_of_layers_that_keep_everything(
    kind: str, window: int, block_size: int, kv_dtype: str, softcap: float, with_sinks: bool, cpu: Device
) -> None:
    pair, attention = Pair(window, block_size, kv_dtype, cpu), kernels(kind, cpu)
    options = AttentionOptions(0.25, softcap=softcap, sinks=sinks(HEADS, cpu) if with_sinks else None)
    for number, rows in enumerate(passes(block_size)):
        batches = pair.batches(rows)
        for part in batches[1].windows if number >= WRITTEN else ():
            assert (int((batches[1].lengths - part.lengths).max()) > 0) == (window < ALIGNMENT)
        pair.compare(attention, batches, options, attends=kind != "triton" or number >= WRITTEN)
        pair.release(rows)


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_bits_of_interpreted_kernels(cpu: Device) -> None:
    """Two layers of different parts, as the interpreter is slow; all of them are soak tests."""
    pair, attention = Pair(40, 16, "float32", cpu), choose_attention(cpu, "triton")
    for rows in passes(16)[:2]:
        pair.compare(attention, pair.batches(rows), AttentionOptions(0.25), attends=False)
        pair.release(rows)
    for rows in ([(0, 585, 3), (1, 6, 17)], [(0, 588, 1), (1, 23, 1)]):
        pair.compare(attention, pair.batches(rows), AttentionOptions(0.25), layers=(0, 2, 7))
        pair.release(rows)


@pytest.mark.parametrize("kind", ["reference", "auto", INTERPRETED])
def test_static_batches(kind: str, cpu: Device) -> None:
    """A batch that is refilled has the bits of batches that are built, also in the memory of a larger one."""
    pair, attention = Pair(40, 16, "float32", cpu), kernels(kind, cpu)
    options = AttentionOptions(0.25)
    for rows in passes(16)[:3]:
        pair.compare(ReferenceAttention(), pair.batches(rows), options, attends=False)
        pair.release(rows)
    pool, paged = pair.pools[1], pair.rows[1]
    largest = pool.static_batch(4, pair.width)
    static = pool.static_batch(3, pair.width, largest)
    for rows in passes(16)[3:]:
        order, starts, _ = (list(each) for each in zip(*rows, strict=True))
        built = pair.batches(rows)[1]
        tables = np.where(paged.tables < pool.blocks, paged.tables, 0)[order]
        pool.fill(static, tables, np.array(starts, np.int32) + 1, windows=paged.windows(order, starts, [1, 1]))
        for layer, kind_of_layer in enumerate(ORDER):
            query, key = pair.random(3, HEADS), pair.random(3, KV_HEADS)
            own = replace(options, window=40 if kind_of_layer == WINDOWED else 0)
            found = []
            for batch, count in ((built, 2), (static, 3)):
                part = pool.batch_of(layer, batch)
                attention.write(key[:count], key[:count], pool.layers[layer], part)
                found.append(attention.attend(query[:count].clone(), pool.layers[layer], part, own)[:2])
            assert torch.equal(*found)
    pool.fill(static, np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
    assert all((part.kv_slots == -1).all() for part in static.windows)


def test_parts_have_plans_and_arrays_in_common(cpu: Device) -> None:
    """The parts of a window differ in tables and slots: all else is made and sent once."""
    pair = Pair(40, 16, "float32", cpu)
    (_, batch) = pair.batches(passes(16)[0])
    first, *others = batch.windows
    assert others and all(each.leader is first for each in others) and first.leader is None
    made = first.device_array("lengths", lambda each: each.lengths.astype(np.int32))
    assert all(each.device_array("lengths", lambda _: np.zeros(0, np.int32)) is made for each in others)
    assert len({each.tables_on_device.data_ptr() for each in batch.windows}) == len(batch.windows)
    attention = CpuAttention()
    for layer, kind in enumerate(ORDER):
        part = pair.pools[1].batch_of(layer, batch)
        options = AttentionOptions(0.25, window=40 * kind)
        attention.attend(torch.zeros(batch.tokens, HEADS, HEAD_SIZE), pair.pools[1].layers[layer], part, options)
    plans = [next(iter(each.plans.values())) for each in batch.windows]
    assert all(plan.items is plans[0].items for plan in plans)
    assert len({plan.tables.ctypes.data for plan in plans}) == len(plans)


def test_rows_are_lowered_by_multiples_of_every_tile() -> None:
    tiles = {tiles.keys for target in TARGETS.values() for table in (target.decode, target.decode_few, target.prefill)
             for tiles in table.values()}  # fmt: skip
    assert all(ALIGNMENT % keys == 0 for keys in (*tiles, CHUNK, PART, 128))
    starts = np.arange(3000)
    for window, block_size in ((1, 16), (40, 24), (1024, 16)):
        base = base_of(starts, window, block_size)
        assert (base % block_size == 0).all() and (base % ALIGNMENT == 0).all()
        assert (base <= np.maximum(starts - window + 1, 0)).all()
        width = -(-(starts + 1 - base) // block_size)
        assert width.max() == lowered_width(window, block_size)


def test_a_ring_holds_what_a_step_sees() -> None:
    for window, tokens, block_size in ((1, 1, 16), (5, 700, 16), (128, 512, 16), (1000, 3, 7)):
        starts = np.arange(4000)
        first, last = seen_blocks(starts, starts + tokens, window, block_size)
        assert (last - first).max() < WindowLimits(tokens, 2**30, 0).ring_blocks(window, block_size)
    assert WindowLimits(512, 20, 0).ring_blocks(128, 16) == 20  # all of a sequence


def test_a_page_has_the_layers_without_a_window() -> None:
    found = KvGeometry(shapes(40), 16, "int8")
    assert found.entries_per_block == 4 and found.window_pages == 3 and found.window == 40
    assert found.bytes_per_block == KvGeometry(shapes(0)[:2], 16, "int8").bytes_per_block
    assert found.places == ((1, 0), (1, 2), (0, 0), (2, 0), (2, 2), (3, 0), (0, 2), (3, 2))


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        ((LayerShape(2, 8, window=4), LayerShape(2, 8, window=4)), "window"),
        ((LayerShape(2, 8), LayerShape(2, 8, window=4), LayerShape(2, 8, window=5)), "window"),
        ((LayerShape(2, 8), LayerShape(2, 16, window=4)), "layers"),
        ((LayerShape(2, 8), LayerShape(2, 8, shared_with=0, window=4)), "shared_with"),
    ],
)
def test_windows_that_pages_cannot_hold_are_refused(layers: tuple[LayerShape, ...], field: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        KvGeometry(layers, 8, "float32")
    assert caught.value.field == field


SHAPE = LayerShape(2, 8)


@pytest.mark.parametrize(
    ("layers", "windows", "context", "reason"),
    [
        ((SHAPE,) * 6, (1024,) * 5 + (0,), 32768, ""),  # Gemma 3
        ((SHAPE,) * 4, (128, 0) * 2, 4096, ""),  # gpt-oss
        ((SHAPE,) * 6, (1024,) * 5 + (0,), 1024, "saves nothing"),
        ((SHAPE,) * 4, (512, 0, 0, 0), 600, "saves nothing"),  # pages are filled up
        ((SHAPE,) * 2, (0, 0), 4096, "no layer has a window"),
        ((SHAPE,) * 2, (64, 64), 4096, "no layer attends to all tokens"),
        ((SHAPE,) * 3, (64, 32, 0), 4096, "windows of 32, 64"),
        ((SHAPE, LayerShape(1, 8)), (64, 0), 4096, "differ in the shape"),
        ((SHAPE, replace(SHAPE, shared_with=0)), (64, 0), 4096, "share K and V"),
        ((SHAPE, SHAPE, replace(SHAPE, shared_with=0)), (64, 0, 64), 4096, ""),  # Gemma 3n
    ],
)
def test_layers_keep_windows_where_that_saves_memory(
    layers: tuple[LayerShape, ...], windows: tuple[int, ...], context: int, reason: str
) -> None:
    found, why = keeping_windows(layers, windows, context)
    if reason:
        assert reason in why and found == layers
    else:
        assert why == "" and [each.window for each in found] == list(windows)
        assert KvGeometry(found, 16, "float32").window == max(windows)
