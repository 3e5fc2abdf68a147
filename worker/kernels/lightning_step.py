"""The step of a layer with lightning attention: a linear attention with decays, its norm and its gate.

With a head's state S [value, key], its decay and its query, key and value (arXiv 2405.17381):

    S = decay S + v k^T
    result = sigmoid(gate) norm(S q)

So S is that of state spaces with time steps d of 1: x is v, B is k and C is q. The kernels of Mamba 2 compute
it, with a constant where a time step and a gate are read. The constant of the gate multiplies S q by about 1, which the
norm takes away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn.functional import silu

from kvforge.worker.attention.states import StateRows
from kvforge.worker.device.ranks import Ranks

from .activations import Activation
from .layer_weights import Norm
from .partition import apply_aligned
from .recurrent import RECURRENT, DenseOperations, StateOperations
from .state_space import StateSpace, StateSpaceInputs
from .torch_functions import mean_of_rows

STEP_OF_1 = math.log(math.e - 1)  # its softplus is 1
GATE_OF_1 = 1.2784645427610738  # its SiLU is 1


@dataclass(frozen=True)
class LightningStep:
    """The step of a layer with lightning attention (MiniMax).

    Attributes:
        space: The decays and sizes of the heads.
        norm: Of the results of all heads together.
        activation: Of queries, keys and values.
        projections: The names of the projections to queries, keys and values, head by head, and to the gate.
        constant: [1, heads x head_size], the gate of the state spaces.
        time_steps: [1, heads], zeros.
        ranks: The ranks with the other heads; None: this process has all.
        convolution: None.
        delta: None.
        selective: None.
        products: None.
    """

    space: StateSpace
    norm: Norm
    activation: Activation
    projections: tuple[str, str]
    constant: torch.Tensor
    time_steps: torch.Tensor
    ranks: Ranks | None = None
    convolution: None = None
    delta: None = None
    selective: None = None
    products: tuple[()] = ()

    @classmethod
    def of(cls, decays: torch.Tensor, norm: Norm, activation: Activation, projections: tuple[str, str]) -> Self:
        """Describe a layer.

        Args:
            decays: [heads] float32, logarithms of the heads' decays.
            norm: Of the results of all heads together.
            activation: Of queries, keys and values.
            projections: The names of the projections.
        """
        heads, weight = len(decays), norm.weight
        zeros = torch.zeros_like(decays)
        biases = torch.full_like(decays, STEP_OF_1)
        space = StateSpace(heads, len(weight) // heads, decays, biases, zeros, weight, 0.0, normalises=False)
        constant = torch.full_like(weight, GATE_OF_1)[None]  # rounded to the dtype of the model
        epsilon = norm.epsilon * float(silu(constant[0, :1].float())) ** 2 if not weight.is_meta else norm.epsilon
        time_steps = weight.new_zeros((1, heads))
        return cls(space, replace(norm, epsilon=epsilon), activation, projections, constant, time_steps)

    def run(
        self,
        operations: StateOperations,
        dense: DenseOperations,
        projected: Mapping[str, torch.Tensor],
        states: Callable[[str], StateRows],
    ) -> torch.Tensor:
        """Implement `MixerStep.run`."""
        given, gate = (projected[name] for name in self.projections)
        rows = len(given)
        query, key, value = self.activation.apply(given).reshape(rows, self.space.heads, 3, -1).unbind(2)
        mixed = torch.stack((value, key, query), dim=1).flatten(1)
        constant, time_steps = (each.expand(rows, -1).to(mixed.dtype) for each in (self.constant, self.time_steps))
        inputs = StateSpaceInputs(mixed, constant, time_steps)
        found = operations.advance_state_space(inputs, states(RECURRENT), self.space)
        normed = dense.norm(found, self.norm) if self.ranks is None else self._norm_with(self.ranks, found)
        return apply_aligned(torch.sigmoid, gate) * normed

    def _norm_with(self, ranks: Ranks, found: torch.Tensor) -> torch.Tensor:
        """Normalise the results of all ranks' heads; return those of this rank's."""
        wide = found.float()
        means = ranks.gather(mean_of_rows(wide * wide, -1, True))
        total = means[0]
        for each in means[1:]:
            total = total + each
        scale = apply_aligned(torch.rsqrt, total / ranks.count + self.norm.epsilon)
        return self.norm.weight * (wide * scale).to(found.dtype)
