"""The state spaces of Mamba 1: what a layer's step of one token consists of, and that step in plain torch.

`recurrent.StateOperations` has the operation, selective_kernels.py and prompt_selective.py its Triton kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from kvforge.worker.attention.states import StateRows


@dataclass(frozen=True)
class SelectiveSpace:
    """State spaces of single channels, with a decay for each number (Mamba 1, arXiv 2312.00752).

    With a channel's state S [state_size], its input x, and the B and C of all channels:

        d = softplus(time step + bias)
        S = exp(rates d) S + d x B
        result = (S C + skip x) silu(gate)

    A token depends on the state before it alone, so prompts are computed token by token as well.

    Attributes:
        rates: [channels, state_size] float32, contiguous, negative.
        biases: [channels] float32.
        skips: [channels] float32.
        is_wide: Whether inputs are float32 in a model of any dtype.
    """

    rates: torch.Tensor
    biases: torch.Tensor
    skips: torch.Tensor
    is_wide: bool = False

    @property
    def channels(self) -> int:
        """Channels, each with a state."""
        return len(self.rates)

    @property
    def state_size(self) -> int:
        """Numbers of a channel's state."""
        return self.rates.shape[1]

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of the state."""
        return 1, self.channels, self.state_size

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of a token in each of `SelectiveInputs`."""
        return self.channels, self.channels, self.channels, self.state_size, self.state_size


@dataclass(frozen=True)
class SelectiveInputs:
    """The inputs of selective state spaces, one token of each row. All have contiguous rows and one dtype.

    Attributes:
        x: [rows, channels].
        gate: [rows, channels].
        time_steps: [rows, channels].
        b: [rows, state_size].
        c: [rows, state_size].
    """

    x: torch.Tensor
    gate: torch.Tensor
    time_steps: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors in order."""
        return self.x, self.gate, self.time_steps, self.b, self.c


def advance_selective_plain(inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
    """Implement `StateOperations.advance_selective`, row by row, so that every sum has one shape."""
    state, rows = states.read().float(), []
    for row in range(len(state)):
        found, state[row] = advance_token(inputs, row, state[row], space)
        rows.append(found)
    states.write(state)
    return torch.stack(rows)


def advance_token(
    inputs: SelectiveInputs, token: int, held: torch.Tensor, space: SelectiveSpace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token.

    Args:
        inputs: The inputs of all tokens.
        token: Index of the token.
        held: [channels, state_size] float32, the state before it.
        space: The state spaces.

    Returns:
        The result [channels] in the dtype of the inputs, and the state behind the token, in float32.
    """
    x, gate, time_step, b, c = (part[token].float() for part in inputs.parts)
    step = softplus(time_step + space.biases)
    held = held * (space.rates * step[:, None]).exp() + (step * x)[:, None] * b
    found = (held * c).sum(1) + space.skips * x
    return (found * silu(gate)).to(inputs.x.dtype), held
