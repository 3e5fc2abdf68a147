"""Norms and rotation of a layer's heads, before attention."""

from __future__ import annotations

import torch

from kvforge.worker.attention.reference import rotate

from .interface import LayerOperations
from .layer_weights import FusedLayer, HeadNorms

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [tokens, rotated]


def own_query(ops: LayerOperations, layer: FusedLayer, query: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Return the normed and rotated query [tokens, heads, head_size] of a layer that has no K and V of its own.

    query: [tokens, heads x head_size], contiguous; changed.
    """
    by_head = query.unflatten(1, (-1, layer.head_size))
    if layer.head_norms is not None:
        ops.norm(by_head, layer.head_norms.query, by_head)
    return by_head if rotary is None else rotate(by_head, *rotary)


def norm_heads(ops: LayerOperations, layer: FusedLayer, norms: HeadNorms, projected: torch.Tensor) -> None:
    """Normalise Q and K in place. projected: [tokens, (heads + 2 x kv_heads) x head_size], contiguous."""
    query, key = norms.query, norms.key
    if norms.value is not None:
        values = projected.unflatten(1, (-1, layer.head_size))[:, layer.heads + layer.kv_heads :]
        ops.norm(values, norms.value, values)
    if layer.norms_each_head and query.is_plain:
        ops.head_norm(projected, query.weight, key.weight, layer.heads, layer.kv_heads, query.epsilon)
        return
    if layer.norms_each_head and query.bias is None:
        ops.norm_heads(projected, query, key, layer.heads, layer.kv_heads)
        return
    first = 0
    for norm, heads in ((query, layer.heads), (key, layer.kv_heads)):
        columns = projected[:, first : first + heads * layer.head_size]
        first += heads * layer.head_size
        rows = columns.unflatten(1, (-1, len(norm.weight)))
        ops.norm(rows, norm, rows)
