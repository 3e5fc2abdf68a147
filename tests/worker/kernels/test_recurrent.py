"""Steps of layers with recurrent states: kernels and plain torch against a naive loop, and rows among others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvforge.worker.attention.states import StateLayout, StatePages, StateTensor, lines_of
from kvforge.worker.kernels.channel_delta_step import side_by_side
from kvforge.worker.kernels.interface import LayerOperations
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.recurrent import CONVOLUTION, RECURRENT, Convolution, DeltaInputs, GatedDelta
from kvforge.worker.kernels.recurrent_selftest import compare_convolution, compare_delta, scattered
from tests import emulated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS: list[dict[str, Any]] = [{"is_gated": True}, {"has_silu": True}, {"has_silu": True, "is_gated": True}]


def convolution(channels: int, taps: int, dtype: torch.dtype, biased: bool, **form: Any) -> Convolution:
    generator = torch.Generator().manual_seed(channels)
    weight = torch.randn(channels, taps, generator=generator).to(dtype)
    return Convolution(weight, torch.randn(channels, generator=generator).to(dtype) if biased else None, **form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_is_plain_torchs(operations: LayerOperations, dtype: torch.dtype, form: dict[str, Any]) -> None:
    """Of more channels than a ticket has, and a number that no vector divides."""
    for channels, taps, rows in ((530, 3, 4), (33, 4, 1)):
        made = convolution(channels, taps, dtype, biased=rows == 4, **form)
        assert compare_convolution(operations, made, dtype, rows) == ""


@pytest.mark.parametrize("form", FORMS)
def test_plain_torch_is_a_naive_convolution(form: dict[str, Any]) -> None:
    made, generator = convolution(20, 3, torch.float64, biased=True, **form), torch.Generator().manual_seed(3)
    narrow = replace(made, weight=made.weight.float(), bias=made.bias.float() if made.bias is not None else None)
    states = scattered(StateTensor(0, CONVOLUTION, (1, 20, 3), torch.float32), 2, generator)
    state, x = states.read().double(), torch.randn(2, narrow.inputs, generator=generator)
    parts = x.double().view(2, -1, 20)
    given = parts[:, 0] * parts[:, 2] if made.is_gated else parts[:, 0]
    state = torch.cat((state[..., 1:], given[..., None]), dim=2)
    want = (state * made.weight).sum(2) + made.bias
    want = torch.nn.functional.silu(want) if made.has_silu else want
    want = want * parts[:, 1] if made.is_gated else want
    torch.testing.assert_close(PlainOperations().convolve(x, states, narrow).double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.read().double(), state, rtol=1e-6, atol=1e-6)


def delta_rule(key_heads: int, groups: int, key_size: int, value_size: int, dtype: torch.dtype) -> GatedDelta:
    generator = torch.Generator().manual_seed(key_size)
    heads = key_heads * groups
    rates, biases = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    weight = torch.randn(value_size, generator=generator).to(dtype)
    return GatedDelta(key_heads, key_size, rates, biases, weight, 1e-6)


def channel_rule(key_heads: int, groups: int, key_size: int, value_size: int, dtype: torch.dtype) -> GatedDelta:
    """Return a rule with a decay of each number of a key: Kimi delta attention."""
    rule, generator = delta_rule(key_heads, groups, key_size, value_size, dtype), torch.Generator().manual_seed(9)
    biases = torch.randn(rule.value_heads * key_size, generator=generator)
    return replace(rule, biases=biases, is_by_channel=True, has_sigmoid=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "rows", "kept"),
    [
        ((1, 1, 16, 80), 3, None),  # two vectors at a time, and one
        ((2, 2, 20, 37), 5, torch.bfloat16),  # columns one by one
        ((2, 1, 8, 8), 1, torch.float16),
    ],
)
def test_a_gated_delta_rule_is_plain_torchs(
    operations: LayerOperations, dtype: torch.dtype, sizes: Any, rows: int, kept: torch.dtype | None
) -> None:
    assert compare_delta(operations, delta_rule(*sizes, dtype), dtype, rows, kept) == ""


@pytest.mark.parametrize(
    ("dtype", "sizes", "rows", "kept"),
    [
        (torch.float32, (1, 1, 16, 80), 3, None),
        (torch.float32, (2, 2, 20, 37), 5, torch.bfloat16),  # decays of lines one by one too
        (torch.bfloat16, (3, 1, 40, 48), 4, None),
        (torch.bfloat16, (2, 1, 8, 8), 1, torch.bfloat16),
        (torch.float16, (2, 1, 16, 16), 2, None),
        (torch.float16, (1, 1, 8, 8), 1, torch.float16),
    ],
)
def test_a_delta_rule_by_channel_is_plain_torchs(
    operations: LayerOperations, dtype: torch.dtype, sizes: Any, rows: int, kept: torch.dtype | None
) -> None:
    assert compare_delta(operations, channel_rule(*sizes, dtype), dtype, rows, kept) == ""


@torch.inference_mode()
@pytest.mark.parametrize("shift", [-9.0, 0.0, 30.0])
def test_decays_by_channel_are_right_for_large_and_small_steps(operations: LayerOperations, shift: float) -> None:
    """Steps of 1e-4, which a sum of 1 and e^x would round, and of 30, behind which a line is forgotten."""
    rule, generator = channel_rule(1, 1, 16, 16, torch.float32), torch.Generator().manual_seed(3)
    rule = replace(rule, biases=rule.biases + shift)
    given = [torch.randn(2, width, generator=generator) for width in rule.widths]
    states = scattered(StateTensor(0, RECURRENT, rule.state, torch.float32), 2, generator)
    before, found = states.memory.clone(), list[torch.Tensor]()
    for each in (operations, PlainOperations()):
        states.memory.copy_(before)
        found += [each.advance_delta(DeltaInputs(*given), states, rule), states.read()]
    torch.testing.assert_close(found[1], found[3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-5)


def test_plain_torch_is_transformers_kimi_delta_attention() -> None:
    """Also its gated norm."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    rule, generator = channel_rule(3, 1, 8, 8, torch.float32), torch.Generator().manual_seed(3)
    states = scattered(StateTensor(0, RECURRENT, rule.state, torch.float32), 2, generator)
    given = [torch.randn(2, width, generator=generator) for width in rule.widths]
    inputs, before = DeltaInputs(*given), states.read()
    found, state = PlainOperations().advance_delta(inputs, states, rule), states.read()
    query, key, value = (each.view(2, 1, 3, 8) for each in given[0].split(rule.parts, 1))
    steps = torch.nn.functional.softplus(inputs.decay + rule.biases).view(2, 1, 3, 8)
    want, last = modeling.recurrent_kimi_delta_attention(
        query,
        key,
        value,
        g=rule.rates[:, None] * steps,
        beta=inputs.beta.sigmoid()[:, None],
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = modeling.KimiLinearRMSNormGated(8, eps=rule.epsilon)
    norm.weight.data.copy_(rule.weight)
    want = norm(want.reshape(-1, 8), inputs.gate.reshape(-1, 8)).detach().view(2, -1)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_columns_of_one_matrix_are_joined_without_a_copy() -> None:
    matrix = torch.randn(5, 12)
    parts = list(matrix.split([3, 4, 2, 3], dim=1))
    assert side_by_side(parts[:3]).data_ptr() == matrix.data_ptr()
    for chosen in (parts[:3], parts[1:], [parts[1], parts[0]], [parts[0], parts[2]], [parts[0], parts[1].clone()]):
        assert torch.equal(side_by_side(chosen), torch.cat(chosen, dim=1))
        assert torch.equal(side_by_side([each[2:4] for each in chosen]), torch.cat(chosen, dim=1)[2:4])
    assert torch.equal(side_by_side([parts[0][1:3], parts[1][2:4]]), torch.cat((parts[0][1:3], parts[1][2:4]), 1))


def test_plain_torch_is_transformers_gated_delta_rule() -> None:
    """Also its gated norm."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    rule, generator = delta_rule(2, 2, 8, 12, torch.float32), torch.Generator().manual_seed(3)
    states = scattered(StateTensor(0, RECURRENT, rule.state, torch.float32), 2, generator)
    given = [torch.randn(2, width, generator=generator) for width in (sum(rule.parts), rule.parts[2], 4, 4)]
    inputs, before = DeltaInputs(*given), states.read()
    found, state = PlainOperations().advance_delta(inputs, states, rule), states.read()
    query, key, value = (
        each.view(2, 1, -1, n) for each, n in zip(given[0].split(rule.parts, 1), (8, 8, 12), strict=True)
    )
    want, last = modeling.torch_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g=(rule.rates * torch.nn.functional.softplus(inputs.decay + rule.biases))[:, None],
        beta=inputs.beta.sigmoid()[:, None],
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = modeling.Qwen3NextRMSNormGated(12, eps=rule.epsilon)
    norm.weight.data.copy_(rule.weight)
    want = norm(want.reshape(-1, 12), inputs.gate.reshape(-1, 12)).detach().view(2, -1)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_a_state_of_16_bits_is_rounded_behind_the_step(operations: LayerOperations) -> None:
    made, generator = convolution(40, 3, torch.float32, biased=False), torch.Generator().manual_seed(3)
    tensor = StateTensor(0, CONVOLUTION, (1, 40, 3), torch.float32, torch.float16)
    states, x = scattered(tensor, 3, generator), torch.randn(3, 40, generator=generator)
    before, found = states.memory.clone(), list[torch.Tensor]()
    for each in (operations, PlainOperations()):
        states.memory.copy_(before)
        found += [each.convolve(x, states, made), states.read()]
    if emulated.TARGET:  # a GPU rounds a product and its sum at once
        torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[1][..., -1], x.half().float())


def test_a_state_with_lines_that_pages_cut_is_computed_by_plain_torch(operations: LayerOperations) -> None:
    tensor = StateTensor(0, CONVOLUTION, (1, 5, 6), torch.float32)
    layout, made = StateLayout((tensor,), 16), convolution(5, 6, torch.float32, biased=False)
    assert lines_of(tensor, layout.spans[0]) is None
    states = StatePages(layout, torch.zeros(20, 16, dtype=torch.uint8)).rows(
        0, CONVOLUTION, torch.randperm(20)[: layout.pages][None].int()
    )
    x = torch.randn(1, 5)
    assert torch.equal(operations.convolve(x, states, made), x * made.weight[:, -1])
    assert torch.equal(states.read()[0, :, -1], x[0])
