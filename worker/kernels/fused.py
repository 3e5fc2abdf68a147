"""Decoder layer operations as Triton kernels, and small matrix products where these are faster than torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, pad

from kvforge.worker.attention import KvLayer
from kvforge.worker.device.device import Device
from kvforge.worker.device.targets import current_target

from . import combine, norm, rotary, router_kernel
from .activation import apply_activation
from .activations import SILU, Activation
from .expert_loop import Matrices
from .expert_sort import sort_by_expert
from .grouped import Gating, multiply_down, multiply_up, sum_places
from .grouped_tiles import is_even, tiles_for, tokens_per_block
from .interface import SLAB
from .layer_weights import Norm
from .linear import FEW, LinearTiles, choose_tiles, linear_parts
from .plain import PlainOperations
from .project import can_project, project
from .router import Router

NARROW = (torch.float16, torch.bfloat16)


class FusedOperations:
    """Operations on Triton kernels; see LayerOperations.

    Args:
        device: The GPU.
        overlap: Whether kernels may start before the previous one has ended (see `overlap`); None: if the GPU can.
        slab: Compute all products with torch, this many rows at a time; 0: all rows at once, with the fastest kernel.
    """

    def __init__(self, device: Device, overlap: bool | None = None, slab: int = 0) -> None:
        self._target = current_target(device)
        self._plain = PlainOperations()
        self._can_widen = device.widens_products
        self.overlap = self._target.chained if overlap is None else overlap
        self.slab = slab

    def embed(
        self, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.embed`."""
        return norm.embed_norm(tokens, table, weight, epsilon, self.overlap, self._target.warp_size)

    def look_up(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Implement `LayerOperations.look_up`."""
        return self._plain.look_up(tokens, table)

    def add_norm(
        self, addend: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Implement `LayerOperations.add_norm`."""
        return norm.add_norm(addend, residual, weight, epsilon, self.overlap, self._target.warp_size)

    def head_norm(
        self,
        projected: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> None:
        """Implement `LayerOperations.head_norm`."""
        warp_size = self._target.warp_size
        norm.head_norm(projected, query_weight, key_weight, heads, kv_heads, epsilon, self.overlap, warp_size)

    def norm(self, x: torch.Tensor, norm: Norm, output: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.norm`."""
        return combine.normed(x, norm, output, self.overlap, self._target.warp_size)

    def norm_heads(self, projected: torch.Tensor, query: Norm, key: Norm, heads: int, kv_heads: int) -> None:
        """Implement `LayerOperations.norm_heads`."""
        combine.normed_heads(projected, query, key, heads, kv_heads, self.overlap, self._target.warp_size)

    def combine(
        self,
        addend: torch.Tensor,
        residual: torch.Tensor,
        after: Norm | None,
        scale: float,
        following: Norm | None,
    ) -> torch.Tensor:
        """Implement `LayerOperations.combine`."""
        warp_size = self._target.warp_size
        return combine.combined(addend, residual, after, scale, following, self.overlap, warp_size)

    def gated(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation = SILU,
    ) -> torch.Tensor:
        """Implement `LayerOperations.gated`."""
        return self._activated(x, weight, bias, activation, gated=True)

    def activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """Implement `LayerOperations.activated`."""
        return self._activated(x, weight, bias, activation, gated=False)

    def _activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation, *, gated: bool
    ) -> torch.Tensor:
        tiles = self._tiles(x, weight, gated=gated)
        if tiles is None:
            return apply_activation(self._product(x, weight, bias), activation, gated, self.overlap)
        found = linear_parts(x, weight, bias, tiles, x.dtype, activation=activation, gated=gated, overlap=self.overlap)
        return found[0]

    def route(
        self,
        logits: torch.Tensor,
        router: Router,
        bias: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.route`."""
        return router_kernel.route(logits, router, bias, factors, self.overlap)

    def experts(self, *arguments: Any) -> torch.Tensor:
        """Implement `LayerOperations.experts`."""
        parts = self.expert_parts(*arguments)
        return sum_places(parts, self.overlap) if parts.numel() else parts[0]

    def expert_parts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        up: Matrices,
        up_bias: torch.Tensor | None,
        down: Matrices,
        down_bias: torch.Tensor | None,
        activation: Activation,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Implement `LayerOperations.expert_parts`."""
        assert isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor), "experts in one tensor"
        if not len(x):
            return torch.empty_like(x)[None]
        chosen, weights = chosen.int().contiguous(), weights.float().contiguous()
        experts, width = len(up), chosen.shape[1]
        target, overlap = self._target, self.overlap
        even = is_even(*up.shape[1:]) and is_even(*down.shape[1:])
        tokens = tokens_per_block(chosen.numel(), experts, x.dtype, target, even=even)
        first, second = (tiles_for(tokens, each.shape[1], each.shape[2], x.dtype, target) for each in (up, down))
        pairs = sort_by_expert(chosen, experts, tokens, overlap)
        gating = Gating(activation, gated=up.shape[1] == 2 * down.shape[2], interleaved=interleaved)
        inner = multiply_up(x, up, up_bias, gating, pairs, width, first, target, overlap)
        return multiply_down(inner, down, down_bias, weights, pairs, second, target, overlap)

    def rotary(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.rotary`."""
        return rotary.rotary(positions, frequencies, scaling, dtype, self.overlap)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `LayerOperations.linear`."""
        tiles = self._tiles(x, weight)
        if tiles is None:
            slab = self._slab(weight)
            if output is not None and output.dtype != x.dtype and bias is None and self._can_widen and not slab:
                return torch.mm(x, weight.t(), out_dtype=output.dtype, out=output)
            if slab:
                found = self._product(x, weight, bias)
                return found if output is None else output.copy_(found)
            return self._plain.linear(x, weight, bias, output)
        into = None if output is None else output[None]
        return linear_parts(x, weight, bias, tiles, x.dtype, output=into, overlap=self.overlap)[0]

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Implement `LayerOperations.wide_linear`."""
        return self._in_slabs(x.float(), weight, bias, SLAB if self._target.steady else 0)

    def project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KvLayer,
        slots: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """Implement `LayerOperations.project`."""
        tiles = self._tiles(x, weight)
        if tiles is None or not can_project(weight, cos, layer, tiles):
            return None
        return project(x, weight, bias, cos, sin, layer, slots(), tiles, overlap=self.overlap)

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.linear_parts`."""
        tiles = self._tiles(x, weight, divisible=True)
        if tiles is None:
            return self._product(x, weight, bias)[None]
        return linear_parts(x, weight, bias, tiles, torch.float32, overlap=self.overlap)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute torch's product, in slabs padded with zeros where it must not depend on the number of rows."""
        return self._in_slabs(x, weight, bias, self._slab(weight))

    def _in_slabs(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slab: int) -> torch.Tensor:
        """Compute torch's product of `slab` rows at a time; 0: of all rows."""
        if not slab:
            return linear(x, weight, bias)
        count = len(x)
        padded = pad(x, (0, 0, 0, -count % slab))
        return torch.cat([linear(part, weight, bias) for part in padded.split(slab)])[:count]

    def _slab(self, weight: torch.Tensor) -> int:
        """Return the rows of a slab.

        For few results per row, the library's sums vary with the row count, and a trial sees too few to notice.
        """
        return SLAB if not self.slab and self._target.steady and len(weight) <= FEW else self.slab

    def decode(self, *_: Any) -> torch.Tensor | None:
        """Return None: captured graphs take this role."""
        return None

    def _tiles(
        self, x: torch.Tensor, weight: torch.Tensor, *, divisible: bool = False, gated: bool = False
    ) -> LinearTiles | None:
        if x.dtype not in NARROW or self.slab:
            return None
        tokens, k = x.shape
        n = len(weight) // 2 if gated else len(weight)
        return choose_tiles(tokens, n, k, self._target, divisible=divisible, gated=gated)
