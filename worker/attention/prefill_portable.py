"""Prefill attention for every target, reading K and V in place through the block table.

One program computes one tile of queries of the plan (see `prefill`) for the query heads of its pack, which share a KV
head. The online softmax (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1) keeps scores in float32; the two
matrix products take operands of the query's dtype. Tiles of keys that every query sees completely are not masked.

Unreachable slots are never loaded: their places hold zeros, in V too, because 0 x NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvforge.worker.device.target import HEAD_UNIT

from .plan_items import FIELDS, PREFILL_TILE, place

NO_WINDOW = 1 << 30  # tokens: more than any row has
_NO_WINDOW = tl.constexpr(NO_WINDOW)
_UNIT = tl.constexpr(HEAD_UNIT)
_FIELDS = tl.constexpr(FIELDS)
_ROW, _FIRST_TOKEN, _POSITION, _TOKENS, _ROW_START, _ROW_LENGTH = (
    tl.constexpr(place(PREFILL_TILE, name))
    for name in ("row", "first_token", "position", "tokens", "row_start", "row_length")
)


@triton.jit
def _load_tile(
    cache,
    rows,
    columns,
    inside,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load [KEYS, HEAD_PAD] as stored. rows: [KEYS] int64, rows of the pool as [slots x kv_heads, head_size]."""
    at = cache + rows[:, None] * HEAD + columns[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (columns < HEAD)[None, :], other=0.0)
    elif HEAD < HEAD_PAD:
        return tl.load(at, mask=(columns < HEAD)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _convert(stored, dtype: tl.constexpr, BITWISE: tl.constexpr, E4M3: tl.constexpr):
    """Convert stored numbers to `dtype`. int8 and fp8 fit bfloat16 and float16 exactly, without rounding.

    BITWISE: avoid conversions that AMD's GPUs lack, which the compiler expands into long code, and that NVIDIA's lack
    before sm_89, where it rejects the dtype itself. E4M3: int8 numbers are then the bits of fp8.
    """
    if BITWISE:
        numbers = stored
        if E4M3:
            # The bits of s.eeee.mmm are those of a float16 2 ** 8 times smaller, also for subnormal numbers.
            bits = stored.to(tl.int16)
            numbers = ((bits & -32768) | ((bits << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
        if dtype == tl.bfloat16 and numbers.dtype != tl.bfloat16:
            bits = numbers.to(tl.float32).to(tl.int32, bitcast=True)
            return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return numbers.to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def _step(
    accumulator,
    largest,
    total,
    q,
    positions,
    first,
    low,
    high,
    window,
    table,
    keys,
    values,
    key_scales,
    value_scales,
    kv_head,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    POOL_BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    QUANTISED: tl.constexpr,
    BITWISE: tl.constexpr,
    E4M3: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Process keys first ... first + KEYS - 1. low, high: bounds of the tokens that any query of the row reaches."""
    key = first + tl.arange(0, KEYS)
    columns = tl.arange(0, HEAD_PAD)
    inside = (key >= low) & (key < high)
    if MASKED:
        block = tl.load(table + key // POOL_BLOCK, mask=inside, other=0)
    else:
        block = tl.load(table + key // POOL_BLOCK)
    rows = (block.to(tl.int64) * POOL_BLOCK + key % POOL_BLOCK) * KV_HEADS + kv_head
    k = _load_tile(keys, rows, columns, inside, HEAD, HEAD_PAD, MASKED)
    k = _convert(k, q.dtype, BITWISE, E4M3)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if QUANTISED:
        if MASKED:
            key_scale = tl.load(key_scales + rows, mask=inside, other=0.0)
        else:
            key_scale = tl.load(key_scales + rows)
        scores *= key_scale[None, :]
    if cap > 0.0:
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap) + 1.0)  # tanh(x) = 1 - 2 / (e^2x + 1)
    if MASKED:
        seen = (key[None, :] <= positions[:, None]) & (key[None, :] > positions[:, None] - window) & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    # Rounded here, so that a factor of 1 leaves the sums unchanged: depending on neighbouring queries, a query may or
    # may not process steps of keys that it does not see.
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    base = new_largest
    if MASKED:
        base = tl.where(new_largest == float("-inf"), 0.0, base)  # the query has seen no key yet
    weights = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(largest - base)
    total = total * fade + tl.sum(weights, axis=1)
    v = _load_tile(values, rows, columns, inside, HEAD, HEAD_PAD, MASKED)
    if QUANTISED:
        if MASKED:
            value_scale = tl.load(value_scales + rows, mask=inside, other=0.0)
        else:
            value_scale = tl.load(value_scales + rows)
        if q.dtype == tl.float16:  # too narrow for a weight times a scale
            v = _convert(v, tl.float32, BITWISE, E4M3) * value_scale[:, None]
        else:
            weights *= value_scale[None, :]
    if v.dtype == tl.float32:
        v = v.to(q.dtype)
    else:
        v = _convert(v, q.dtype, BITWISE, E4M3)
    accumulator = accumulator * fade[:, None]
    accumulator = tl.dot(weights.to(q.dtype), v, accumulator, input_precision="ieee")
    return accumulator, new_largest, total


# As in `decode_kernel`, specialising on these arguments gains nothing.
@triton.jit(
    do_not_specialize=[
        "query_token_stride", "query_head_stride", "key_scales", "value_scales", "output_token_stride",
        "output_head_stride", "table_stride", "window",
    ]
)  # fmt: skip
def prefill_portable(
    query,
    query_token_stride,
    query_head_stride,
    keys,
    values,
    key_scales,
    value_scales,
    output,
    output_token_stride,
    output_head_stride,
    tables,
    table_stride,
    items,
    scale,
    cap,
    window,
    KV_HEADS: tl.constexpr,
    PACKS: tl.constexpr,
    PACK: tl.constexpr,
    POOL_BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    QUANTISED: tl.constexpr,
    BITWISE: tl.constexpr,
    E4M3: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute one tile. Grid: [tiles x PACKS]. items: [tiles, FIELDS] int32, see `plan_items.PREFILL_TILE`.

    PACK: query heads of one tile; PACKS: packs of the query. QUERIES: rows of a tile, tokens x PACK. Strides of query
    and
    output: in units of HEAD_UNIT numbers. scale: factor of scores inside exp2. cap: factor of q.k inside the soft cap's
    exp2, 0: no cap. window: tokens that a query sees, with its own. UPCAST: multiply in float32, for Triton's
    interpreter, which multiplies the bits of bfloat16 as integers.
    """
    TOKENS: tl.constexpr = QUERIES // PACK
    program = tl.program_id(0)
    pack = program % PACKS
    item = items + (program // PACKS) * _FIELDS
    row = tl.load(item + _ROW)
    token = tl.load(item + _FIRST_TOKEN)
    position = tl.load(item + _POSITION)
    count = tl.load(item + _TOKENS)
    start = tl.load(item + _ROW_START)
    length = tl.load(item + _ROW_LENGTH)
    kv_head = pack // (PACKS // KV_HEADS)
    table = tables + row.to(tl.int64) * table_stride

    tile_row = tl.arange(0, QUERIES)
    columns = tl.arange(0, HEAD_PAD)
    of_token = tile_row // PACK
    of_head = pack * PACK + tile_row % PACK
    tokens = (token + of_token).to(tl.int64)
    positions = tl.minimum(position + of_token, length - 1)  # rows beyond the tile's tokens repeat its last
    mine = (of_token < count)[:, None] & (columns < HEAD)[None, :]
    q = tl.load(
        query
        + tokens[:, None] * (query_token_stride * _UNIT)
        + of_head[:, None] * (query_head_stride * _UNIT)
        + columns[None, :],
        mask=mine,
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)

    accumulator = tl.zeros([QUERIES, HEAD_PAD], tl.float32)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    end = tl.minimum(position + TOKENS, length)
    low = tl.maximum(start - window + 1, 0)
    first = tl.maximum(position - window + 1, 0) // KEYS * KEYS
    # Every query sees all keys from `whole` on that come before `causal`; the tiles on either side are masked.
    causal = (position + 1) // KEYS * KEYS
    whole = (tl.maximum(end - window, 0) + KEYS - 1) // KEYS * KEYS
    whole = tl.maximum(tl.minimum(whole, causal), first)
    # With a window all tiles are masked, in sequence: the order of a query's sums must not depend on neighbouring
    # queries.
    whole = tl.where(window < _NO_WINDOW, first, whole)
    causal = tl.where(window < _NO_WINDOW, first, tl.maximum(causal, whole))
    for at in tl.range(whole, causal, KEYS):
        accumulator, largest, total = _step(
            accumulator, largest, total, q, positions, at, low, length, window, table, keys, values, key_scales,
            value_scales, kv_head, scale, cap, KV_HEADS, POOL_BLOCK, HEAD, HEAD_PAD, KEYS, QUANTISED, BITWISE, E4M3,
            False,
        )  # fmt: skip
    for edge in tl.range(0, whole - first + end - causal, KEYS):
        at = first + edge
        if at >= whole:
            at += causal - whole
        accumulator, largest, total = _step(
            accumulator, largest, total, q, positions, at, low, length, window, table, keys, values, key_scales,
            value_scales, kv_head, scale, cap, KV_HEADS, POOL_BLOCK, HEAD, HEAD_PAD, KEYS, QUANTISED, BITWISE, E4M3,
            True,
        )  # fmt: skip
    accumulator = accumulator / total[:, None]
    tl.store(
        output
        + tokens[:, None] * (output_token_stride * _UNIT)
        + of_head[:, None] * (output_head_stride * _UNIT)
        + columns[None, :],
        accumulator.to(output.dtype.element_ty),
        mask=mine,
    )
