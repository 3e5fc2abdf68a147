"""The operations of layers with a recurrent state over prompt tokens, by Triton kernels."""

from __future__ import annotations

import torch

from kvforge.worker.attention.states import StateRows

from .launching import Launching
from .prompt_convolution import convolve_prompts
from .prompt_delta import advance_prompts, can_advance_prompts
from .prompt_reference import PlainPrompts
from .prompt_rows import PromptRows
from .prompt_selective import advance_selective_prompts
from .prompt_state_space import advance_spaces_of_prompts, can_advance_spaces
from .recurrent import Convolution, DeltaInputs, GatedDelta
from .recurrent_kernels import can_convolve
from .selective import SelectiveInputs, SelectiveSpace
from .selective_kernels import can_advance_selective
from .state_space import StateSpace, StateSpaceInputs


class TritonPrompts:
    """`StateOperations` over the tokens of prompt rows; see `prompt_reference.PlainPrompts`, which it falls back to.

    Args:
        launch: How to launch.
        rows: The rows.
    """

    def __init__(self, launch: Launching, rows: PromptRows) -> None:
        self._launch, self._rows, self._plain = launch, rows, PlainPrompts(rows)

    def for_prompts(self, _dtype: torch.dtype) -> None:
        """Return None: these are the operations over prompts."""

    def for_token_prompts(self, _dtype: torch.dtype) -> None:
        """Return None, as `for_prompts`."""

    def begins(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `StateOperations.begins`."""
        return self._rows.begins(x)

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Implement `StateOperations.convolve`."""
        if not can_convolve(states):
            return self._plain.convolve(x, states, convolution)
        return convolve_prompts(self._launch, x, states, convolution, self._rows)

    def advance_delta(self, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
        """Implement `StateOperations.advance_delta`."""
        if not can_advance_prompts(self._launch.target, inputs.mixed.dtype, states, delta):
            return self._plain.advance_delta(inputs, states, delta)
        return advance_prompts(self._launch, inputs, states, delta, self._rows)

    def advance_state_space(self, inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_state_space`."""
        if not can_advance_spaces(self._launch.target, inputs.mixed.dtype, states, space):
            return self._plain.advance_state_space(inputs, states, space)
        return advance_spaces_of_prompts(self._launch, inputs, states, space, self._rows)

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_selective`."""
        if not can_advance_selective(states, space):
            return self._plain.advance_selective(inputs, states, space)
        return advance_selective_prompts(self._launch, inputs, states, space, self._rows)
