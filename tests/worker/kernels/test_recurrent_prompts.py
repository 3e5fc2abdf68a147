"""Chunks of prompts through layers with recurrent states: kernels, plain torch, and single steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.worker.attention.states import StateTensor
from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels.cpu_operations import CpuOperations
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.prompt_reference import PlainPrompts
from kvforge.worker.kernels.prompt_rows import SEGMENT_TILES, PromptRows, prompt_rows
from kvforge.worker.kernels.prompt_selftest import (
    compare_prompt_convolution,
    compare_prompt_delta,
    compare_prompt_space,
)
from kvforge.worker.kernels.recurrent import CONVOLUTION, RECURRENT, DeltaInputs
from kvforge.worker.kernels.recurrent_selftest import scattered
from kvforge.worker.kernels.state_space import StateSpaceInputs
from tests import emulated

from .test_recurrent import channel_rule, convolution, delta_rule
from .test_state_space import state_space


def rows_of(*spans: tuple[int, int]) -> PromptRows:
    """Return rows of (start, count), with a token of another row between them."""
    starts, counts = (np.array(each) for each in zip(*spans, strict=True))
    firsts = np.cumsum(counts + 1) - counts
    return prompt_rows(starts, firsts, counts, lambda array: torch.from_numpy(array.copy()))


def test_rows_are_cut_into_tiles_at_absolute_positions() -> None:
    rows = rows_of((0, 130), (77, 51), (64, 1))
    assert rows.tiles.tolist() == [
        [0, 1, 0, 64],
        [0, 65, 0, 64],
        [0, 129, 0, 2],
        [1, 119, 13, 64],
        [2, 184, 0, 1],
    ]
    assert rows.rows.tolist() == [[0, 1, 130], [77, 132, 51], [64, 184, 1]]
    assert [each.spans.tolist() for each in rows.segments] == [[[0, 3], [3, 1], [4, 1]]]
    assert (rows.chunks(0), rows.chunks(1), rows.chunks(2)) == ([(0, 64), (64, 128), (128, 130)], [(0, 51)], [(0, 1)])


def test_long_rows_are_cut_into_segments() -> None:
    share = SEGMENT_TILES // 2
    rows = rows_of((0, 64 * (share + 3)), (0, 5))
    assert [each.spans.tolist() for each in rows.segments] == [[[0, share], [share, 1]], [[0, 3], [3, 0]]]
    assert [len(each.tiles) for each in rows.segments] == [share + 1, 3]
    assert rows.segments[1].tiles[0].tolist() == [0, 1 + 64 * share, 0, 64]
    many = rows_of(*[(0, 65)] * (SEGMENT_TILES + 1))
    assert [len(each.tiles) for each in many.segments] == [SEGMENT_TILES, 1, SEGMENT_TILES, 1]
    assert many.segments[3].spans[-1].tolist() == [0, 1] and int(many.segments[3].spans[:, 1].sum()) == 1


@pytest.mark.parametrize("form", [{"is_gated": True}, {"has_silu": True}])
def test_a_chunk_is_its_tokens_one_by_one(form: dict[str, Any]) -> None:
    """Of all operations in plain torch."""
    generator, rows = torch.Generator().manual_seed(3), rows_of((0, 70), (77, 3))
    made = convolution(20, 3, torch.float32, biased=True, **form)
    x = torch.randn(75, made.inputs, generator=generator)
    states = scattered(StateTensor(0, CONVOLUTION, (1, 20, 3), torch.float32), 2, generator)
    rule = delta_rule(2, 2, 8, 12, torch.float32)
    inputs = DeltaInputs(*(torch.randn(75, n, generator=generator) for n in (sum(rule.parts), 48, 4, 4)))
    matrices = scattered(StateTensor(0, RECURRENT, rule.state, torch.float32), 2, generator)
    space = state_space((4, 12, 2, 8), torch.float32)
    widths = sum(space.parts), len(space.weight), 4
    given = StateSpaceInputs(*(torch.randn(75, n, generator=generator) for n in widths))
    spaces = scattered(StateTensor(0, RECURRENT, space.state, torch.float32), 2, generator)
    every = states, matrices, spaces
    before = [each.read() for each in every]
    over = PlainPrompts(rows)
    found = over.convolve(x, states, made), over.advance_delta(inputs, matrices, rule)
    of_space = over.advance_state_space(given, spaces, space)
    after = [each.read() for each in every]
    for each, old in zip(every, before, strict=True):
        old[0] = 0  # the first row begins
        each.write(old)
    for row, (first, count) in enumerate(((1, 70), (72, 3))):
        for token in range(first, first + count):
            one = slice(token, token + 1)
            own = [scattered_row(each, row) for each in every]
            want = PlainOperations().convolve(x[one], own[0], made)
            torch.testing.assert_close(found[0][one], want, rtol=1e-5, atol=1e-5)
            parts = (each[one] for each in (inputs.mixed, inputs.gate, inputs.beta, inputs.decay))
            want = PlainOperations().advance_delta(DeltaInputs(*parts), own[1], rule)
            torch.testing.assert_close(found[1][one], want, rtol=1e-3, atol=1e-4)
            spaced = StateSpaceInputs(*(each[one] for each in (given.mixed, given.gate, given.time_steps)))
            want = PlainOperations().advance_state_space(spaced, own[2], space)
            torch.testing.assert_close(of_space[one], want, rtol=1e-3, atol=1e-4)
    for each, got in zip(every, after, strict=True):
        torch.testing.assert_close(got, each.read(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shift", [-3.0, 0.0, 5.0])
def test_a_chunk_by_channel_is_its_tokens_one_by_one(shift: float) -> None:
    """In plain torch, with decays that forget a little, much, and all within a chunk."""
    generator, rows = torch.Generator().manual_seed(3), rows_of((0, 70), (77, 3))
    rule = channel_rule(2, 2, 8, 12, torch.float32)
    rule = replace(rule, biases=rule.biases + shift)
    inputs = DeltaInputs(*(torch.randn(75, n, generator=generator) for n in rule.widths))
    states = scattered(StateTensor(0, RECURRENT, rule.state, torch.float32), 2, generator)
    before = states.read()
    found, after = PlainPrompts(rows).advance_delta(inputs, states, rule), states.read()
    before[0] = 0  # the first row begins
    states.write(before)
    for row, (first, count) in enumerate(((1, 70), (72, 3))):
        for token in range(first, first + count):
            parts = (each[token : token + 1] for each in (inputs.mixed, inputs.gate, inputs.beta, inputs.decay))
            want = PlainOperations().advance_delta(DeltaInputs(*parts), scattered_row(states, row), rule)
            torch.testing.assert_close(found[token : token + 1], want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(after, states.read(), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_plain_torch_is_transformers_chunk_of_kimi_delta_attention() -> None:
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    rule, generator, rows = channel_rule(3, 1, 8, 8, torch.float32), torch.Generator().manual_seed(3), rows_of((64, 70))
    inputs = DeltaInputs(*(torch.randn(71, n, generator=generator) for n in rule.widths))
    states = scattered(StateTensor(0, RECURRENT, rule.state, torch.float32), 1, generator)
    before = states.read()
    found = PlainPrompts(rows).advance_delta(inputs, states, rule)
    query, key, value = (each[None, 1:].unflatten(2, (3, 8)) for each in inputs.mixed.split(rule.parts, 1))
    steps = torch.nn.functional.softplus(inputs.decay + rule.biases)[None, 1:].unflatten(2, (3, 8))
    want, last = modeling.chunk_kimi_delta_attention(
        query,
        key,
        value,
        g=rule.rates[:, None] * steps,
        beta=inputs.beta.sigmoid()[None, 1:],
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = modeling.KimiLinearRMSNormGated(8, eps=rule.epsilon)
    norm.weight.data.copy_(rule.weight)
    want = norm(want.reshape(-1, 8), inputs.gate[1:].reshape(-1, 8)).view(70, -1)
    torch.testing.assert_close(found[1:], want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.read(), last, rtol=1e-4, atol=1e-5)


def scattered_row(states: Any, row: int) -> Any:
    """Return one row of states, in the same memory."""
    return type(states)(states.memory, states.pages[row : row + 1], states.tensor, states.spans, states.lines)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
@pytest.mark.parametrize(
    ("dtype", "kept", "sizes"),
    [
        (torch.float32, None, (2, 2, 24, 40)),
        (torch.float32, torch.bfloat16, (1, 1, 16, 8)),
        (torch.bfloat16, torch.float16, (1, 2, 8, 20)),
        (torch.float16, None, (1, 1, 8, 8)),
    ],
)
def test_kernels_are_plain_torchs(cpu: Device, dtype: torch.dtype, kept: torch.dtype | None, sizes: Any) -> None:
    """Interpreted; rows in company have the bits of rows alone, and nothing else is written."""
    pytest.importorskip("triton")
    from kvforge.worker.attention.triton_attention import is_interpreted
    from kvforge.worker.kernels.fused import FusedOperations

    if not is_interpreted() and not emulated.TARGET:
        pytest.skip("needs Triton's interpreter")
    operations = FusedOperations(cpu)
    for form in ({"is_gated": True}, {"has_silu": True}):
        made = convolution(70, 3, dtype, biased=kept is None, **form)
        assert compare_prompt_convolution(operations, made, dtype, kept if dtype == torch.float32 else None) == ""
    assert compare_prompt_delta(operations, delta_rule(*sizes, dtype), dtype, kept) == ""
    for shape in ((4, 20, 2, 24), (1, 16, 1, 70), (1, 16, 1, 140)):  # the last one in parts of a tile
        space = replace(state_space(shape, dtype), normalises=shape[0] > 1)
        assert compare_prompt_space(operations, space, dtype, kept) == ""


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
@pytest.mark.parametrize(
    ("dtype", "kept", "sizes", "shift"),
    [
        (torch.float32, None, (2, 2, 24, 40), 0.0),
        (torch.float32, None, (1, 1, 20, 16), 6.0),  # forgets all within a block
        (torch.float32, torch.bfloat16, (1, 1, 16, 8), -4.0),
        (torch.bfloat16, None, (1, 2, 8, 20), 0.0),
        (torch.float16, torch.float16, (1, 1, 8, 8), 0.0),
    ],
)
def test_kernels_by_channel_are_plain_torchs(
    cpu: Device, dtype: torch.dtype, kept: torch.dtype | None, sizes: Any, shift: float
) -> None:
    """Interpreted, as `test_kernels_are_plain_torchs`."""
    pytest.importorskip("triton")
    from kvforge.worker.attention.triton_attention import is_interpreted
    from kvforge.worker.kernels.fused import FusedOperations

    if not is_interpreted() and not emulated.TARGET:
        pytest.skip("needs Triton's interpreter")
    rule = channel_rule(*sizes, dtype)
    rule = replace(rule, biases=rule.biases + shift)
    assert compare_prompt_delta(FusedOperations(cpu), rule, dtype, kept) == ""


NEEDS_CPU_KERNELS = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=f"CPU kernels: {cpu_kernels_problem()}")


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float16),
        (torch.float16, None),
    ],
)
def test_kernels_of_a_cpu_are_plain_torchs(cpu: Device, dtype: torch.dtype, kept: torch.dtype | None) -> None:
    """With sizes that fill strips and vectors, and that do not; rows in company have the bits of rows alone."""
    operations = CpuOperations(cpu)
    for form in ({"is_gated": True}, {"has_silu": True}):
        made = convolution(70, 3, dtype, biased=kept is None, **form)
        assert compare_prompt_convolution(operations, made, dtype, kept if dtype == torch.float32 else None) == ""
    for sizes in ((4, 2, 64, 64), (2, 2, 24, 40), (1, 1, 8, 12)):
        assert compare_prompt_delta(operations, delta_rule(*sizes, dtype), dtype, kept) == ""
    for sizes, shift in (((2, 1, 64, 64), 0.0), ((3, 1, 24, 40), 4.0), ((1, 1, 8, 12), -4.0)):
        rule = channel_rule(*sizes, dtype)
        rule = replace(rule, biases=rule.biases + shift)
        assert compare_prompt_delta(operations, rule, dtype, kept) == ""
    for shape in ((6, 64, 2, 128), (4, 24, 2, 40), (1, 8, 1, 8)):
        space = replace(state_space(shape, dtype), normalises=shape[0] > 1)
        assert compare_prompt_space(operations, space, dtype, kept) == ""


@NEEDS_CPU_KERNELS
def test_a_prompt_on_a_cpu_may_be_cut_anywhere(cpu: Device) -> None:
    """With states in float32, results and states have the same bits."""
    generator, tokens = torch.Generator().manual_seed(3), 150
    made, space = (
        convolution(40, 4, torch.float32, biased=True, has_silu=True),
        state_space((4, 24, 2, 40), torch.float32),
    )
    delta, lines = delta_rule(4, 2, 24, 40, torch.float32), channel_rule(3, 1, 24, 40, torch.float32)
    x = torch.randn(tokens, made.inputs, generator=generator)
    by_head, by_line = (
        DeltaInputs(*(torch.randn(tokens, n, generator=generator) for n in rule.widths)) for rule in (delta, lines)
    )
    widths = sum(space.parts), len(space.weight), space.heads
    given = StateSpaceInputs(*(torch.randn(tokens, n, generator=generator) for n in widths))

    def run(*cuts: int) -> list[torch.Tensor]:
        shapes = ((1, 40, 4), delta.state, lines.state, space.state)
        every = [scattered(StateTensor(0, RECURRENT, shape, torch.float32), 1, generator) for shape in shapes]
        found: list[list[torch.Tensor]] = []
        for start, end in pairwise((0, *cuts, tokens)):
            of_row = np.array([[start], [start], [end - start]])
            form = CpuOperations(cpu).for_prompts(torch.float32)
            assert form is not None
            over = form(prompt_rows(*of_row, lambda array: torch.from_numpy(array.copy())))
            results = (
                over.convolve(x, every[0], made),
                over.advance_delta(by_head, every[1], delta),
                over.advance_delta(by_line, every[2], lines),
                over.advance_state_space(given, every[3], space),
            )
            found.append([each[start:end] for each in results])
        return [*(torch.cat(parts) for parts in zip(*found, strict=True)), *(each.read() for each in every)]

    whole = run()
    assert all(bool(each.any()) for each in whole)
    for cuts in ((1,), (64,), (63, 100), (2, 3, 149)):
        assert all(torch.equal(*each) for each in zip(run(*cuts), whole, strict=True)), cuts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    """With the sizes of Qwen3-Next and LFM2, in every dtype of the states."""
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    from kvforge.worker.kernels.fused import FusedOperations

    operations, place = FusedOperations(device), device.torch_device
    if operations.for_prompts(dtype) is None:
        pytest.skip(f"no matrix instructions for {dtype}")

    def there(made: Any) -> Any:
        moved = {key: each.to(place) for key, each in vars(made).items() if isinstance(each, torch.Tensor)}
        return replace(made, **moved)

    for kept in (None, torch.bfloat16, torch.float16):
        for sizes in ((16, 2, 128, 128), (3, 1, 24, 40)):
            assert compare_prompt_delta(operations, there(delta_rule(*sizes, dtype)), dtype, kept) == ""
        for sizes, shift in (((32, 1, 128, 128), 0.0), ((3, 1, 24, 40), 0.0), ((2, 1, 128, 128), 4.0)):
            rule = channel_rule(*sizes, dtype)
            rule = there(replace(rule, biases=rule.biases + shift))
            assert compare_prompt_delta(operations, rule, dtype, kept) == ""
        for shape in ((48, 64, 1, 128), (128, 64, 8, 128), (4, 24, 2, 40), (8, 64, 1, 256)):
            assert compare_prompt_space(operations, state_space(shape, dtype, place), dtype, kept) == ""
        own = kept if dtype == torch.float32 else None
        for form in ({"is_gated": True}, {"has_silu": True}):
            made = there(convolution(1030, 3, dtype, biased=True, **form))
            assert compare_prompt_convolution(operations, made, dtype, own) == ""


@pytest.mark.parametrize("way", ["plain torch", pytest.param("Numba", marks=NEEDS_CPU_KERNELS)])
def test_time_steps_of_prompts_have_limits(way: str, cpu: Device) -> None:
    """As transformers limits them: with a step of 0.5 everywhere, time steps make no difference."""
    form = PlainPrompts if way == "plain torch" else CpuOperations(cpu).for_prompts(torch.float32)
    assert form is not None
    rows, generator = rows_of((0, 70)), torch.Generator().manual_seed(4)
    space = replace(state_space((2, 8, 1, 8), torch.float32), limits=(0.5, 0.5))
    mixed, gate, *steps = (torch.randn(72, n, generator=generator) for n in (32, 16, 2, 2))
    found = []
    for each in steps:
        states = scattered(StateTensor(0, RECURRENT, space.state, torch.float32), 1, torch.Generator().manual_seed(5))
        found.append(form(rows).advance_state_space(StateSpaceInputs(mixed, gate, each), states, space)[1:71])
    assert torch.equal(*found) and bool(found[0].any())
