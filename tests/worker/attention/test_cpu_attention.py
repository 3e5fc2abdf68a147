"""The CPU's attention, compiled by Numba: dense attention's numbers, and batch-invariant bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from kvforge.worker.attention import AttentionOptions, PagedBatch, cpu_attention
from kvforge.worker.attention.cpu_attention import CpuAttention
from kvforge.worker.cpu.attention_kernel import PART
from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device
from tests.worker.attention.cases import HEADS, STEPS, Case, compare, sinks

pytestmark = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
# Across chunks and parts, in decodes and in prefills.
LONG = [(PART - 1, 1), (PART, 1), (2 * PART + 70, 1), (PART - 40, 90), (3, 1), (60, 7)]


# behaviour 37
@pytest.mark.parametrize("head_size", [8, 64, 80, 100, 256])
def test_host_equals_dense(head_size: int, cpu: Device) -> None:
    for rows, heads, block_size in itertools.product(STEPS.values(), HEADS.values(), (5, 16, 128)):
        case = Case(rows, heads, head_size, block_size, cpu)
        compare(case, AttentionOptions(scaling=head_size**-0.5), CpuAttention())


# behaviour 37
@pytest.mark.parametrize("window", [1, 5, 64, 1000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_window_and_softcap(softcap: float, window: int, cpu: Device) -> None:
    for rows in (*STEPS.values(), LONG):
        compare(Case(rows, (6, 2), 64, 16, cpu), AttentionOptions(0.3, window=window, softcap=softcap), CpuAttention())


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (64, 0.0), (0, 5.0), (5, 5.0)])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_sinks(heads: tuple[int, int], window: int, softcap: float, cpu: Device) -> None:
    options = AttentionOptions(0.3, window, softcap, sinks(heads[0], cpu))
    for rows in (*STEPS.values(), LONG):
        compare(Case(rows, heads, 64, 16, cpu), options, CpuAttention())
    for dtype, kv_dtype in ((BF16, BF16), (F16, F16), (F32, I8), (BF16, FP8)):
        case = Case(STEPS["mixed"], heads, 80, 16, cpu, dtype, kv_dtype)
        compare(case, replace(options, scaling=0.1), CpuAttention())


# behaviour 37
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(F16, F16), (BF16, BF16), (F32, I8), (F32, FP8), (BF16, I8), (F16, FP8), (F32, BF16)],
    ids=str,
)
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, cpu: Device) -> None:
    for head_size in (12, 80):
        case = Case(STEPS["mixed"], (6, 2), head_size, 16, cpu, dtype, kv_dtype)
        compare(case, AttentionOptions(head_size**-0.5), CpuAttention())


# behaviour 37
def test_slots_before_the_window_may_be_anything(cpu: Device) -> None:
    case = Case([(40, 1), (140, 3)], (4, 2), 64, 8, cpu)
    for row, blocks in ((0, 4), (1, 16)):
        case.keys[case.tables[row, :blocks]] = float("nan")
        case.values[case.tables[row, :blocks]] = float("inf")
    compare(case, AttentionOptions(0.125, window=8), CpuAttention())


def test_padding_of_a_static_batch_reads_nothing(cpu: Device) -> None:
    case = Case([(8, 1), (3, 1)], (2, 2), 64, 8, cpu)
    want = case.dense(AttentionOptions(0.125))
    case.batch = PagedBatch.static(4, 5, 8, cpu)
    case.batch.fill(case.tables, case.lengths)
    nothing = torch.full((2, 2, 64), float("nan"))
    case.query, case.new_k, case.new_v = (torch.cat((x, nothing)) for x in (case.query, case.new_k, case.new_v))
    got = case.paged(AttentionOptions(0.125), CpuAttention())
    assert float((got[:2].double() - want).abs().max()) <= 1e-5


def test_a_broken_number_shows_in_its_row_alone(cpu: Device) -> None:
    case = Case([(100, 1), (100, 1)], (4, 2), 64, 16, cpu)
    want = case.paged(AttentionOptions(0.125), CpuAttention())
    case.keys[case.tables[0, 2], 3, 0, 7] = float("nan")
    got = CpuAttention().attend(case.query, case.layer, case.batch, AttentionOptions(0.125))
    assert got[0, :2].isnan().all() and torch.equal(got[0, 2:], want[0, 2:]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.125),
        AttentionOptions(0.125, window=100, softcap=9.0),
        AttentionOptions(0.125, sinks=torch.linspace(-3.0, 3.0, 6)),
    ],
    ids=["plain", "window and soft cap", "sinks"],
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bits_depend_on_the_row_alone(
    dtype: torch.dtype, options: AttentionOptions, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on other rows, the chunks of a prompt, the number of threads or their parts."""
    case = Case(LONG, (6, 2), 64, 16, cpu, dtype)
    want = case.paged(options, CpuAttention())

    def row_by_row(first: int, start: int, counts: list[int], row: int) -> torch.Tensor:
        found = []
        for count in counts:
            pieces = case.tables[row : row + 1], np.array([start], np.int32), np.array([count], np.int32)
            batch = PagedBatch.build(*pieces, 16, cpu)
            found.append(CpuAttention().attend(case.query[first : first + count], case.layer, batch, options))
            first, start = first + count, start + count
        return torch.cat(found)

    firsts = np.cumsum([0, *case.counts[:-1]]).tolist()
    for row, (first, (start, count)) in enumerate(zip(firsts, LONG, strict=True)):
        cut = [count] if count == 1 else [1, 2, count - 3]
        assert torch.equal(row_by_row(first, start, cut, row), want[first : first + count])
    monkeypatch.setattr(cpu_attention, "threads_for", lambda _: 3)
    for splits in (True, False):
        monkeypatch.setattr(cpu_attention, "_splits", lambda *_, splits=splits: splits)
        case.batch.plans.clear()
        attention = CpuAttention()
        for _ in range(2):  # the counters are restored
            assert torch.equal(attention.attend(case.query, case.layer, case.batch, options), want)
