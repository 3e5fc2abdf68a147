"""Paged attention in plain torch: correct everywhere, and the reference for every kernel.

A gather copies a row's K and V to [kv_heads, keys, head_size]; dense attention in float32 follows. Only slots that the
row can reach are gathered (places past its end read one of its own tokens with weight 0), so the contents of
unreachable slots, such as NaN, cannot leak.

Decodes are computed together, in groups of similar length. Longer rows are computed one by one in tiles of queries;
a tile reads only the keys up to its own end. Query heads of one KV head have their own dimension, so K and V are never
repeated. Indices and masks are made once per step for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from .batch import Int32Array, IntArray, PagedBatch
from .expanded_space import ExpandedSpaces
from .interface import AttentionOptions, KvLayer, check_attend, check_latents, check_rotary, check_write
from .quantised import as_bytes, dequantise, quantise

PLAIN = "plain torch"  # prefix of descriptions for layers that the reference serves
QUERY_TILE = 128
DECODE_LENGTH_MIN = 256  # shorter decodes share a group: padding is cheaper than another pass


@dataclass(frozen=True)
class _Decodes:
    """A group of decodes.

    Attributes:
        tokens: [n] int64, indices in the flat batch (None: all, in order).
        count: Number of rows.
        keys: Keys of the longest row.
        gather: [n * kv_heads * keys] int64, rows of the cache viewed as [slots * kv_heads, head_size].
        mask: [n, 1, 1, keys] float32, 0 or -inf; None if all rows are equally long.
    """

    tokens: torch.Tensor | None
    count: int
    keys: int
    gather: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Tile:
    """Queries [first, last) of the flat batch, all of one row. mask: [queries, keys] float32, 0 or -inf."""

    first: int
    last: int
    keys: int
    gather: torch.Tensor
    mask: torch.Tensor


class ReferenceAttention:
    """Attention in plain torch; see PagedAttention. Supports every device, head size, block size and group size."""

    expanded_spaces: ExpandedSpaces | None = None

    def describe(self, *_: Any, **__: Any) -> tuple[str, str]:
        """Implement `PagedAttention.describe`."""
        return PLAIN, PLAIN

    def kv_slots(self, batch: PagedBatch) -> torch.Tensor:
        """Implement `PagedAttention.kv_slots`."""
        return batch.kv_slots_on_device

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Implement `PagedAttention.write`."""
        check_write(key, value, layer, batch)
        _write(key, value, layer, batch)

    def write_latent(self, latents: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Implement `PagedAttention.write_latent`."""
        check_latents(latents, layer, batch)
        _write(latents[:, None], latents[:, None], layer, batch)

    def write_rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KvLayer,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Implement `PagedAttention.write_rotated`."""
        check_write(key, value, layer, batch)
        check_rotary(query, cos, sin, layer, batch)
        _write(rotate(key, cos, sin), value, layer, batch)
        return rotate(query, cos, sin)

    def gains_from_sharing(
        self,
        tables: Int32Array,  # noqa: ARG002
        lengths: Int32Array,  # noqa: ARG002
        block_size: int,  # noqa: ARG002
        saved_bytes_min: int = 0,  # noqa: ARG002
    ) -> bool:
        """Implement `PagedAttention.gains_from_sharing`: no kernel shares by a launch of its own."""
        return False

    def always_sharing(self) -> None:
        """Implement `PagedAttention.always_sharing`."""

    def attend(self, query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions) -> torch.Tensor:
        """Implement `PagedAttention.attend`."""
        check_attend(query, layer, batch, options)
        batch.device.refuse_capture("a plan that the host makes for each step")
        kv_heads = layer.keys.shape[2]
        plan_key = ("reference", kv_heads, options.window)
        if plan_key not in batch.plans:
            batch.plans[plan_key] = (
                _plan_decodes(batch, kv_heads, options.window),
                _plan_tiles(batch, kv_heads, options.window),
            )
        decodes, tiles = batch.plans[plan_key]
        if len(decodes) == 1 and decodes[0].tokens is None:
            return _decode(query, layer, decodes[0], options)
        shape = (*query.shape[:2], layer.values.shape[3])
        output = torch.zeros(shape, dtype=query.dtype, device=query.device)  # padding keeps the zeros
        for group in decodes:
            output[group.tokens] = _decode(query[group.tokens], layer, group, options)
        for tile in tiles:
            output[tile.first : tile.last] = _prefill(query[tile.first : tile.last], layer, tile, options)
        return output


def _write(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Store the tokens that have a slot; the padding of a static batch has none."""
    if batch.kv_slots.min(initial=0) < 0:
        kept = batch.device.upload(np.flatnonzero(batch.kv_slots >= 0))
        write_kv(key[kept], value[kept], layer, batch.slot_mapping[kept])
    else:
        write_kv(key, value, layer, batch.slot_mapping)


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slots: torch.Tensor) -> None:
    """Store key and value [tokens, kv_heads, head_size] at slots [tokens] int64 on the device, all non-negative.

    In a layer with latents, `key` has both, and `value` is not read.
    """
    parts = ((key, layer.keys, layer.key_scales), (value, layer.values, layer.value_scales))
    for new, cache, scales in parts[:1] if layer.latent else parts:
        if scales is None:
            stored = new.to(cache.dtype)
        else:
            stored, new_scales = quantise(new, cache.dtype)
            scales.flatten(0, 1).index_copy_(0, slots, new_scales)
        as_bytes(cache).flatten(0, 1).index_copy_(0, slots, as_bytes(stored))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864) in the layout of transformers' Llama.

    Args:
        x: [tokens, heads, head_size] float.
        cos: [tokens, rotated] float.
        sin: [tokens, rotated] float.

    Returns:
        x, with the first `rotated` numbers of each head replaced by x cos + rotate_half(x) sin, where rotate_half puts
        the negated second half before the first.
    """
    rotated, rest = x[..., : cos.shape[1]].float(), x[..., cos.shape[1] :]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos.float()[:, None] + torch.cat((-second, first), dim=-1) * sin.float()[:, None]
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _decode(query: torch.Tensor, layer: KvLayer, group: _Decodes, options: AttentionOptions) -> torch.Tensor:
    """Decode query [n, heads, head_size]. The queries of one KV head take the place of query positions."""
    count, heads, head_size = query.shape
    kv_heads = layer.keys.shape[2]
    q = query.float().reshape(count, kv_heads, heads // kv_heads, head_size)
    k, v = (numbers.view(count, kv_heads, group.keys, -1) for numbers in _read(layer, group.gather))
    mask = None if group.mask is None else group.mask.expand(-1, 1, heads // kv_heads, -1)
    sinks = None if options.sinks is None else options.sinks.view(1, kv_heads, -1, 1)
    return _dense(q, k, v, mask, sinks, options).reshape(count, heads, -1).to(query.dtype)


def _prefill(query: torch.Tensor, layer: KvLayer, tile: _Tile, options: AttentionOptions) -> torch.Tensor:
    """Prefill query [queries, heads, head_size] of one row."""
    count, heads, head_size = query.shape
    kv_heads = layer.keys.shape[2]
    group = heads // kv_heads
    q = query.float().view(count, kv_heads, group, head_size).permute(1, 2, 0, 3)
    k, v = (numbers.view(kv_heads, 1, tile.keys, -1).expand(-1, group, -1, -1) for numbers in _read(layer, tile.gather))
    mask = tile.mask.expand(1, 1, -1, -1)
    sinks = None if options.sinks is None else options.sinks.view(kv_heads, -1, 1, 1)
    return _dense(q, k, v, mask, sinks, options).permute(2, 0, 1, 3).reshape(count, heads, -1).to(query.dtype)


def _read(layer: KvLayer, gather: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the cache rows `gather` [n]: [n, head_size] float32 each; the latents of V are a copy."""
    k = _rows(layer.keys, layer.key_scales, gather)
    return k, k[:, : layer.latent].contiguous() if layer.latent else _rows(layer.values, layer.value_scales, gather)


def _rows(cache: torch.Tensor, scales: torch.Tensor | None, gather: torch.Tensor) -> torch.Tensor:
    """Return rows of a cache, [n, head_size] float32."""
    return dequantise(
        as_bytes(cache).view(-1, cache.shape[3]).index_select(0, gather).view(cache.dtype),
        None if scales is None else scales.view(-1).index_select(0, gather),
    )


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Compute softmax(scaling q k^T + mask) v over the last two dimensions; q, k, v: [a, b, n, head_size] float32.

    torch's fused attention has neither soft caps nor sinks, which take the unfused path. sinks: float32, broadcast to
    [a, b, n, 1].
    """
    if not options.softcap and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scaling)
    scores = torch.matmul(q, k.transpose(-1, -2))
    if options.softcap:
        scores = torch.tanh(scores * (options.scaling / options.softcap)) * options.softcap
    else:
        scores = scores * options.scaling
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1), v)
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - largest)
    return torch.matmul(weights / total, v)


def _plan_decodes(batch: PagedBatch, kv_heads: int, window: int) -> list[_Decodes]:
    rows = np.flatnonzero((batch.counts == 1) & (batch.lengths > 0))
    lengths = np.minimum(batch.lengths[rows], window) if window else batch.lengths[rows]
    size_class = np.ceil(np.log2(np.maximum(lengths, DECODE_LENGTH_MIN))).astype(np.int64)
    groups = [rows[size_class == size] for size in np.unique(size_class)]
    whole = len(groups) == 1 and len(rows) == len(batch.counts) == batch.tokens
    return [_plan_decode_group(batch, group, kv_heads, window, whole) for group in groups]


def _plan_decode_group(batch: PagedBatch, rows: IntArray, kv_heads: int, window: int, whole: bool) -> _Decodes:
    lengths = batch.lengths[rows]
    lows = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    visible = lengths - lows
    keys = int(visible.max())
    # Places past a row's end read its last token: reachable, so finite, and weighted 0 by the mask.
    positions = np.minimum(lows[:, None] + np.arange(keys), lengths[:, None] - 1)
    gather = _gather(batch, rows, positions, kv_heads)
    mask = None
    if visible.min() < keys:
        hidden = np.where(np.arange(keys) < visible[:, None], np.float32(0), np.float32(-np.inf))
        mask = batch.device.upload(hidden)[:, None, None, :]
    tokens = None if whole else batch.device.upload(batch.query_starts[rows])
    return _Decodes(tokens, len(rows), keys, gather, mask)


def _plan_tiles(batch: PagedBatch, kv_heads: int, window: int) -> list[_Tile]:
    tiles = []
    for row in np.flatnonzero(batch.counts > 1):
        start, end, first = int(batch.starts[row]), int(batch.lengths[row]), int(batch.query_starts[row])
        for low_query in range(start, end, QUERY_TILE):
            high_query = min(low_query + QUERY_TILE, end)
            low_key = max(low_query - window + 1, 0) if window else 0
            keys = np.arange(low_key, high_query)
            queries = np.arange(low_query, high_query)[:, None]
            visible = keys <= queries
            if window:
                visible &= keys > queries - window
            mask = np.where(visible, np.float32(0), np.float32(-np.inf))
            gather = _gather(batch, np.array([row]), keys[None], kv_heads)
            offset = first - start
            tiles.append(_Tile(low_query + offset, high_query + offset, len(keys), gather, batch.device.upload(mask)))
    return tiles


def _gather(batch: PagedBatch, rows: IntArray, positions: IntArray, kv_heads: int) -> torch.Tensor:
    """Return the cache rows of `positions` [n, keys], ordered [n, kv_heads, keys] and flattened."""
    slots = batch.kv_slots_of(rows, positions)
    index = slots[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]
    return batch.device.upload(index.reshape(-1))
