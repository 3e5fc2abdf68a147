"""The step of a layer with Mamba 1: a convolution, products that follow from its result, and state spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvforge.worker.attention.states import StateRows

from .layer_weights import Norm
from .recurrent import CONVOLUTION, RECURRENT, Convolution, DenseOperations, StateOperations
from .selective import SelectiveInputs, SelectiveSpace


@dataclass(frozen=True)
class SelectiveStep:
    """The step of a layer with Mamba 1.

    Attributes:
        convolution: The convolution of x.
        selective: The state spaces.
        projection: The name of the projection to x and the gate.
        shared: [rank + 2 x state_size, channels], the projection of the convolved x to time steps, B and C.
        time_steps: [channels, rank], from these to the time steps of channels.
        norms: Norms of the first time steps, of B and of C; None: none.
        delta: None.
        space: None.
    """

    convolution: Convolution
    selective: SelectiveSpace
    projection: str
    shared: torch.Tensor
    time_steps: torch.Tensor
    norms: tuple[Norm, Norm, Norm] | None = None
    delta: None = None
    space: None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """Implement `MixerStep.projections`."""
        return (self.projection,)

    @property
    def products(self) -> tuple[torch.Tensor, ...]:
        """Implement `MixerStep.products`."""
        return self.shared, self.time_steps

    def run(
        self,
        operations: StateOperations,
        dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        x, gate = projected[self.projection].chunk(2, dim=1)
        x = operations.convolve(x, states(CONVOLUTION), self.convolution)
        sizes = [self.time_steps.shape[1], *[self.selective.state_size] * 2]
        parts = list(dense.linear(x, self.shared).split(sizes, dim=1))
        if self.norms is not None:
            parts = [dense.norm(part.contiguous(), norm) for part, norm in zip(parts, self.norms, strict=True)]
        first, b, c = parts
        steps = dense.linear(first.contiguous(), self.time_steps)
        return operations.advance_selective(SelectiveInputs(x, gate, steps, b, c), states(RECURRENT), self.selective)
