"""The step of Mamba 2's state spaces: kernels against plain torch, plain torch against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvforge.worker.attention.states import StateTensor
from kvforge.worker.device.device import open_device
from kvforge.worker.kernels import choose_operations
from kvforge.worker.kernels.interface import LayerOperations
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.recurrent import RECURRENT
from kvforge.worker.kernels.recurrent_selftest import compare_state_space, scattered
from kvforge.worker.kernels.state_space import StateSpace, StateSpaceInputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Heads, their size, groups, numbers of B; rows; the dtype of the pages.
CASES: list[tuple[tuple[int, int, int, int], int, torch.dtype | None]] = [
    ((4, 24, 2, 40), 3, None),  # vectors, and numbers one by one
    ((6, 5, 3, 16), 5, torch.bfloat16),
    ((2, 8, 1, 8), 1, torch.float16),
]
PUBLISHED = ((48, 64, 1, 128), (128, 64, 8, 128))  # Granite 4 tiny, Nemotron-H


def state_space(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str | torch.device = "cpu") -> StateSpace:
    heads, head_size, groups, state_size = sizes
    generator = torch.Generator().manual_seed(state_size)
    rates, biases = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    skips, weight = torch.randn(heads, generator=generator), torch.randn(heads * head_size, generator=generator)
    numbers = [each.to(device) for each in (rates, biases, skips)]
    return StateSpace(groups, state_size, *numbers, weight.to(device, dtype), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "rows", "kept"), CASES)
def test_kernels_are_plain_torchs(
    operations: LayerOperations,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    rows: int,
    kept: torch.dtype | None,
) -> None:
    for normalises in (True, False):
        space = replace(state_space(sizes, dtype), normalises=normalises)
        assert compare_state_space(operations, space, dtype, rows, kept) == ""


@pytest.mark.parametrize("operations", ["Triton"], indirect=True)
def test_a_head_is_cut_into_blocks_of_lines_and_a_group_into_parts(
    operations: LayerOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As heads and groups of published sizes are."""
    kernels = pytest.importorskip("kvforge.worker.kernels.state_space_kernels")
    monkeypatch.setattr(kernels, "PROGRAM_NUMBERS", 64)
    monkeypatch.setattr(kernels, "NORM_NUMBERS", 16)
    assert compare_state_space(operations, state_space((4, 24, 2, 9), torch.float32), torch.float32, 2) == ""


def test_a_small_time_step_is_exact(operations: LayerOperations) -> None:
    """Published models have time steps of 0.001, where 1 + e^x keeps 4 digits of e^x in float32."""
    made, generator = state_space((2, 8, 1, 8), torch.float32), torch.Generator().manual_seed(3)
    space = replace(made, biases=torch.full((2,), -12.0), skips=torch.zeros(2), epsilon=0.0)
    states = scattered(StateTensor(0, RECURRENT, space.state, torch.float32), 1, generator)
    states.write(torch.zeros(1, *space.state[1:]))
    mixed, gate, steps = torch.ones(1, sum(space.parts)), torch.ones(1, 16), torch.zeros(1, 2)
    operations.advance_state_space(StateSpaceInputs(mixed, gate, steps), states, space)
    want = torch.full((1, 2, 8, 8), -12.0, dtype=torch.float64).exp().log1p()
    torch.testing.assert_close(states.read().double(), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("groups", [1, 2])
def test_plain_torch_is_transformers_state_space(groups: int) -> None:
    """Also its gated norm."""
    modeling: Any = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    space, generator = state_space((4, 6, groups, 8), torch.float32), torch.Generator().manual_seed(3)
    states = scattered(StateTensor(0, RECURRENT, space.state, torch.float32), 2, generator)
    widths = (sum(space.parts), len(space.weight), space.heads)
    inputs, state = StateSpaceInputs(*(torch.randn(2, n, generator=generator) for n in widths)), states.read()
    found = PlainOperations().advance_state_space(inputs, states, space)
    x, b, c = inputs.mixed.split(space.parts, 1)

    def of_head(numbers: torch.Tensor) -> torch.Tensor:
        return numbers[..., None].expand(*numbers.shape, 6)

    want = modeling.mamba2_selective_state_update(
        state,
        x.reshape(2, 4, 6),
        of_head(inputs.time_steps),
        of_head(space.rates)[..., None].expand(-1, -1, 8),
        b.reshape(2, groups, 8),
        c.reshape(2, groups, 8),
        of_head(space.skips),
        dt_bias=of_head(space.biases),
        dt_softplus=True,
    )
    norm = modeling.BambaRMSNormGated(24, group_size=24 // groups, eps=space.epsilon)
    norm.weight.data.copy_(space.weight)
    want = norm(want.view(2, -1), inputs.gate).detach()
    torch.testing.assert_close(states.read(), state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*PUBLISHED, CASES[0][0]])
def test_kernels_are_plain_torchs_on_a_gpu(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    device = open_device("auto")
    if not device.queues:
        pytest.skip("no GPU here")
    operations, space = choose_operations(device, dtype), state_space(sizes, dtype, device.torch_device)
    for rows in (1, 7, 64):
        assert compare_state_space(operations, space, dtype, rows) == ""
