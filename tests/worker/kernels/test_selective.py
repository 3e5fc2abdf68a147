"""The step of Mamba 1's state spaces: kernels against plain torch, plain torch against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvforge.worker.attention.states import StateTensor
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import choose_operations
from kvforge.worker.kernels.interface import LayerOperations
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.prompt_reference import PlainPrompts
from kvforge.worker.kernels.prompt_selftest import compare_prompt_selective
from kvforge.worker.kernels.recurrent import RECURRENT
from kvforge.worker.kernels.recurrent_selftest import compare_selective, scattered
from kvforge.worker.kernels.selective import SelectiveInputs, SelectiveSpace
from tests import emulated

from .test_recurrent_prompts import rows_of, scattered_row

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Channels, numbers of a state; rows; the dtype of the pages.
CASES: list[tuple[tuple[int, int], int, torch.dtype | None]] = [
    ((150, 16), 3, None),  # vectors, in blocks of channels
    ((24, 21), 5, torch.bfloat16),  # and numbers one by one
    ((70, 8), 1, torch.float16),
    ((1030, 1), 2, None),  # as of RG-LRU
]


def selective(channels: int, state_size: int) -> SelectiveSpace:
    generator = torch.Generator().manual_seed(channels)
    rates = -torch.rand(channels, state_size, generator=generator)
    return SelectiveSpace(rates, *(torch.randn(channels, generator=generator) for _ in range(2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "rows", "kept"), CASES)
def test_kernels_are_plain_torchs(
    operations: LayerOperations, dtype: torch.dtype, sizes: tuple[int, int], rows: int, kept: torch.dtype | None
) -> None:
    assert compare_selective(operations, selective(*sizes), dtype, rows, kept) == ""


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, None), (torch.bfloat16, torch.float16)])
def test_kernels_of_prompts_are_plain_torchs(cpu: Device, dtype: torch.dtype, kept: torch.dtype | None) -> None:
    """Interpreted; rows in company have the bits of rows alone, and nothing else is written."""
    pytest.importorskip("triton")
    from kvforge.worker.attention.triton_attention import is_interpreted
    from kvforge.worker.kernels.fused import FusedOperations

    if not is_interpreted() and not emulated.TARGET:
        pytest.skip("needs Triton's interpreter")
    assert compare_prompt_selective(FusedOperations(cpu), selective(72, 12), dtype, kept) == ""
    wide = replace(selective(72, 1), is_wide=True)
    assert compare_prompt_selective(FusedOperations(cpu), wide, dtype, kept) == ""


@pytest.mark.parametrize("kept", [None, torch.bfloat16])
def test_the_kernel_of_prompts_on_a_cpu_is_plain_torchs(cpu: Device, kept: torch.dtype | None) -> None:
    operations = choose_operations(cpu, torch.float32)
    if operations.for_token_prompts(torch.float32) is None:
        pytest.skip("no kernels here")
    for sizes in ((150, 16), (24, 21), (150, 1)):
        assert compare_prompt_selective(operations, selective(*sizes), torch.float32, kept) == ""


@pytest.mark.parametrize("kept", [None, torch.bfloat16])
def test_a_prompt_is_its_tokens_one_by_one(kept: torch.dtype | None) -> None:
    """With the same bits, so that it may be cut anywhere."""
    space, generator, rows = selective(20, 8), torch.Generator().manual_seed(3), rows_of((0, 7), (77, 3))
    inputs = SelectiveInputs(*(torch.randn(12, width, generator=generator) for width in space.widths))
    states = scattered(StateTensor(0, RECURRENT, space.state, torch.float32, kept), 2, generator)
    before = states.read()
    found = PlainPrompts(rows).advance_selective(inputs, states, space)
    after = states.read()
    before[0] = 0  # the first row begins
    states.write(before)
    for row, (first, count) in enumerate(((1, 7), (9, 3))):
        for token in range(first, first + count):
            one = SelectiveInputs(*(part[token : token + 1] for part in inputs.parts))
            assert torch.equal(
                PlainOperations().advance_selective(one, scattered_row(states, row), space)[0], found[token]
            )
    assert torch.equal(states.read(), after)


def test_plain_torch_is_transformers_state_space() -> None:
    """Also its gate."""
    modeling: Any = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    space, generator = selective(10, 8), torch.Generator().manual_seed(3)
    states = scattered(StateTensor(0, RECURRENT, space.state, torch.float32), 2, generator)
    inputs, state = SelectiveInputs(*(torch.randn(2, n, generator=generator) for n in space.widths)), states.read()
    found = PlainOperations().advance_selective(inputs, states, space)
    want = modeling.mamba_selective_state_update(
        state,
        inputs.x,
        inputs.time_steps,
        space.rates,
        inputs.b,
        inputs.c,
        space.skips,
        z=inputs.gate,
        dt_bias=space.biases,
        dt_softplus=True,
    )
    torch.testing.assert_close(states.read(), state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
