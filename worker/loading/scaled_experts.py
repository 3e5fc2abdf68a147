"""Llama 4's module of experts, with the attributes of transformers' other ones."""

from __future__ import annotations

from typing import Any

import torch

from kvforge.worker.kernels import LayerOperations
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.torch_functions import product


class ScaledExperts:
    """Experts that get the inputs of all tokens once for each expert, scaled by the router (zero: not chosen).

    Args:
        part: transformers' module. Its matrices are [experts, hidden, 2 x inner], the gate first, and [experts, inner,
            hidden].
    """

    is_transposed, has_gate, has_bias = True, True, False

    def __init__(self, part: Any) -> None:
        self.part = part

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """The matrices of gate and up."""
        return self.part.gate_up_proj

    @property
    def down_proj(self) -> torch.Tensor:
        """The last matrices."""
        return self.part.down_proj

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.part.act_fn(gate)

    def compute_with(self, operations: LayerOperations, matrices: ExpertMatrices) -> None:
        """Let transformers' module compute with packed matrices, and release its own."""
        part = self.part
        experts = len(part.down_proj)
        del part.gate_up_proj, part.down_proj

        def forward(x: torch.Tensor) -> torch.Tensor:
            found = []
            for up, down, tokens in zip(matrices.up, matrices.down, x.view(experts, -1, x.shape[-1]), strict=True):
                found.append(product(operations, self._apply_gate(product(operations, tokens, up, None)), down, None))
            return torch.cat(found)

        part.forward = forward
