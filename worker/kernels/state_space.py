"""The state spaces of Mamba 2: what a layer's step of one token consists of, and that step in plain torch.

`recurrent.StateOperations` has the operation, state_space_kernels.py its Triton kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch.nn.functional import silu, softplus

from kvforge.worker.attention.states import StateRows


@dataclass(frozen=True)
class StateSpace:
    """State spaces with one decay for each head (Mamba 2, arXiv 2405.21060), and the gated norm of their results.

    With a head's state S [head_size, state_size], its input x, and B and C of its group:

        d = softplus(time step + bias)
        S = exp(rate d) S + d x B^T
        y = S C + skip x
        result = weight * norm(y silu(gate)), or y silu(gate)

    The heads of a group follow each other, have the same B and C, and are normalised together.

    Attributes:
        groups: Groups of heads.
        state_size: Numbers of B or C.
        rates: [heads] float32, negative.
        biases: [heads] float32.
        skips: [heads] float32.
        weight: [heads x head_size], of the norm.
        epsilon: Of the norm.
        normalises: Whether there is a norm. The weight of a space without one has ones.
        limits: The least and the largest d of prompt tokens; transformers limits no generated token's.
    """

    groups: int
    state_size: int
    rates: torch.Tensor
    biases: torch.Tensor
    skips: torch.Tensor
    weight: torch.Tensor
    epsilon: float
    normalises: bool = True
    limits: tuple[float, float] = (0.0, inf)

    @property
    def heads(self) -> int:
        """Heads, each with a state."""
        return len(self.rates)

    @property
    def head_size(self) -> int:
        """Numbers of a head's input and result."""
        return len(self.weight) // self.heads

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of the state."""
        return 1, self.heads, self.head_size, self.state_size

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of all heads' x, and of all groups' B and C, of a token."""
        shared = self.groups * self.state_size
        return len(self.weight), shared, shared


@dataclass(frozen=True)
class StateSpaceInputs:
    """The inputs of state spaces, one token of each row. All have contiguous rows and one dtype.

    Attributes:
        mixed: [rows, sum of `StateSpace.parts`], x, B and C.
        gate: [rows, heads x head_size].
        time_steps: [rows, heads].
    """

    mixed: torch.Tensor
    gate: torch.Tensor
    time_steps: torch.Tensor


def advance_plain(inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
    """Implement `StateOperations.advance_state_space`, row by row, so that every sum has one shape."""
    state, dtype, rows = states.read().float(), inputs.mixed.dtype, []
    for row in range(len(state)):
        x, *shared = inputs.mixed[row].float().split(space.parts)
        x = x.view(space.heads, -1)
        repeats = space.heads // space.groups
        b, c = (each.view(space.groups, 1, -1).repeat_interleave(repeats, 0) for each in shared)
        step = softplus(inputs.time_steps[row].float() + space.biases)
        kept = (space.rates * step).exp()[:, None, None]
        state[row] = held = state[row] * kept + (step[:, None] * x)[..., None] * b
        found = ((held * c).sum(2) + space.skips[:, None] * x).to(dtype).float().flatten()
        rows.append(finish((found * silu(inputs.gate[row].float()))[None], space, dtype)[0])
    states.write(state)
    return torch.stack(rows)


def finish(gated: torch.Tensor, space: StateSpace, dtype: torch.dtype) -> torch.Tensor:
    """Normalise y silu(gate) by groups, if the space has a norm.

    Args:
        gated: [tokens, heads x head_size] float32.
        space: Has the weight.
        dtype: Of the result.

    Returns:
        The shape of `gated`.
    """
    if not space.normalises:
        return gated.to(dtype)
    by_group = gated.unflatten(1, (space.groups, -1))
    normed = by_group * torch.rsqrt(by_group.square().mean(2, keepdim=True) + space.epsilon)
    return (space.weight * normed.to(dtype).flatten(1)).to(dtype)
