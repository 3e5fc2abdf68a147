"""Layers with a recurrent state: what their steps of one token consist of, and the operations of these steps.

A step reads the states of all rows from their pages, computes one token of each row, and writes the states back. The
bits of a row depend on no other row. Prompts run through another form, transformers' own (see `loading.mixers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.states import StateRows

CONVOLUTION = "conv 0"  # the name of its state


@dataclass(frozen=True)
class Convolution:
    """A short causal convolution of each channel by itself, over the last inputs of a sequence.

    Its state is these inputs, [1, channels, taps], the newest one last.

    Attributes:
        weight: [channels, taps], contiguous.
        bias: [channels], or None.
        is_gated: Whether it has three inputs b, c and x of a channel, convolves b x, and multiplies the result by c
            (LFM2).
        has_silu: Whether SiLU is applied to the result.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_gated: bool = False
    has_silu: bool = False

    @property
    def inputs(self) -> int:
        """Numbers of a token's input."""
        return len(self.weight) * (3 if self.is_gated else 1)


class StateOperations(Protocol):
    """The operations of steps; a part of `LayerOperations`."""

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Advance a short convolution by one token of each row, and write the states.

        Args:
            x: [rows, inputs], the last dimension contiguous; if it is gated, b, then c, then x.
            states: The last inputs of each row.
            convolution: The convolution.

        Returns:
            [rows, channels], a new tensor in the dtype of x.
        """


class MixerStep(Protocol):
    """The step of one layer, between the projections of its input and that of its result."""

    @property
    def convolution(self) -> Convolution:
        """Its convolution."""

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the projections that it needs."""

    def run(
        self,
        operations: StateOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Compute one token of each row.

        Args:
            operations: The operations.
            projected: The projections of the input, by the names of their modules, [rows, n] each.
            states: Returns a tensor of the rows' states by its name.

        Returns:
            The input of the last projection, [rows, n].
        """


class Mixer(Protocol):
    """What a layer has in place of attention."""

    @property
    def step(self) -> MixerStep | None:
        """The step of generated tokens; None: they run through transformers' module, row by row."""

    def __call__(
        self, operations: StateOperations, normed: torch.Tensor, batch: PagedBatch, pool: KvPool
    ) -> torch.Tensor:
        """Return what is added to the residual, [tokens, hidden], from the normed tokens of a step."""


@dataclass(frozen=True)
class ConvolutionStep:
    """The step of a layer that is a short convolution between two projections.

    Attributes:
        convolution: The convolution.
        projection: The name of the projection of its input.
    """

    convolution: Convolution
    projection: str

    @property
    def projections(self) -> tuple[str, ...]:
        """Implement `MixerStep.projections`."""
        return (self.projection,)

    def run(
        self,
        operations: StateOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        return operations.convolve(projected[self.projection], states(CONVOLUTION), self.convolution)
