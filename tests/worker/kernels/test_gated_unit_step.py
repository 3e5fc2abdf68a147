"""The step of RG-LRU, of generated tokens and of prompts, on every device's operations, against transformers' block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvforge.worker.attention.states import StateRows, StateTensor
from kvforge.worker.kernels.interface import LayerOperations
from kvforge.worker.kernels.prompt_reference import PlainPrompts
from kvforge.worker.kernels.recurrent import CONVOLUTION, RECURRENT, MixerStep, PromptForm, StateOperations
from kvforge.worker.kernels.recurrent_selftest import scattered
from kvforge.worker.loading.mixer_steps import step_of
from tests import emulated

from .test_recurrent_prompts import rows_of

HEADS, SIZE, HIDDEN, TAPS = 2, 10, 20, 4
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def block() -> Any:
    """Return a recurrent block of RecurrentGemma with random weights, in float64: 1 - a^2 is wrong in its float32."""
    modeling: Any = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    config = modeling.RecurrentGemmaConfig(
        hidden_size=HIDDEN, lru_width=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=1, conv1d_width=TAPS
    )
    made, generator = modeling.RecurrentGemmaRecurrentBlock(config, 0), torch.Generator().manual_seed(3)
    for weight in made.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator))
    return made.double()


def states_of(count: int) -> dict[str, StateRows]:
    generator = torch.Generator().manual_seed(5)
    shapes = {CONVOLUTION: (1, HIDDEN, TAPS), RECURRENT: (1, HIDDEN, 1)}
    return {
        name: scattered(StateTensor(0, name, shape, torch.float32), count, generator) for name, shape in shapes.items()
    }


def run(
    block: Any, step: MixerStep, operations: Any, dense: LayerOperations, hidden: torch.Tensor, states: Any
) -> torch.Tensor:
    projected = {name: getattr(block, name)(hidden.double()).float() for name in step.projections}
    found: torch.Tensor = block.linear_out(step.run(operations, dense, projected, states.__getitem__).double())
    return found.float()


@torch.inference_mode()
def test_a_step_is_transformers_block(operations: LayerOperations, block: Any) -> None:
    rows, step = 3, step_of(copy.deepcopy(block).float())
    assert step is not None
    states, hidden = states_of(rows), torch.randn((rows, HIDDEN), generator=seeded(4))
    block.conv1d_state = states[CONVOLUTION].read()[..., 1:].double()
    block.rg_lru.recurrent_states = states[RECURRENT].read()[..., 0]
    found = run(block, step, operations, operations, hidden, states)
    want, _ = block(hidden[:, None].double(), torch.full((rows, 1), 7), None, use_cache=True)
    torch.testing.assert_close(found, want[:, 0].float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[RECURRENT].read()[..., 0], block.rg_lru.recurrent_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[CONVOLUTION].read()[..., 1:], block.conv1d_state.float())


@pytest.mark.parametrize("is_plain", [False, True])
@torch.inference_mode()
def test_a_prompt_is_transformers_block(operations: LayerOperations, block: Any, is_plain: bool) -> None:
    """From its begin, where the input is not scaled, and from within, each beside the other."""
    step, hidden = step_of(copy.deepcopy(block).float()), torch.randn((90, HIDDEN), generator=seeded(4))
    assert step is not None
    form: PromptForm | None = PlainPrompts if is_plain else form_of(operations)
    if form is None:
        pytest.skip("no kernels here")
    want, _ = block(hidden[None, :70].double(), torch.arange(70)[None], None, use_cache=True)
    states = states_of(2)
    first = run(block, step, form(rows_of((0, 5), (3, 9))), operations, shifted(hidden[:5], hidden[70:79]), states)
    torch.testing.assert_close(first[1:6], want[0, :5].float(), rtol=1e-4, atol=1e-4)
    own = {name: StateRows(e.memory, e.pages[:1], e.tensor, e.spans, e.lines) for name, e in states.items()}
    rest = run(block, step, form(rows_of((5, 65))), operations, shifted(hidden[5:70]), own)
    torch.testing.assert_close(rest[1:], want[0, 5:].float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own[RECURRENT].read()[..., 0], block.rg_lru.recurrent_states, rtol=1e-5, atol=1e-4)


def form_of(operations: LayerOperations) -> PromptForm | None:
    """Return the form for prompts; Triton's has none for the interpreter's target."""
    if operations.for_token_prompts(torch.float32) is not None:
        return operations.for_token_prompts(torch.float32)
    from kvforge.worker.kernels.launching import LaunchSettings
    from kvforge.worker.kernels.prompt_operations import TritonPrompts

    def form(rows: Any) -> StateOperations:
        from kvforge.worker.device.targets import TARGETS

        return TritonPrompts(LaunchSettings(TARGETS[emulated.TARGET or "cpu"]), rows)

    return form


def shifted(*rows: torch.Tensor) -> torch.Tensor:
    """Return the tokens of rows with one of another row before each, as `rows_of` counts them."""
    return torch.cat([part for row in rows for part in (torch.zeros((1, HIDDEN)), row)])


def test_the_first_tokens_of_sequences_are_marked() -> None:
    rows = rows_of((0, 3), (5, 2), (0, 1))
    begins = rows.begins(torch.empty(9, 1))
    assert begins.nonzero().flatten().tolist() == [1, 8]
