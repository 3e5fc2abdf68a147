"""Paged attention in plain torch: right everywhere, and the yardstick for every kernel.

A gather brings a row's K and V into [kv_heads, keys, head_size]; what follows is dense attention in float32. Only
slots that the row can reach are ever gathered (places past its end read one of its own tokens and get weight 0), so
what lies in unreachable slots, NaN included, cannot leak.

Rows with one new token (decodes) are done together, in groups of similar length. Longer rows go one by one in tiles
of queries, each tile reading only the keys up to its own end. Query heads of one KV head are kept as a dimension of
their own: K and V are never repeated. Indices and masks are made once a step and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from .interface import AttentionOptions, IntArray, PagedBatch, check_attend, check_write

QUERY_TILE = 128
DECODE_LENGTH_MIN = 256  # decodes shorter than this share one group: padding is cheaper than another pass


@dataclass(frozen=True)
class _Decodes:
    """Rows with one new token. tokens: [n] int64, their places in the flat batch (None: all of them, in order).

    gather: [n * kv_heads * keys] int64, rows of the cache seen as [slots * kv_heads, head_size].
    mask: [n, 1, 1, keys] float32, 0 or -inf; None where all rows are equally long.
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
    """See PagedAttention. Works on every device and for every head size, block size and group size."""

    def write(
        self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch
    ) -> None:
        check_write(key, value, keys, values, batch)
        keys.flatten(0, 1).index_copy_(0, batch.slot_mapping, key.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, batch.slot_mapping, value.to(values.dtype))

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
    ) -> torch.Tensor:
        check_attend(query, keys, values, batch)
        kv_heads = keys.shape[2]
        plan_key = ("reference", kv_heads, options.window)
        if plan_key not in batch.plans:
            batch.plans[plan_key] = (
                _plan_decodes(batch, kv_heads, options.window),
                _plan_tiles(batch, kv_heads, options.window),
            )
        decodes, tiles = batch.plans[plan_key]
        if len(decodes) == 1 and decodes[0].tokens is None:
            return _decode(query, keys, values, decodes[0], options)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in decodes:
            output[group.tokens] = _decode(query[group.tokens], keys, values, group, options)
        for tile in tiles:
            output[tile.first : tile.last] = _prefill(query[tile.first : tile.last], keys, values, tile, options)
        return output


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Decodes, options: AttentionOptions
) -> torch.Tensor:
    """query: [n, heads, head_size] -> the same. The queries of one KV head take the place of query positions."""
    count, heads, head_size = query.shape
    kv_heads = keys.shape[2]
    shape = (count, kv_heads, group.keys, head_size)
    q = query.float().reshape(count, kv_heads, heads // kv_heads, head_size)
    k = keys.view(-1, head_size).index_select(0, group.gather).float().view(shape)
    v = values.view(-1, head_size).index_select(0, group.gather).float().view(shape)
    mask = None if group.mask is None else group.mask.expand(-1, 1, heads // kv_heads, -1)
    return _dense(q, k, v, mask, options).reshape(count, heads, head_size).to(query.dtype)


def _prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: _Tile, options: AttentionOptions
) -> torch.Tensor:
    """query: [queries, heads, head_size] of one row -> the same."""
    count, heads, head_size = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    q = query.float().view(count, kv_heads, group, head_size).permute(1, 2, 0, 3)
    k = keys.view(-1, head_size).index_select(0, tile.gather).float().view(kv_heads, 1, tile.keys, head_size)
    v = values.view(-1, head_size).index_select(0, tile.gather).float().view(kv_heads, 1, tile.keys, head_size)
    k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
    mask = tile.mask.expand(1, 1, -1, -1)
    return _dense(q, k, v, mask, options).permute(2, 0, 1, 3).reshape(count, heads, head_size).to(query.dtype)


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """softmax(scaling q k^T + mask) v over the last two dimensions; q, k, v: [a, b, n, head_size] float32.

    torch's fused attention cannot cap scores, so capped ones take the long way.
    """
    if not options.softcap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (options.scaling / options.softcap)
    scores = torch.tanh(scores) * options.softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def _plan_decodes(batch: PagedBatch, kv_heads: int, window: int) -> list[_Decodes]:
    rows = np.flatnonzero(batch.counts == 1)
    lengths = batch.lengths[rows]
    size_class = np.ceil(np.log2(np.maximum(lengths, DECODE_LENGTH_MIN))).astype(np.int64)
    groups = [rows[size_class == size] for size in np.unique(size_class)]
    whole = len(groups) == 1 and len(rows) == len(batch.counts)
    return [_plan_decode_group(batch, group, kv_heads, window, whole) for group in groups]


def _plan_decode_group(batch: PagedBatch, rows: IntArray, kv_heads: int, window: int, whole: bool) -> _Decodes:
    lengths = batch.lengths[rows]
    lows = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    visible = lengths - lows
    keys = int(visible.max())
    # Places past a row's end read its last token: reachable, hence finite, and weighted 0 by the mask.
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
    """Cache rows of `positions` [n, keys], ordered [n, kv_heads, keys] and flattened."""
    slots = batch.slots(rows, positions)
    index = slots[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]
    return batch.device.upload(index.reshape(-1))
