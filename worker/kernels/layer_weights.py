"""The weights of one decoder layer, as few and large matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvforge.worker.attention import AttentionOptions


@dataclass(frozen=True)
class Projection:
    """A linear projection. weight: [n, k], packed for `PackedOperations`. bias: [n], or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one decoder layer. head_norms: [head_size] for Q and K. rotates: uses rotary embedding."""

    options: AttentionOptions
    rotates: bool
    heads: int
    kv_heads: int
    head_size: int
    input_norm: torch.Tensor
    projected: Projection
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Projection
    inner_norm: torch.Tensor
    gate_up: Projection
    down: Projection
