"""The dispatch of steps to Triton's kernels, against dense attention in float64.

On the CPU the kernels run in Triton's interpreter, on a selection of the grid; with a GPU on the whole grid.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import (
    AttentionOptions,
    KvLayer,
    PagedBatch,
    choose_attention,
    decode_plan,
    prefill_copy,
    triton_attention,
)
from kvforge.worker.attention.prefill import paged_prefill
from kvforge.worker.attention.prefill_copy import PAGE, copy_rows, workspace_for
from kvforge.worker.attention.prefill_plan import plan_prefill, prefill_shape
from kvforge.worker.attention.reference import rotate
from kvforge.worker.attention.triton_attention import TritonAttention, is_interpreted
from kvforge.worker.device.device import open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import TARGETS
from tests.worker.attention.cases import HEADS, STEPS, Case, broken_layer, compare, sinks

DEVICE = open_device("auto")
pytestmark = [
    pytest.mark.skipif(not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*"),  # numpy, for padding rows
]
F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
DTYPES = [(BF16, BF16), (F16, F16), (F32, F32), (BF16, I8), (F16, FP8), (F32, I8), (BF16, FP8), (F16, I8), (BF16, F32)]
OPTIONS = [
    AttentionOptions(0.1),
    AttentionOptions(0.2, 16),
    AttentionOptions(0.15, 0, 5.0),
    AttentionOptions(0.1, 5, 9.0),
]
HEAD_SIZES, BLOCK_SIZES = [64, 80, 96, 128, 256], [8, 16, 32, 64, 128]
# Short, for the interpreter: adjacent decodes, scattered decodes, and longer rows over cached tokens.
SMALL = [[(17, 1), (0, 1), (40, 1)], [(17, 1), (0, 9), (20, 3), (3, 1), (15, 2)], [(0, 5), (33, 1), (7, 1)]]


def options(number: int, head_size: int) -> AttentionOptions:
    chosen = OPTIONS[number % len(OPTIONS)]
    return replace(chosen, scaling=chosen.scaling * head_size**-0.5)


def with_sinks(number: int, head_size: int, heads: int) -> AttentionOptions:
    """Every other number has sinks too."""
    return replace(options(number, head_size), sinks=sinks(heads, DEVICE) if number // 4 % 2 else None)


# behaviour 37
@pytest.mark.skipif(DEVICE.runs_kernels, reason="the whole grid is run instead")
@pytest.mark.parametrize("number", range(25))
def test_selection_of_the_grid(number: int) -> None:
    head_size, block_size = HEAD_SIZES[number % 5], BLOCK_SIZES[(number + number // 5) % 5]
    heads = list(HEADS.values())[number % 3]
    dtype, kv_dtype = DTYPES[number % 9]
    case = Case(SMALL[number // 3 % 3], heads, head_size, block_size, DEVICE, dtype, kv_dtype)
    compare(case, with_sinks(number, head_size, heads[0]), TritonAttention(DEVICE))


# behaviour 37
@pytest.mark.gpu
@pytest.mark.skipif(not DEVICE.runs_kernels, reason="needs a GPU")
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_whole_grid(heads: tuple[int, int], head_size: int, block_size: int) -> None:
    """Every shape with every step; dtypes and options alternate, so that each meets every kind of shape."""
    shape = HEAD_SIZES.index(head_size) * 5 + BLOCK_SIZES.index(block_size) + sum(heads)
    for number, rows in enumerate([*STEPS.values(), *SMALL]):
        dtype, kv_dtype = DTYPES[(shape + 2 * number) % 9]
        case = Case(rows, heads, head_size, block_size, DEVICE, dtype, kv_dtype)
        compare(case, with_sinks(shape + number, head_size, heads[0]), TritonAttention(DEVICE))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("window", [0, 16])
def test_bits_with_sinks_depend_on_the_row_alone(
    window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of decodes in several parts, and of prompts, in a mixed step."""
    monkeypatch.setattr(decode_plan, "STEADY_MIN", 32)
    rows = [(150, 1), (0, 9), (20, 3), (3, 1), (70, 1)]
    case = Case(rows, (6, 2), 64, 16, DEVICE, dtype)
    attention, with_sinks = TritonAttention(DEVICE), AttentionOptions(0.125, window, sinks=sinks(6, DEVICE))
    attention._target = replace(attention._target, steady=True)
    compare(case, with_sinks, attention)
    together = attention.attend(case.query, case.layer, case.batch, with_sinks)
    first = 0
    for row, (start, count) in enumerate(rows):
        batch = PagedBatch.build(
            case.tables[row : row + 1], np.array([start], np.int32), np.array([count], np.int32), 16, DEVICE
        )
        alone = attention.attend(case.query[first : first + count], case.layer, batch, with_sinks)
        assert torch.equal(alone, together[first : first + count])
        first += count


def test_heads_may_begin_anywhere() -> None:
    """Kernels are compiled for strides that HEAD_UNIT divides: other inputs of a model are copied."""

    def apart(numbers: torch.Tensor) -> torch.Tensor:
        """Return the same numbers in rows of odd length at an odd offset."""
        tokens, heads, head_size = numbers.shape
        row = heads * (head_size + 3) + 2
        strided = torch.zeros(1 + tokens * row, dtype=numbers.dtype, device=numbers.device)[1:].as_strided(
            numbers.shape, (row, head_size + 3, 1), 1
        )
        return strided.copy_(numbers)

    case = Case(SMALL[1], (4, 2), 64, 8, DEVICE)
    case.query, case.new_k, case.new_v = (apart(each) for each in (case.query, case.new_k, case.new_v))
    compare(case, options(0, 64), TritonAttention(DEVICE))
    cos, sin = (torch.rand(case.batch.tokens, 64, device=DEVICE.torch_device) for _ in range(2))
    key, query = rotate(case.new_k, cos, sin), rotate(case.query, cos, sin)
    got = TritonAttention(DEVICE).write_rotated(case.query, case.new_k, case.new_v, cos, sin, case.layer, case.batch)
    assert torch.allclose(got, query, atol=1e-6)
    assert torch.allclose(case.keys.flatten(0, 1)[case.batch.slot_mapping], key, atol=1e-6)


def test_plans_of_the_last_step_are_made_ahead_and_no_others() -> None:
    attention = TritonAttention(DEVICE)
    steps = [Case(SMALL[1], (4, 2), 64, 8, DEVICE) for _ in range(4)]
    before, after = [], []
    for step, number in zip(steps, (1, 1, 0, 0), strict=True):
        attention.write(step.new_k, step.new_v, step.layer, step.batch)
        before.append(set(step.batch._device_arrays))
        compare(step, options(number, 64), attention)
        after.append(set(step.batch._device_arrays))
    assert before[0] == {"tables", "kv_slots"}
    assert before[1] == after[1] == after[0]
    assert before[2] == after[0]  # these layers have another window: one additional plan is made
    forgotten = before[2] - before[3]
    assert len(forgotten) == len(after[2] - before[2]) == 1
    assert before[3] == after[3] == after[2] - forgotten


@pytest.mark.skipif(DEVICE.runs_kernels, reason="the whole grid is run instead, by the kernel that this stands for")
@pytest.mark.parametrize(("dtype", "kv_dtype", "window"), [(BF16, I8, 0), (F16, FP8, 140)])
def test_long_quantised_rows_are_dequantised_first(
    dtype: torch.dtype, kv_dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, with the portable kernel in place of Hopper's: over the same workspace, in pages of 128."""
    sizes: list[tuple[int, int]] = []

    def prefill(
        query: torch.Tensor,
        layer: KvLayer,
        tables: torch.Tensor,
        items: torch.Tensor,
        output: torch.Tensor,
        options: AttentionOptions,
        target: Target,
        copies: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        here = TARGETS["cpu"]
        if copies is None or workspace is None:
            paged_prefill(query, layer, tables, items, output, options, here)
            return
        sizes.append((len(copies), workspace.shape[1]))
        layer = copy_rows(layer, tables, copies, workspace, options.window)
        starts, counts, begins = (np.zeros(len(tables), np.int64) for _ in range(3))
        paged = torch.zeros((len(tables), workspace.shape[1]), dtype=torch.int32)
        for row, token, position, _, start, length, page, _ in items.tolist():
            starts[row], counts[row], begins[row] = start, length - start, token - (position - start)
            pages = -(-length // PAGE)
            paged[row, :pages] = torch.arange(page, page + pages)
        tokens = prefill_shape(query.shape[1], query.dtype, layer, options, here).tokens
        again = plan_prefill(starts, counts, begins, tokens, np.flatnonzero(counts))
        paged_prefill(query, layer, paged, torch.from_numpy(again), output, options, here)

    def full_of_nan(pages: int, layer: KvLayer, dtype: torch.dtype) -> torch.Tensor:
        return workspace_for(pages, layer, dtype).fill_(torch.nan)

    monkeypatch.setattr(triton_attention, "paged_prefill", prefill)
    monkeypatch.setattr(triton_attention, "workspace_for", full_of_nan)
    for module in (triton_attention, prefill_copy):
        monkeypatch.setattr(module, "PAGES_MAX", 4)
    attention = TritonAttention(DEVICE)
    attention._target = replace(TARGETS["cpu"], hopper=True)
    # Sixteen heads share a KV head, so that twelve tokens (OPERATIONS_MIN) are enough to copy a row.
    rows = [(17, 1), (0, 15), (250, 13), (3, 2), (0, 12), (0, 11), (520, 15), (100, 38)]
    for _ in range(2):  # the second step reuses the plans and the workspace
        compare(Case(rows, (16, 1), 64, 16, DEVICE, dtype, kv_dtype), AttentionOptions(0.1, window), attention)
    # 1, 3, 1 and 2 pages; (520, 15) has 5, more than the workspace holds.
    assert sizes == [(4, 4), (3, 4)] * 2
    short = Case([(17, 1), (0, 9), (0, 12)], (16, 1), 64, 16, DEVICE, dtype, kv_dtype)
    compare(short, AttentionOptions(0.1, window), attention)
    assert sizes[4:] == [(1, 4)]


def test_head_sizes_without_a_kernel_take_the_reference() -> None:
    for head_size in (12, 272):
        compare(Case(SMALL[1], (4, 2), head_size, 8, DEVICE), options(0, head_size), TritonAttention(DEVICE))


@pytest.mark.parametrize("kv_dtype", [F32, I8], ids=str)
def test_static_batch_is_filled_again_and_again(kv_dtype: torch.dtype) -> None:
    """Steps of falling and rising size through one static batch, with two layers of different windows each."""
    attention = TritonAttention(DEVICE)
    large = PagedBatch.static(6, 7, 16, DEVICE)
    small = PagedBatch.static(3, 7, 16, DEVICE, shared=large)
    addresses = None
    for rows in ([(8, 1), (40, 1), (99, 1)], [(0, 1)], [(20, 1), (5, 1), (63, 1), (64, 1), (90, 1), (2, 1)]):
        for batch in (large, small):
            if len(rows) > len(batch.counts):
                continue
            for window in (0, 16):
                case = Case(rows, (4, 2), 64, 16, DEVICE, F32, kv_dtype)
                nothing = torch.full((len(batch.counts) - len(rows), 4, 64), float("nan"), device=case.query.device)
                query = torch.cat((case.query, nothing))
                key, value = (torch.cat((new, nothing[:, :2])) for new in (case.new_k, case.new_v))
                batch.fill(case.tables[:, : 1 + int(case.lengths.max()) // 16], case.lengths)
                attention.write(key, value, case.layer, batch)
                wanted = AttentionOptions(0.125, window, sinks=sinks(4, DEVICE) if window else None)
                got = attention.attend(query, case.layer, batch, wanted)[: len(rows)].double()
                assert float((got - case.dense(wanted)).abs().max()) <= (1e-5 if kv_dtype == F32 else 5e-2)
        held = {key: tensor.data_ptr() for key, tensor in large._device_arrays.items()}
        assert addresses is None or held == addresses
        addresses = held


def test_padding_of_a_static_batch_writes_nothing() -> None:
    batch = PagedBatch.static(4, 2, 8, DEVICE)
    layer = broken_layer((3, 8, 2, 64), F32, DEVICE)
    query, key = (torch.ones((4, n, 64), device=DEVICE.torch_device) for n in (4, 2))
    attention = TritonAttention(DEVICE)
    nothing = np.zeros((0, 1), np.int32), np.zeros(0, np.int32)
    for tables, lengths in (nothing, (np.array([[2]], np.int32), np.array([3], np.int32)), nothing):
        batch.fill(tables, lengths)
        attention.write(key, key, layer, batch)
        attention.attend(query, layer, batch, options(0, 64))
    assert (~layer.keys.isnan()).any(-1).any(-1).nonzero().tolist() == [[2, 2]]


def test_choice_by_name() -> None:
    assert isinstance(choose_attention(DEVICE, "triton"), TritonAttention)
    assert isinstance(choose_attention(DEVICE), TritonAttention) == DEVICE.runs_kernels
