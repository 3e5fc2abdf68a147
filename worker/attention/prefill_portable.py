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
_LOG2_E = tl.constexpr(1.4426950408889634)
_UNIT = tl.constexpr(HEAD_UNIT)
_FIELDS = tl.constexpr(FIELDS)
_ROW, _FIRST_TOKEN, _POSITION, _TOKENS, _ROW_START, _ROW_LENGTH = (
    tl.constexpr(place(PREFILL_TILE, name))
    for name in ("row", "first_token", "position", "tokens", "row_start", "row_length")
)


@triton.jit
def _load_tile(cache, rows, columns, inside, HEAD: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Load [KEYS, columns] as stored. rows: [KEYS] int64, rows of the pool as [slots x kv_heads, head_size].

    PADDED: whether there are columns beyond the head.
    """
    at = cache + rows[:, None] * HEAD + columns[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (columns < HEAD)[None, :], other=0.0)
    elif PADDED:
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
def _load_values(
    values,
    rows,
    columns,
    inside,
    scale,
    dtype: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    QUANTISED: tl.constexpr,
    BITWISE: tl.constexpr,
    E4M3: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load [KEYS, columns] of V in `dtype`. scale: [KEYS], used where `dtype` is too narrow for a weight times it."""
    v = _load_tile(values, rows, columns, inside, HEAD, PADDED, MASKED)
    if QUANTISED and dtype == tl.float16:
        return (_convert(v, tl.float32, BITWISE, E4M3) * scale[:, None]).to(dtype)
    elif v.dtype == tl.float32:
        return v.to(dtype)
    else:
        return _convert(v, dtype, BITWISE, E4M3)


@triton.jit
def _step(
    accumulator,
    accumulator_rest,
    largest,
    total,
    q,
    q_rest,
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
    HEAD_TILE: tl.constexpr,
    REST: tl.constexpr,
    KEYS: tl.constexpr,
    QUANTISED: tl.constexpr,
    BITWISE: tl.constexpr,
    E4M3: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Process keys first ... first + KEYS - 1. low, high: bounds of the tokens that any query of the row reaches."""
    PADDED: tl.constexpr = HEAD < HEAD_TILE + REST
    key = first + tl.arange(0, KEYS)
    columns = tl.arange(0, HEAD_TILE)
    inside = (key >= low) & (key < high)
    if MASKED:
        block = tl.load(table + key // POOL_BLOCK, mask=inside, other=0)
    else:
        block = tl.load(table + key // POOL_BLOCK)
    rows = (block.to(tl.int64) * POOL_BLOCK + key % POOL_BLOCK) * KV_HEADS + kv_head
    k = _load_tile(keys, rows, columns, inside, HEAD, PADDED and REST == 0, MASKED)
    scores = tl.dot(q, tl.trans(_convert(k, q.dtype, BITWISE, E4M3)), input_precision="ieee")
    if REST:
        columns_rest = HEAD_TILE + tl.arange(0, REST)
        k_rest = _convert(_load_tile(keys, rows, columns_rest, inside, HEAD, PADDED, MASKED), q.dtype, BITWISE, E4M3)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
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
    value_scale = largest
    if QUANTISED:
        if MASKED:
            value_scale = tl.load(value_scales + rows, mask=inside, other=0.0)
        else:
            value_scale = tl.load(value_scales + rows)
        if q.dtype != tl.float16:
            weights *= value_scale[None, :]
    weights = weights.to(q.dtype)
    v = _load_values(
        values, rows, columns, inside, value_scale, q.dtype, HEAD, PADDED and REST == 0, QUANTISED, BITWISE, E4M3,
        MASKED,
    )  # fmt: skip
    accumulator = tl.dot(weights, v, accumulator * fade[:, None], input_precision="ieee")
    if REST:
        v_rest = _load_values(
            values, rows, columns_rest, inside, value_scale, q.dtype, HEAD, PADDED, QUANTISED, BITWISE, E4M3, MASKED
        )
        accumulator_rest = tl.dot(weights, v_rest, accumulator_rest * fade[:, None], input_precision="ieee")
    return accumulator, accumulator_rest, new_largest, total


@triton.jit
def _tile_of_rows(tensor, tokens, heads, columns, token_stride, head_stride):
    """Return the addresses of numbers [QUERIES, columns] of the query or the output."""
    return tensor + tokens[:, None] * (token_stride * _UNIT) + heads[:, None] * (head_stride * _UNIT) + columns[None, :]


# As in `decode_kernel`, specialising on these arguments gains nothing.
@triton.jit(
    do_not_specialize=[
        "query_token_stride", "query_head_stride", "key_scales", "value_scales", "output_token_stride",
        "output_head_stride", "table_stride", "window",
    ],
    do_not_specialize_on_alignment=["sinks"],
)  # fmt: skip
def prefill_portable(
    query,
    query_token_stride,
    query_head_stride,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
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
    HEAD_TILE: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    QUANTISED: tl.constexpr,
    BITWISE: tl.constexpr,
    E4M3: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute one tile. Grid: [tiles x PACKS]. items: [tiles, FIELDS] int32, see `plan_items.PREFILL_TILE`.

    PACK: query heads of one tile; PACKS: packs of the query. QUERIES: rows of a tile, tokens x PACK. Strides of query
    and output: in units of HEAD_UNIT numbers. sinks: [PACKS x PACK] float32, -inf: none. scale: factor of scores inside
    exp2. cap: factor of q.k inside the soft cap's exp2, 0: no cap. window: tokens that a query sees, with its own.
    HEAD_TILE, REST: see `head_tiles`. UPCAST: multiply in float32, for Triton's interpreter, which multiplies the bits
    of bfloat16 as integers.
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
    columns = tl.arange(0, HEAD_TILE)
    of_token = tile_row // PACK
    of_head = pack * PACK + tile_row % PACK
    tokens = (token + of_token).to(tl.int64)
    positions = tl.minimum(position + of_token, length - 1)  # rows beyond the tile's tokens repeat its last
    mine = (of_token < count)[:, None]
    place = _tile_of_rows(query, tokens, of_head, columns, query_token_stride, query_head_stride)
    q = tl.load(place, mask=mine & (columns < HEAD)[None, :], other=0.0)
    q_rest = q
    columns_rest = columns
    if REST:
        columns_rest = HEAD_TILE + tl.arange(0, REST)
        place = _tile_of_rows(query, tokens, of_head, columns_rest, query_token_stride, query_head_stride)
        q_rest = tl.load(place, mask=mine & (columns_rest < HEAD)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        q_rest = q_rest.to(tl.float32)

    REST_TILE: tl.constexpr = REST or 1
    accumulator = tl.zeros([QUERIES, HEAD_TILE], tl.float32)
    accumulator_rest = tl.zeros([QUERIES, REST_TILE], tl.float32)
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
        accumulator, accumulator_rest, largest, total = _step(
            accumulator, accumulator_rest, largest, total, q, q_rest, positions, at, low, length, window, table, keys,
            values, key_scales, value_scales, kv_head, scale, cap, KV_HEADS, POOL_BLOCK, HEAD, HEAD_TILE, REST, KEYS,
            QUANTISED, BITWISE, E4M3, False,
        )  # fmt: skip
    for edge in tl.range(0, whole - first + end - causal, KEYS):
        at = first + edge
        if at >= whole:
            at += causal - whole
        accumulator, accumulator_rest, largest, total = _step(
            accumulator, accumulator_rest, largest, total, q, q_rest, positions, at, low, length, window, table, keys,
            values, key_scales, value_scales, kv_head, scale, cap, KV_HEADS, POOL_BLOCK, HEAD, HEAD_TILE, REST, KEYS,
            QUANTISED, BITWISE, E4M3, True,
        )  # fmt: skip
    sink = tl.load(sinks + of_head) * _LOG2_E
    new_largest = tl.maximum(largest, sink)
    fade = tl.exp2(largest - new_largest)
    total = total * fade + tl.exp2(sink - new_largest)
    factor = (fade / total)[:, None]
    dtype = output.dtype.element_ty
    place = _tile_of_rows(output, tokens, of_head, columns, output_token_stride, output_head_stride)
    tl.store(place, (accumulator * factor).to(dtype), mask=mine & (columns < HEAD)[None, :])
    if REST:
        place = _tile_of_rows(output, tokens, of_head, columns_rest, output_token_stride, output_head_stride)
        tl.store(place, (accumulator_rest * factor).to(dtype), mask=mine & (columns_rest < HEAD)[None, :])
