"""A mixture of experts in which a token's result does not depend on other tokens.

Each expert has its own product of its tokens. The results of a token's experts are added in the order of the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .interface import LayerOperations
from .torch_functions import product

Matrices = torch.Tensor | Sequence[torch.Tensor]  # one [n, k] per expert


@dataclass(frozen=True)
class Experts:
    """The forward pass of a transformers module of experts, which still provides its gate and activation.

    Attributes:
        part: The transformers module.
        operations: Operations that multiply.
        up: Matrices [inner, hidden], or [2 x inner, hidden] with the gate.
        up_bias: [experts, rows of `up`].
        down: Matrices [hidden, inner].
        down_bias: [experts, hidden].
    """

    part: Any
    operations: LayerOperations
    up: Matrices
    up_bias: torch.Tensor | None
    down: Matrices
    down_bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the experts of each token.

        Args:
            x: [tokens, hidden].
            chosen: [tokens, experts per token] int64.
            weights: [tokens, experts per token].

        Returns:
            [tokens, hidden].
        """
        with torch._C.DisableTorchFunction():  # avoids the cost of replaced functions
            return self._all(x, chosen, weights)

    def _all(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, width = chosen.shape
        if tokens == 1:
            given = torch.cat([self._run(expert, x) for expert in chosen[0].tolist()])
        else:
            given = self._by_expert(x, chosen.reshape(-1), width)
        weighted = given.view(tokens, width, -1) * weights[..., None]
        total = weighted[:, 0].float()
        for place in range(1, width):
            total = total + weighted[:, place]
        return total.to(x.dtype)

    def _by_expert(self, x: torch.Tensor, by_place: torch.Tensor, width: int) -> torch.Tensor:
        """Return the result of each chosen expert, [tokens x width, hidden]."""
        order = by_place.argsort(stable=True)
        given = x.new_empty((len(by_place), x.shape[1]))
        first = 0
        for expert, count in enumerate(by_place.bincount().tolist()):
            if count:
                places = order[first : first + count]
                given[places] = self._run(expert, x[places // width])
                first += count
        return given

    def _run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        up = product(self.operations, x, self.up[expert], None if self.up_bias is None else self.up_bias[expert])
        inner = self.part._apply_gate(up) if self.part.has_gate else self.part.act_fn(up)
        bias = None if self.down_bias is None else self.down_bias[expert]
        return product(self.operations, inner, self.down[expert], bias)
