"""Rows with block tables that begin alike are read once on a CPU, and have the bits that each has alone."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from kvforge.worker.attention import AttentionOptions, PagedBatch, cpu_attention
from kvforge.worker.attention.cpu_attention import QUERIES, CpuAttention, plan_of
from kvforge.worker.attention.shared_prefixes import shared_prefixes
from kvforge.worker.cpu.attention_kernel import PART
from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device
from tests.worker.attention.cases import Case, sinks

pytestmark = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())
BLOCK_SIZE, COUNT = 48, 3  # a part is no whole number of these blocks; where an item has its count
# Start and count of each row, and how many of its blocks are those of which earlier row.
ROWS = [
    ((3 * PART + 70, 1), 0, 0),
    ((2 * PART + 5, 1), 0, 42),
    ((3 * PART - 1, 1), 0, 31),
    ((PART, 90), 0, 11),  # a prompt shares its blocks, and not their reads
    ((3 * PART + 70, 1), 0, 23),
    ((2 * PART, 1), 4, 99),  # a draft of the row before: all of its blocks, and fewer tokens
    ((2 * PART + 1, 1), 4, 99),
    ((2 * PART - 1, 1), 4, 99),  # it sees two parts and nothing else
    ((PART + 200, 1), 1, 11),
    ((PART - 2, 1), 0, 10),  # it sees no whole part
    ((2 * PART + 9, 1), 10, 0),
    ((2 * PART + 400, 1), 10, 31),
    ((7, 1), 12, 0),
]


def sharing(case: Case, device: Device, rows: list[tuple[int, int, int]]) -> PagedBatch:
    """Return the batch of a case with tables that begin alike: (row, earlier row, blocks)."""
    tables = case.tables.copy()
    for row, earlier, blocks in rows:
        count = min(blocks, int(-(-case.lengths[row] // BLOCK_SIZE)), int(-(-case.lengths[earlier] // BLOCK_SIZE)))
        tables[row, :count] = tables[earlier, :count]
    return PagedBatch.build(tables, case.starts, case.counts, BLOCK_SIZE, device)


def alone(case: Case, batch: PagedBatch, device: Device, options: AttentionOptions) -> torch.Tensor:
    """Return the attention of each row by itself."""
    found = []
    for row in range(len(batch.counts)):
        pieces = batch.tables[row : row + 1].astype(np.int32), case.starts[row : row + 1], case.counts[row : row + 1]
        query = case.query[batch.query_starts[row] : batch.query_starts[row + 1]]
        found.append(CpuAttention().attend(query, case.layer, PagedBatch.build(*pieces, BLOCK_SIZE, device), options))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "heads", "head_size", "softcap", "has_sinks"),
    [
        (torch.float32, torch.float32, (6, 2), 64, 0.0, False),
        (torch.bfloat16, torch.bfloat16, (4, 4), 80, 0.0, True),
        (torch.float32, torch.int8, (8, 1), 64, 5.0, False),
        (torch.bfloat16, torch.float8_e4m3fn, (6, 2), 100, 0.0, False),
    ],
    ids=str,
)
def test_rows_have_the_bits_that_they_have_alone(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: tuple[int, int],
    head_size: int,
    softcap: float,
    has_sinks: bool,
    cpu: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case([row for row, _, _ in ROWS], heads, head_size, BLOCK_SIZE, cpu, dtype, kv_dtype)
    options = AttentionOptions(head_size**-0.5, softcap=softcap, sinks=sinks(heads[0], cpu) if has_sinks else None)
    case.paged(options, CpuAttention())
    for memory in (case.keys, case.values, case.layer.key_scales, case.layer.value_scales):
        if memory is not None:  # a row may share more of a block than the earlier row has filled
            memory.copy_(memory.float().nan_to_num(nan=0.5).to(memory.dtype))
    batch = sharing(case, cpu, [(row, earlier, blocks) for row, (_, earlier, blocks) in enumerate(ROWS)])
    want = alone(case, batch, cpu, options)
    assert want.isfinite().all()
    monkeypatch.setattr(cpu_attention, "threads_for", lambda _: 3)
    for splits in (True, False):
        monkeypatch.setattr(cpu_attention, "_splits", lambda *_, splits=splits: splits)
        batch.plans.clear()
        attention = CpuAttention()
        for _ in range(2):  # the counters are restored
            assert torch.equal(attention.attend(case.query, case.layer, batch, options), want)
        plan = plan_of(batch, *heads, head_size, 0)
        shared = plan.items[plan.items[:, -1] >= 0]
        assert sorted(set(plan.members.tolist())) == [0, 1, 2, 93, 94, 95, 96, 99, 100]
        items = 1 + -(-7 // (QUERIES // (heads[0] // heads[1])))
        assert len(shared) == (2 * items if splits else items)


def test_layers_with_a_window_share_nothing(cpu: Device) -> None:
    case = Case([(2 * PART, 1)] * 2, (6, 2), 64, BLOCK_SIZE, cpu)
    batch = sharing(case, cpu, [(1, 0, 20)])
    assert (plan_of(batch, 6, 2, 64, 100).items[:, -1] == -1).all()
    assert (plan_of(batch, 6, 2, 64, 0).items[:, -1] >= 0).any()


def test_many_rows_are_several_items_and_many_heads_share_nothing(cpu: Device) -> None:
    rows = 40
    tables = np.arange(rows * 12, dtype=np.int32).reshape(rows, 12)
    tables[:, :11] = tables[0, :11]
    batch = PagedBatch.build(tables, np.full(rows, 520, np.int32), np.ones(rows, np.int32), BLOCK_SIZE, cpu)
    shared = plan_of(batch, 6, 2, 64, 0).items
    shared = shared[shared[:, -1] >= 0]
    assert sorted(shared[:, COUNT].tolist()) == [13, 13, 14]
    assert shared[:, COUNT].max() * 3 <= QUERIES
    assert (plan_of(batch, QUERIES, 1, 64, 0).items[:, -1] == -1).all()


@pytest.mark.parametrize("seed", range(40))
def test_sets_are_disjoint_and_share_what_each_of_their_rows_sees(seed: int, cpu: Device) -> None:
    random = Random(seed)
    size, part, rows = random.choice((2, 3, 4, 16)), 12, random.randint(1, 12)
    lengths = [random.randint(1, 90) for _ in range(rows)]
    counts = [1 if random.random() < 0.9 else random.randint(1, length) for length in lengths]
    tables = np.arange(rows * 46, dtype=np.int32).reshape(rows, 46)
    for row in range(1, rows):
        like, blocks = random.randrange(row), random.randint(0, 45)
        tables[row, :blocks] = tables[like, :blocks]
    arrays = np.array(lengths, np.int32) - np.array(counts, np.int32), np.array(counts, np.int32)
    batch = PagedBatch.build(tables, *arrays, size, cpu)
    seen = list[int]()
    for members, parts in shared_prefixes(batch, part):
        blocks = -(-parts * part // size)
        assert members.size > 1 and parts > 0
        assert (tables[members, :blocks] == tables[members[0], :blocks]).all()
        assert all(counts[row] == 1 and lengths[row] >= parts * part for row in members.tolist())
        seen += members.tolist()
    assert len(seen) == len(set(seen))
    for row in range(rows):  # a row that could share with a free one is in a set
        for other in range(row):
            both = min(lengths[row], lengths[other]) // part * part
            alike = (tables[row, : -(-part // size)] == tables[other, : -(-part // size)]).all()
            if both and alike and counts[row] == counts[other] == 1:
                assert row in seen or other in seen
