"""Attention over latents: its projections before and after, in terms of `LayerOperations`."""

from __future__ import annotations

import torch

from kvforge.worker.attention import KvLayer, PagedAttention, PagedBatch

from .heads import Rotary
from .interface import LayerOperations
from .layer_weights import FusedLayer, LatentAttention


def attend_latents(
    ops: LayerOperations,
    attention: PagedAttention,
    layer: FusedLayer,
    normed: torch.Tensor,
    rotary: Rotary,
    cache: KvLayer,
    batch: PagedBatch,
) -> torch.Tensor:
    """Store the latents of new tokens, and attend to those of their rows.

    Args:
        ops: The operations.
        attention: Paged attention.
        layer: A layer with latents.
        normed: [tokens, hidden].
        rotary: cos and sin, [tokens, rotated] each.
        cache: The layer's latents.
        batch: The step.

    Returns:
        What the output projection multiplies, [tokens, heads x numbers of a value].
    """
    assert layer.latent is not None
    query, stored = project_latents(ops, layer, layer.latent, normed, rotary)
    attention.write_latent(stored, cache, batch)
    return expand_values(ops, layer.latent, attention.attend(query, cache, batch, layer.options))


def project_latents(
    ops: LayerOperations, layer: FusedLayer, latent: LatentAttention, normed: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absorbed queries [tokens, heads, width], and what is stored of the tokens [tokens, width]."""
    projected = ops.linear(normed, layer.projected.weight, layer.projected.bias)
    queries, own = projected[:, : -latent.width], projected[:, -latent.width :]
    if latent.query is not None:
        queries = queries if latent.query_norm is None else ops.norm(queries, latent.query_norm)
        queries = ops.linear(queries, latent.query.weight, latent.query.bias)
    by_head = queries.unflatten(1, (layer.heads, -1))
    plain = by_head.shape[2] - latent.rotated
    absorbed = torch.empty((len(normed), layer.heads, latent.width), dtype=projected.dtype, device=projected.device)
    turned = absorbed[..., latent.size :]
    stored = ops.latent_inputs(own, by_head[..., plain:], latent.latent_norm, *rotary, turned)
    ops.by_head(by_head[..., :plain], latent.absorb, absorbed[..., : latent.size])
    return absorbed, stored


def expand_values(ops: LayerOperations, latent: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
    """Return the heads' values [tokens, heads x numbers of a value] of sums of latents [tokens, heads, latent]."""
    return ops.by_head(attended, latent.expand).flatten(1)
