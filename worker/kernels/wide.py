"""Plain operations in float32 over weights of 16 bits, to tell rounding from a wrong description."""

from __future__ import annotations

from dataclasses import replace

import torch

from .packed import dense
from .packed_table import look_up
from .plain import PlainOperations, rms_norm
from .router import Router


class WideOperations(PlainOperations):
    """Operations in float32; see LayerOperations. Each weight is widened for the duration of its product."""

    def embed(
        self, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.embed`."""
        residual = self.look_up(tokens, table)
        return residual, rms_norm(residual, weight, epsilon)

    def look_up(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Implement `LayerOperations.look_up`."""
        return look_up(tokens, table).float()

    def rotary(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.rotary`."""
        return super().rotary(positions, frequencies, scaling, torch.promote_types(dtype, torch.float32))

    def route(
        self,
        logits: torch.Tensor,
        router: Router,
        bias: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.route`."""
        return super().route(logits, replace(router, dtype=None), bias, factors, x, shared_gate)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `LayerOperations.linear`."""
        found = self.product(x, weight, bias)
        return found if output is None else output.copy_(found)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `PlainOperations.product`."""
        return super().product(x, dense(weight).float(), None if bias is None else bias.float())
