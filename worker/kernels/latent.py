"""Attention over latents: its projections before and after, in terms of `LayerOperations`."""

from __future__ import annotations

import torch

from kvforge.worker.attention import KvLayer, PagedAttention, PagedBatch
from kvforge.worker.attention.expanded import PromptGroup, PromptParts, latents_of, prompt_parts
from kvforge.worker.attention.expanded_space import EXPANDED_HEADS_MAX, ExpandedShape, ExpandedSpaces

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
    latent = layer.latent
    assert latent is not None
    spaces = attention.expanded_spaces if latent.is_expandable else None
    parts = prompt_parts(batch) if spaces is not None else None
    by_head, absorbed, stored = _queries(ops, layer, latent, normed, rotary)
    attention.write_latent(stored, cache, batch)
    if parts is not None and spaces is not None:
        return _attend_parts(ops, attention, spaces, layer, latent, parts, by_head, absorbed, cache)
    _absorb(ops, latent, by_head, absorbed)
    return expand_values(ops, latent, attention.attend(absorbed, cache, batch, layer.options))


def store_latents(
    ops: LayerOperations,
    attention: PagedAttention,
    layer: FusedLayer,
    normed: torch.Tensor,
    rotary: Rotary,
    cache: KvLayer,
    batch: PagedBatch,
) -> None:
    """Store the latents of new tokens as `attend_latents` does, and attend to none. For the arguments see there."""
    latent = layer.latent
    assert latent is not None
    attention.write_latent(_queries(ops, layer, latent, normed, rotary)[2], cache, batch)


def _attend_parts(
    ops: LayerOperations,
    attention: PagedAttention,
    spaces: ExpandedSpaces,
    layer: FusedLayer,
    latent: LatentAttention,
    parts: PromptParts,
    by_head: torch.Tensor,
    absorbed: torch.Tensor,
    cache: KvLayer,
) -> torch.Tensor:
    """Return what `attend_latents` does, for a step with prompt tokens. by_head, absorbed: of `_queries`."""
    query = torch.cat((by_head[..., : by_head.shape[2] - latent.rotated], absorbed[..., latent.size :]), 2)
    found = torch.empty((*query.shape[:2], latent.expand.shape[2]), dtype=query.dtype, device=query.device)
    for group in parts.groups:
        if group.tokens is None:
            return attend_expanded(ops, attention, spaces, layer, latent, group, query, cache).flatten(1)
        own = query.index_select(0, group.tokens)
        found.index_copy_(0, group.tokens, attend_expanded(ops, attention, spaces, layer, latent, group, own, cache))
    if parts.rest is not None and parts.rest_tokens is not None:
        own, others = by_head.index_select(0, parts.rest_tokens), absorbed.index_select(0, parts.rest_tokens)
        _absorb(ops, latent, own, others)
        attended = attention.attend(others, cache, parts.rest, layer.options)
        found.index_copy_(0, parts.rest_tokens, ops.by_head(attended, latent.expand))
    return found.flatten(1)


def attend_expanded(
    ops: LayerOperations,
    attention: PagedAttention,
    spaces: ExpandedSpaces,
    layer: FusedLayer,
    latent: LatentAttention,
    group: PromptGroup,
    query: torch.Tensor,
    cache: KvLayer,
) -> torch.Tensor:
    """Expand the latents of a group's rows, and attend to the keys.

    Args:
        ops: The operations.
        attention: Paged attention.
        spaces: Memory for keys and values.
        layer: The layer.
        latent: Its projections.
        group: The group.
        query: [tokens, heads, head_size], the part with rotation last.
        cache: The layer's latents.

    Returns:
        [tokens, heads, numbers of a value].
    """
    plain, value = latent.absorb.shape[1], latent.expand.shape[2]
    latents = latents_of(cache, group.slots, query.dtype)
    found = []
    for first in range(0, layer.heads, EXPANDED_HEADS_MAX):
        heads = min(EXPANDED_HEADS_MAX, layer.heads - first)
        weight = latent.expansion[first * (plain + value) : (first + heads) * (plain + value)]
        shape = ExpandedShape(group.batch.block_size, heads, plain, latent.rotated, value, query.dtype)
        space = spaces.of(shape)
        ops.linear(latents[:, : latent.size], weight, None, space.product[: len(latents)])
        space.fill(latents[:, latent.size :])
        own, expanded = query[:, first : first + heads], KvLayer(space.keys, space.values)
        found.append(attention.attend(own, expanded, group.batch, layer.options)[..., :value])
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def project_latents(
    ops: LayerOperations, layer: FusedLayer, latent: LatentAttention, normed: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absorbed queries [tokens, heads, width], and what is stored of the tokens [tokens, width]."""
    by_head, absorbed, stored = _queries(ops, layer, latent, normed, rotary)
    _absorb(ops, latent, by_head, absorbed)
    return absorbed, stored


def _queries(
    ops: LayerOperations, layer: FusedLayer, latent: LatentAttention, normed: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project new tokens.

    Returns:
        Queries [tokens, heads, head_size] before rotation; [tokens, heads, width] with their rotated part behind a
        place for what `_absorb` stores; and what is stored of the tokens, [tokens, width].
    """
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
    return by_head, absorbed, stored


def _absorb(ops: LayerOperations, latent: LatentAttention, by_head: torch.Tensor, absorbed: torch.Tensor) -> None:
    """Store the queries' part without rotation in the space of the latents."""
    ops.by_head(by_head[..., : by_head.shape[2] - latent.rotated], latent.absorb, absorbed[..., : latent.size])


def expand_values(ops: LayerOperations, latent: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
    """Return the heads' values [tokens, heads x numbers of a value] of sums of latents [tokens, heads, latent]."""
    return ops.by_head(attended, latent.expand).flatten(1)
