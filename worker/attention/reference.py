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
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from .batch import IntArray, PagedBatch
from .interface import AttentionOptions, KvLayer, check_attend, check_rotary, check_write
from .quantised import as_bytes, dequantise, quantise

PLAIN = "plain torch"  # what an implementation's description begins with where this one serves
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

    def describe(self, *_: Any) -> tuple[str, str]:
        return PLAIN, PLAIN

    def kv_slots(self, batch: PagedBatch) -> torch.Tensor:
        return batch.kv_slots_on_device

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        check_write(key, value, layer, batch)
        _write(key, value, layer, batch)

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
        check_write(key, value, layer, batch)
        check_rotary(query, cos, sin, layer, batch)
        _write(rotate(key, cos, sin), value, layer, batch)
        return rotate(query, cos, sin)

    def attend(self, query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions) -> torch.Tensor:
        check_attend(query, layer, batch)
        batch.device.refuse_capture("what the host plans for each step")
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
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # padding keeps the zeros
        for group in decodes:
            output[group.tokens] = _decode(query[group.tokens], layer, group, options)
        for tile in tiles:
            output[tile.first : tile.last] = _prefill(query[tile.first : tile.last], layer, tile, options)
        return output


def _write(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Stores the tokens that have a slot; the padding of a static batch has none."""
    if batch.kv_slots.min(initial=0) < 0:
        kept = batch.device.upload(np.flatnonzero(batch.kv_slots >= 0))
        write_kv(key[kept], value[kept], layer, batch.slot_mapping[kept])
    else:
        write_kv(key, value, layer, batch.slot_mapping)


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slots: torch.Tensor) -> None:
    """Stores key, value [tokens, kv_heads, head_size] at slots [tokens] int64 device, none of which is negative."""
    for new, cache, scales in ((key, layer.keys, layer.key_scales), (value, layer.values, layer.value_scales)):
        if scales is None:
            stored = new.to(cache.dtype)
        else:
            stored, new_scales = quantise(new, cache.dtype)
            scales.flatten(0, 1).index_copy_(0, slots, new_scales)
        as_bytes(cache).flatten(0, 1).index_copy_(0, slots, as_bytes(stored))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864) in the layout of transformers' Llama.

    x: [tokens, heads, head_size] float. cos, sin: [tokens, rotated] float: the first `rotated` numbers of each head
    become x cos + rotate_half(x) sin, where rotate_half puts the negated second half before the first.
    """
    rotated, rest = x[..., : cos.shape[1]].float(), x[..., cos.shape[1] :]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos.float()[:, None] + torch.cat((-second, first), dim=-1) * sin.float()[:, None]
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _decode(query: torch.Tensor, layer: KvLayer, group: _Decodes, options: AttentionOptions) -> torch.Tensor:
    """query: [n, heads, head_size] -> the same. The queries of one KV head take the place of query positions."""
    count, heads, head_size = query.shape
    kv_heads = layer.keys.shape[2]
    shape = (count, kv_heads, group.keys, head_size)
    q = query.float().reshape(count, kv_heads, heads // kv_heads, head_size)
    k, v = (numbers.view(shape) for numbers in _read(layer, group.gather))
    mask = None if group.mask is None else group.mask.expand(-1, 1, heads // kv_heads, -1)
    return _dense(q, k, v, mask, options).reshape(count, heads, head_size).to(query.dtype)


def _prefill(query: torch.Tensor, layer: KvLayer, tile: _Tile, options: AttentionOptions) -> torch.Tensor:
    """query: [queries, heads, head_size] of one row -> the same."""
    count, heads, head_size = query.shape
    kv_heads = layer.keys.shape[2]
    group = heads // kv_heads
    q = query.float().view(count, kv_heads, group, head_size).permute(1, 2, 0, 3)
    shape = (kv_heads, 1, tile.keys, head_size)
    k, v = (numbers.view(shape).expand(-1, group, -1, -1) for numbers in _read(layer, tile.gather))
    mask = tile.mask.expand(1, 1, -1, -1)
    return _dense(q, k, v, mask, options).permute(2, 0, 1, 3).reshape(count, heads, head_size).to(query.dtype)


def _read(layer: KvLayer, gather: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the cache rows `gather` [n]: [n, head_size] float32 each."""
    caches = ((layer.keys, layer.key_scales), (layer.values, layer.value_scales))
    k, v = (
        dequantise(
            as_bytes(cache).view(-1, cache.shape[3]).index_select(0, gather).view(cache.dtype),
            None if scales is None else scales.view(-1).index_select(0, gather),
        )
        for cache, scales in caches
    )
    return k, v


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
    rows = np.flatnonzero((batch.counts == 1) & (batch.lengths > 0))
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
    slots = batch.kv_slots_of(rows, positions)
    index = slots[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]
    return batch.device.upload(index.reshape(-1))
