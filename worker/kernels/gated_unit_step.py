"""The step of a layer with a gated linear recurrent unit (RG-LRU, arXiv 2402.19427): a convolution, gates and the unit.

With a channel's state S, and the convolved x:

    r, i = sigmoid(products of x by head)
    a = exp(rate r)
    S = a S + sqrt(1 - a^2) i x, or i x at the begin of a sequence
    result = S activation(gate)

So S is that of a selective state space (`SelectiveSpace`) with one number; its d is r, and its input is
sqrt(1 - a^2) i x / r: the kernels of Mamba 1 compute it. They are given float32, in which d keeps r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvforge.worker.attention.states import StateRows

from .activations import Activation
from .lightning_step import GATE_OF_1
from .partition import apply_aligned
from .recurrent import CONVOLUTION, RECURRENT, Convolution, DenseOperations, StateOperations
from .selective import SelectiveInputs, SelectiveSpace

GATE_MIN = 1e-30  # of r, which is a divisor


@dataclass(frozen=True)
class GatedUnitStep:
    """The step of a layer with an RG-LRU (RecurrentGemma).

    Attributes:
        convolution: The convolution of x.
        selective: The rates of the channels, as state spaces with one number.
        gates: [heads, channels of a head, 2 x channels of a head], the products to the logits of i, then of r.
        biases: [heads, 2 x channels of a head].
        activation: Of the gate of the result.
        projections: The names of the projections to x and to the gate.
        delta: None.
        space: None.
    """

    convolution: Convolution
    selective: SelectiveSpace
    gates: torch.Tensor
    biases: torch.Tensor
    activation: Activation
    projections: tuple[str, str]
    delta: None = None
    space: None = None

    @property
    def products(self) -> tuple[torch.Tensor, ...]:
        """Implement `MixerStep.products`."""
        return (self.gates,)

    def run(
        self,
        operations: StateOperations,
        dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        x, gate = (projected[name] for name in self.projections)
        x = operations.convolve(x, states(CONVOLUTION), self.convolution)
        logits = dense.by_head(x.unflatten(1, (len(self.gates), -1)), self.gates) + self.biases
        opened, decay = (each.flatten(1) for each in apply_aligned(torch.sigmoid, logits.float()).chunk(2, dim=2))
        decay = decay.clamp(min=GATE_MIN)
        given = x * opened
        scaled = given * (-torch.expm1(2 * self.selective.rates[:, 0] * decay)).sqrt()
        begins = operations.begins(x)
        if begins is not None:
            scaled = torch.where(begins[:, None], given, scaled)
        one = decay.new_ones((1, 1)).expand(len(x), 1)
        constant = decay.new_full((1, self.selective.channels), GATE_OF_1).expand(len(x), -1)
        inputs = SelectiveInputs(scaled / decay, constant, decay.expm1().log(), one, one)
        found = operations.advance_selective(inputs, states(RECURRENT), self.selective)
        return found.to(x.dtype) * self.activation.apply(gate)
