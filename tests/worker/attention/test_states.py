"""Recurrent states in pages of the KV pool, and attention over a pool in pages."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.attention import AttentionOptions, PagedAttention, ReferenceAttention, choose_attention
from kvforge.worker.attention.pool import KvGeometry, KvPool, LayerShape
from kvforge.worker.attention.states import ALIGNMENT, StateLayout, StatePages, StateTensor
from kvforge.worker.device.device import Device
from tests.pairs import every_pair
from tests.worker.attention.cases import HEADS, STEPS, Case

F32, BF16 = torch.float32, torch.bfloat16
STATES = (
    StateTensor(0, "conv 0", (1, 40, 3), BF16),  # a unit of 6 bytes
    StateTensor(0, "recurrent 0", (1, 5, 8, 8), F32),  # of 256
    StateTensor(1, "recurrent 0", (1, 3, 4, 200), F32),  # of 3,200, more than a page of 2,048: rows stay together
    StateTensor(2, "flat", (1, 700), F32),  # single numbers
)


def geometry(states: tuple[StateTensor, ...] = STATES, layers: int = 2, kv_dtype: str = "float32") -> KvGeometry:
    return KvGeometry((LayerShape(2, 16),) * layers, 8, kv_dtype, states)


@pytest.mark.parametrize("page_bytes", [1024, 2048, 1 << 20])
def test_spans_cover_each_tensor_once_in_whole_units(page_bytes: int) -> None:
    layout = StateLayout(STATES, page_bytes)
    used = np.zeros((layout.pages, page_bytes), np.int64)
    for tensor, spans in zip(layout.tensors, layout.spans, strict=True):
        assert sum(span.size for span in spans) == tensor.nbytes
        unit = tensor.unit_bytes(page_bytes)
        assert unit <= page_bytes
        for span in spans:
            assert span.size % unit == 0
            assert span.offset + span.size <= page_bytes
            used[span.page, span.offset : span.offset + span.size] += 1
        assert spans[0].offset % ALIGNMENT == 0
    assert used.max() == 1
    assert used.any(axis=1).all()  # no page is left empty


def test_units_are_as_large_as_a_page_allows() -> None:
    assert [tensor.unit_bytes(2048) for tensor in STATES] == [6, 256, 800, 4]
    assert StateLayout(STATES[1:2], 512).spans[0][0].size == 512  # two matrices of five in each page
    assert StateLayout(STATES[1:2], 512).pages == 3
    assert StateLayout(STATES[1:2], 640).pages == 3  # 640 = 2.5 matrices: none is cut


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_a_state_comes_back_from_scattered_pages_and_touches_no_other(kv_dtype: str, cpu: Device) -> None:
    pool = KvPool(geometry(kv_dtype=kv_dtype), 40, cpu)
    memory, *_ = pool.tensors()
    memory.view(torch.uint8).random_(0, 255)
    before = memory.view(torch.uint8).clone()
    count, generator = pool.geometry.state_blocks, torch.Generator().manual_seed(1)
    order = np.random.default_rng(1).permutation(40)[: 2 * count].tolist()
    rows = [order[:count], order[count:]]
    states = [
        {t.name: torch.randn(t.shape, generator=generator).to(t.dtype) for t in STATES if t.layer == layer}
        for layer in range(3)
        for _ in rows
    ]
    assert pool.states is not None
    for number, state in enumerate(states):
        pool.states.store(number // 2, rows[number % 2], state)
    for number, state in enumerate(states):
        found = pool.states.load(number // 2, rows[number % 2])
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)
    others = np.setdiff1d(np.arange(40), order)
    assert torch.equal(memory.view(torch.uint8)[others], before[others])


def test_a_loaded_state_is_a_copy(cpu: Device) -> None:
    pool = KvPool(geometry(), 8, cpu)
    pool.zero_blocks(np.arange(8, dtype=np.int32))
    assert pool.states is not None
    pages = list(range(pool.geometry.state_blocks))
    pool.states.load(0, pages)["recurrent 0"].fill_(1)
    assert not pool.states.load(0, pages)["recurrent 0"].any()


def test_the_bytes_of_a_pool_in_pages_are_those_of_its_keys_and_values(cpu: Device) -> None:
    found = geometry()
    assert found.bytes_per_block == replace(found, states=()).bytes_per_block == 2 * 2 * 2 * 16 * 8 * 4
    assert found.entries_per_block == 4 and replace(found, states=()).entries_per_block == 1
    total = sum(tensor.nbytes for tensor in STATES)
    assert found.state_blocks >= -(-total // found.bytes_per_block)
    assert replace(found, states=()).state_blocks == 0
    pool = KvPool(found, 5, cpu)
    assert sum(each.nbytes for each in pool.tensors()) == pool.bytes
    pool.close()
    assert not list(pool.tensors()) and pool.states is None


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
@pytest.mark.parametrize("sliced", [16, 0])
def test_copies_and_zeros_reach_all_layers_of_a_page(
    sliced: int, kv_dtype: str, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.worker.attention.pool.SLICED_COPIES_MAX", sliced)
    pool = KvPool(geometry(kv_dtype=kv_dtype), 6, cpu)
    tensors = [memory.view(torch.uint8) for memory in pool.tensors()]
    assert len(tensors) == (1 if kv_dtype == "float32" else 2)  # scales lie apart
    for memory in tensors:
        memory.random_(0, 255)  # among them NaN with payloads
    befores = [memory.clone() for memory in tensors]
    pool.copy_blocks(np.array([[0, 3, 8], [1, 4, 5], [2, 5, 0]], np.int32))
    for after, before in zip(tensors, befores, strict=True):
        assert torch.equal(after[3], before[0])
        assert torch.equal(after[4, :, :5], before[1, :, :5]) and torch.equal(after[4, :, 5:], before[4, :, 5:])
        assert torch.equal(after[[0, 1, 2, 5]], before[[0, 1, 2, 5]])
    pool.zero_blocks(np.array([1, 4], np.int32))
    for after, before in zip(tensors, befores, strict=True):
        assert not after[[1, 4]].any()
        assert torch.equal(after[[0, 2, 5]], before[[0, 2, 5]])


@pytest.mark.parametrize(
    ("layers", "block_size", "kv_dtype", "field"),
    [
        ((LayerShape(2, 8), LayerShape(1, 16)), 8, "float32", "layers"),
        ((LayerShape(2, 8), LayerShape(2, 8, shared_with=0)), 8, "float32", "layers"),
        ((LayerShape(1, 1),), 1, "float32", "bytes_per_block"),
    ],
)
def test_layouts_that_cannot_hold_states_are_refused(
    layers: tuple[LayerShape, ...], block_size: int, kv_dtype: str, field: str
) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        KvGeometry(layers, block_size, kv_dtype, STATES)
    assert caught.value.field == field
    KvGeometry(layers, block_size, kv_dtype)


def test_a_pool_with_more_slots_than_kernels_can_name_is_refused(cpu: Device) -> None:
    found = KvGeometry((LayerShape(1, 1),) * 64, 1 << 16, "float16", STATES)
    blocks = 2**31 // (128 << 16)
    with pytest.raises(InvalidConfiguration, match=f"more than {blocks - 1}") as caught:
        KvPool(found, blocks, cpu)
    assert caught.value.field == "blocks"


def attentions() -> list[str]:
    found = ["reference", "auto"]
    return [*found, "triton"] if importlib.util.find_spec("triton") is not None else found


@pytest.mark.parametrize(
    ("kind", "step", "kv_dtype"),
    [
        pytest.param(kind, *pair.values, marks=pair.marks if kind == "triton" else [])
        for kind in attentions()
        for pair in every_pair(STEPS, ["float32", "int8", "fp8"])
    ],
)
def test_attention_over_pages_gives_the_bits_of_a_pool_of_layers(
    kind: str, step: str, kv_dtype: str, cpu: Device
) -> None:
    """A pool in pages differs by nothing but its tables."""
    attention: PagedAttention = ReferenceAttention() if kind == "reference" else choose_attention(cpu, kind)
    # The interpreter takes 10 ms for a token: rows of at most four blocks, some of which begin inside a block.
    rows = STEPS[step] if kind != "triton" else [(start % 20, min(count, 10)) for start, count in STEPS[step]]
    for layers, heads in ((1, HEADS["GQA"]), (3, HEADS["MQA"])):
        case = Case(rows, heads, 32, 8, cpu)
        shapes = (LayerShape(heads[1], 32),) * layers
        paged = KvPool(KvGeometry(shapes, 8, kv_dtype, STATES), len(case.keys), cpu)
        plain = KvPool(KvGeometry(shapes, 8, kv_dtype), len(case.keys), cpu)
        for tensor in (*paged.tensors(), *plain.tensors()):
            if tensor.dtype == torch.float32:
                tensor.fill_(float("nan"))
            else:
                tensor.view(torch.int8).fill_(127)  # NaN in fp8
        for layer in range(layers):
            found = []
            for pool in (plain, paged):
                width = int(-(-case.lengths.max() // 8))
                tables = np.where(case.tables < len(case.keys), case.tables, 0)[:, :width]
                before = pool.batch(tables, np.zeros_like(case.starts), case.lengths)
                attention.write(torch.cat(case.k) + layer, torch.cat(case.v), pool.layers[layer], before)
                batch = pool.batch(tables, case.starts, case.counts)
                attention.write(case.new_k + layer, case.new_v, pool.layers[layer], batch)
                found.append(attention.attend(case.query, pool.layers[layer], batch, AttentionOptions(0.2)))
            assert torch.isfinite(found[0]).all()
            assert torch.equal(*found)
        for layer in range(layers):  # no layer wrote into another one's part of a page
            for ours, theirs in zip(paged.layers[layer].tensors(), plain.layers[layer].tensors(), strict=True):
                entries = ours[:: paged.geometry.entries_per_block]
                assert torch.equal(entries.contiguous().view(torch.uint8), theirs.view(torch.uint8))
        paged.close()
        plain.close()


def test_a_layout_reads_the_memory_of_any_pool() -> None:
    memory = torch.zeros((3, 2048), dtype=torch.uint8)
    pages = StatePages(StateLayout(STATES[:1], 2048), memory)
    pages.store(0, [2], {"conv 0": torch.ones((1, 40, 3), dtype=BF16)})
    assert memory[2, : 40 * 3 * 2].view(BF16).eq(1).all()
    assert not memory[:2].any()


@pytest.mark.parametrize("kept", [None, BF16])
def test_states_of_several_rows_are_those_of_each(kept: torch.dtype | None) -> None:
    """Read and written by rows, by lines and alone; nothing else is touched."""
    states = tuple(replace(each, kept=kept) if each.dtype == F32 else each for each in STATES)
    layout = StateLayout(states, 2048)
    memory = torch.randint(0, 127, (3 * layout.pages, 2048), dtype=torch.uint8)
    pages = torch.randperm(len(memory)).view(3, -1).int()
    held = StatePages(layout, memory)
    for tensor in states:
        rows, before = held.rows(tensor.layer, tensor.name, pages), memory.clone()
        rows.write(torch.randn(3, *tensor.shape[1:]))
        alone = [held.load(tensor.layer, each.tolist())[tensor.name] for each in pages]
        assert torch.equal(rows.read(), torch.cat(alone))
        if rows.lines is None:
            assert tensor.name == "flat"  # a line longer than a page
            continue
        where = pages[:, rows.lines[:, 0].long()].long() * 2048 + rows.lines[:, 1]
        size = tensor.shape[-1] * tensor.stored.itemsize
        lines = memory.view(-1)[where[..., None] + torch.arange(size)].flatten(1)
        assert torch.equal(lines.view(tensor.stored).to(tensor.dtype).view(rows.read().shape), rows.read())
        written = torch.zeros_like(memory, dtype=torch.bool)
        written.view(-1)[where[..., None] + torch.arange(size)] = True
        assert torch.equal(memory[~written], before[~written])
