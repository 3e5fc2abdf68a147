"""The step of a layer with Kimi delta attention: a convolution, products of small rank, and a delta rule by channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvforge.worker.attention.states import StateRows

from .recurrent import (
    CONVOLUTION,
    RECURRENT,
    Convolution,
    DeltaInputs,
    DenseOperations,
    GatedDelta,
    StateOperations,
)


@dataclass(frozen=True)
class ChannelDeltaStep:
    """The step of a layer with Kimi delta attention (Kimi Linear, arXiv 2510.26692).

    Attributes:
        convolution: The convolution of queries, keys and values.
        delta: The rule, with a decay of each number of a key.
        projections: The names of the projections to queries, keys and values, to b, and to the inputs of `decay` and of
            `gate`.
        decay: [value heads x key_size, rank], the product to the decays.
        gate: [value heads x value_size, rank], the product to the gate.
        space: None.
        selective: None.
    """

    convolution: Convolution
    delta: GatedDelta
    projections: tuple[str, str, str, str, str, str]
    decay: torch.Tensor
    gate: torch.Tensor
    space: None = None
    selective: None = None

    @property
    def products(self) -> tuple[torch.Tensor, ...]:
        """Implement `MixerStep.products`."""
        return self.decay, self.gate

    def run(
        self,
        operations: StateOperations,
        dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        *parts, beta, decay, gate = (projected[name] for name in self.projections)
        mixed = operations.convolve(side_by_side(parts), states(CONVOLUTION), self.convolution)
        decay, gate = dense.linear(decay.contiguous(), self.decay), dense.linear(gate.contiguous(), self.gate)
        return operations.advance_delta(DeltaInputs(mixed, gate, beta, decay), states(RECURRENT), self.delta)


def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return [rows, n] tensors beside each other: a view if they are columns of one matrix that follow each other."""
    first, widths = parts[0], [part.shape[1] for part in parts]
    starts = [first.storage_offset() + sum(widths[:index]) for index in range(len(parts))]
    memory = first.untyped_storage().data_ptr()
    if first.stride(1) == 1 and all(
        part.untyped_storage().data_ptr() == memory
        and part.storage_offset() == start
        and part.stride() == first.stride()
        for part, start in zip(parts, starts, strict=True)
    ):
        return first.as_strided((len(first), sum(widths)), first.stride())
    return torch.cat(parts, dim=1)
