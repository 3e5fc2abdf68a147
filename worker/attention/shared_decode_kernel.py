"""The kernel of parts of decodes that several rows have in common: K and V are read once for all of these rows.

A program computes one part for several rows with equal blocks and equal borders of that part (see `shared_plan`).
`decode_kernel` pads the query heads of a KV head to the rows of a matrix instruction; here the heads of several rows
fill that tile, and TILES of such tiles are computed over each tile of keys. Every row of a tile of queries is
computed by itself, in the same instructions, layouts and order as in `decode_kernel`, so a part's result has the same
bits. A change of one kernel is a change of both: a test compares their bits.

On Hopper a tile of 16-bit numbers has the rows of one or two warp groups. Their matrix instructions were seen to give
the bits of the smaller ones. Threads then hold other keys, so that `sum_as_decoded` restores the order of sums.

The results are partials in `decode_kernel`'s workspace. It runs next, on the parts that are left, at least one of each
row, and merges all: when it starts, the results of this kernel are there, so it counts its own parts alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvforge.worker.device.target import HEAD_UNIT

from .decode_kernel import _LOG2_E, _capped, _unpack
from .plan_items import FIELDS, SHARED_HEAD, SHARED_PART, SHARED_ROW, place

_UNIT = tl.constexpr(HEAD_UNIT)
_FIELDS = tl.constexpr(FIELDS)
_ITEMS = tl.constexpr(place(SHARED_HEAD, "items"))
_BEGIN, _END, _PART, _FIRST, _ROWS = (
    tl.constexpr(place(SHARED_PART, name)) for name in ("begin", "end", "part", "first", "rows")
)
_ROW, _FIRST_PARTIAL = (tl.constexpr(place(SHARED_ROW, name)) for name in ("row", "first_partial"))


@triton.jit
def _none():
    """Return an empty tuple that grows by an element for each tile: mypy takes a literal for one that stays empty."""
    return ()


@triton.jit
def _lanes(rows_of_part, count, tile: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return for each lane of a tile of queries: its row's entry in the plan, its head in the group, its use."""
    lane = tl.arange(0, ROWS)
    member = tile * (ROWS // GROUP) + lane // GROUP
    used = (lane < ROWS // GROUP * GROUP) & (member < count)
    return rows_of_part + tl.minimum(member, count - 1) * _FIELDS, lane % GROUP, used


@triton.jit
def _queries(
    query,
    query_stride,
    scale,
    entry,
    head,
    used,
    d,
    dtype: tl.constexpr,
    rest,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    WIDEN: tl.constexpr,
    REST: tl.constexpr,
):
    """Load a tile of queries; return it, its odd numbers if KIND or its rest, and the factor of each lane's scores."""
    row = tl.load(entry + _ROW).to(tl.int64)
    query_rows = query + (row * (query_stride * _UNIT))[:, None]
    mask = used[:, None] & (d < WIDTH)[None, :]
    if KIND:
        places = head[:, None] * HEAD_SIZE + 2 * d[None, :]
        low = tl.load(query_rows + places, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(query_rows + places + 1, mask=mask, other=0.0).to(tl.float32)
        size = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        size = tl.where(size > 0.0, size, 1.0)
        q = (low / size[:, None]).to(tl.float16)
        q_high = (high / size[:, None]).to(tl.float16)
        factor = size * scale
        if KIND == 2 and not ASSEMBLY:
            factor *= 256.0
    else:
        places = head[:, None] * HEAD_SIZE + d[None, :]
        q = tl.load(query_rows + places, mask=mask, other=0.0).to(dtype)
        if WIDEN:
            q = q.to(tl.float32)
        q_high = q
        if REST:
            places = head[:, None] * HEAD_SIZE + rest[None, :]
            q_high = tl.load(query_rows + places, mask=used[:, None] & (rest < WIDTH)[None, :], other=0.0).to(q.dtype)
        factor = tl.full([head.shape[0]], 1.0, tl.float32) * scale
    return q, q_high, factor


@triton.jit
def _scores(
    queries,
    k,
    k_high,
    seen,
    key_scale,
    exponent,
    softcap,
    KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    REST: tl.constexpr,
):
    """Return the scores of a tile of queries and a tile of keys."""
    q, q_high, factor = queries
    if KIND:
        scores = tl.dot(q, tl.trans(k))
        scores = tl.dot(q_high, tl.trans(k_high), scores) * factor[:, None] * key_scale[None, :]
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if REST:
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
        scores *= factor[:, None]
    if SOFTCAP == 1:
        scores = _capped(scores, softcap)
    elif SOFTCAP == 2:
        scores = tl.where(softcap > 0.0, _capped(scores, softcap), scores)
    scores = tl.where(seen, scores, float("-inf"))
    if KIND:
        scores += ((exponent >> 23) - 127).to(tl.float32)[None, :]
    return scores


@triton.jit
def _fold(state, scores, v, v_high, mantissa, unscale, KIND: tl.constexpr, PRECISION: tl.constexpr, REST: tl.constexpr):
    """Add a tile of keys to the state of a tile of queries: their greatest score, total, and sums of values."""
    greatest, total, sums, sums_high = state
    new_greatest = tl.maximum(greatest, tl.max(scores, 1))
    shrink = tl.exp2(greatest - new_greatest)[:, None]
    weights = tl.exp2(scores - new_greatest[:, None])
    if KIND:
        total = total * shrink + weights * unscale[None, :]
        weights *= mantissa[None, :]
        sums = tl.dot(weights.to(tl.float16), v, sums * shrink)
        sums_high = tl.dot(weights.to(tl.float16), v_high, sums_high * shrink)
    else:
        total = total * shrink + weights
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink, input_precision=PRECISION)
        if REST:
            sums_high = tl.dot(weights.to(v.dtype), v_high, sums_high * shrink, input_precision=PRECISION)
    return new_greatest, total, sums, sums_high


@triton.jit
def _halves(numbers, COUNT: tl.constexpr):
    """Cut the second dimension of [ROWS, COUNT, n] in its middle: two of [ROWS, COUNT // 2, n]."""
    ROWS: tl.constexpr = numbers.shape[0]
    REST: tl.constexpr = numbers.shape[2]
    return tl.split(tl.permute(tl.reshape(numbers, [ROWS, 2, COUNT // 2, REST]), (0, 2, 3, 1)))


@triton.jit
def sum_as_decoded(total, KEYS: tl.constexpr, WARPS: tl.constexpr):
    """Add up each row of [ROWS, KEYS] in the order of `decode_kernel`'s `tl.sum`, which has WARPS warps.

    There a thread adds its keys one by one: two neighbours of each 8 x WARPS. Of four neighbouring threads, each adds
    the sum of the one two places further, then of the next one. Four warps do the same.
    """
    tl.static_assert(WARPS == 4 and KEYS == 4 * 8 * WARPS, "the order is written down for tiles of 128 keys")
    ROWS: tl.constexpr = total.shape[0]
    early, late = _halves(tl.reshape(total, [ROWS, 4, 8 * WARPS]), 4)
    first, second = _halves(early, 2)
    third, fourth = _halves(late, 2)
    left, right = tl.split(tl.reshape(first, [ROWS, 4 * WARPS, 2]))
    own = left + right
    left, right = tl.split(tl.reshape(second, [ROWS, 4 * WARPS, 2]))
    own = own + left + right
    left, right = tl.split(tl.reshape(third, [ROWS, 4 * WARPS, 2]))
    own = own + left + right
    left, right = tl.split(tl.reshape(fourth, [ROWS, 4 * WARPS, 2]))
    own = own + left + right
    low, high = _halves(tl.permute(tl.reshape(own, [ROWS, WARPS, 4]), (0, 2, 1)), 4)
    low, high = _halves(low + high, 2)
    low, high = _halves(tl.reshape(low + high, [ROWS, WARPS, 1]), 4)
    low, high = _halves(low + high, 2)
    return tl.reshape(low + high, [ROWS])


@triton.jit(
    do_not_specialize=["key_scales", "value_scales", "query_stride", "table_stride"],
    do_not_specialize_on_alignment=["tables", "sinks"],
)  # as `decode_kernel`
def shared_decode_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tables,
    plan,
    partials,
    sizes,
    scale,
    softcap,
    query_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    WIDEN: tl.constexpr,
    CHAINED: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM_WARPS: tl.constexpr,
):
    """Compute parts for several rows each, for one KV head. Grid: [any number].

    plan: see `shared_plan.SharedPlanner`. ROWS: query heads of a tile, those of a KV head or more. TILES: tiles of
    queries of a program. SUM_WARPS: see `sum_as_decoded`; 0: layouts are those of `decode_kernel`. All other arguments:
    see `decode_kernel`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PACK: tl.constexpr = 2 if KIND else 1
    WIDTH: tl.constexpr = HEAD_SIZE // PACK  # numbers of K or V per load
    TILE: tl.constexpr = HEAD_TILE // PACK
    HIGH: tl.constexpr = REST or TILE  # as in `decode_kernel`
    n_units = tl.load(plan + _ITEMS) * KV_HEADS
    if CHAINED:
        tl.extra.cuda.gdc_wait()  # wait for the previous kernel, which does not write the plan
    for unit in range(tl.program_id(0), n_units, tl.num_programs(0)):
        kv_head = unit % KV_HEADS
        item = plan + _FIELDS * (1 + unit // KV_HEADS)
        begin = tl.load(item + _BEGIN)
        end = tl.load(item + _END)
        part = tl.load(item + _PART)
        count = tl.load(item + _ROWS)
        rows_of_part = plan + _FIELDS * tl.load(item + _FIRST)
        d = tl.arange(0, TILE)
        rest = TILE + tl.arange(0, HIGH)
        n = tl.arange(0, KEYS)

        queries = _none()
        states = _none()
        for tile in tl.static_range(TILES):
            entry, g, used = _lanes(rows_of_part, count, tile, GROUP, ROWS)
            queries += (
                _queries(
                    query, query_stride, scale, entry, kv_head * GROUP + g, used, d, keys.dtype.element_ty,
                    rest, HEAD_SIZE, WIDTH, KIND, ASSEMBLY, WIDEN, REST,
                ),
            )  # fmt: skip
            states += (
                (
                    tl.full([ROWS], float("-inf"), tl.float32),
                    tl.zeros([ROWS, KEYS], tl.float32),
                    tl.zeros([ROWS, TILE], tl.float32),
                    tl.zeros([ROWS, HIGH], tl.float32),
                ),
            )

        table = tables + tl.load(rows_of_part + _ROW).to(tl.int64) * table_stride
        key_columns = (keys + kv_head * WIDTH + d)[None, :]
        value_columns = (values + kv_head * WIDTH + d)[None, :]
        rest_of_key = (keys + kv_head * WIDTH + rest)[None, :]
        rest_of_value = (values + kv_head * WIDTH + rest)[None, :]
        for first in tl.range(begin // KEYS * KEYS, end, KEYS, num_stages=STAGES):
            wanted = first + n
            seen = ((wanted >= begin) & (wanted < end))[None, :]
            position = tl.minimum(tl.maximum(wanted, begin), end - 1)
            position = position.to(tl.uint32)  # unsigned division by a power of two is one shift
            block = tl.load(table + position // BLOCK_SIZE).to(tl.uint32)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            offset = (slot.to(tl.int64) * (KV_HEADS * WIDTH))[:, None]
            if WIDTH >= TILE:
                k = tl.load(key_columns + offset)
                v = tl.load(value_columns + offset)
            else:
                k = tl.load(key_columns + offset, mask=(d < WIDTH)[None, :], other=0)
                v = tl.load(value_columns + offset, mask=(d < WIDTH)[None, :], other=0)
            if KIND:
                key_scale = tl.load(key_scales + kv_head + slot.to(tl.int64) * KV_HEADS)
                value_scale = tl.load(value_scales + kv_head + slot.to(tl.int64) * KV_HEADS)
                k, k_high = _unpack(k, KIND, ASSEMBLY)
                v, v_high = _unpack(v, KIND, ASSEMBLY)
                exponent = tl.maximum(value_scale, 1e-18).to(tl.int32, bitcast=True) & 0x7F800000
                unscale = ((254 << 23) - exponent).to(tl.float32, bitcast=True)  # 2 ** -exponent
                mantissa = value_scale * unscale
            else:
                if WIDEN:
                    k = k.to(tl.float32)
                    v = v.to(tl.float32)
                k_high = k
                v_high = v
                if REST:
                    k_high = tl.load(rest_of_key + offset, mask=(rest < WIDTH)[None, :], other=0).to(k.dtype)
                    v_high = tl.load(rest_of_value + offset, mask=(rest < WIDTH)[None, :], other=0).to(v.dtype)
                key_scale = None
                exponent = None
                mantissa = None
                unscale = None
            scores = _none()
            for tile in tl.static_range(TILES):
                scores += (
                    _scores(
                        queries[tile], k, k_high, seen, key_scale, exponent, softcap, KIND, SOFTCAP, PRECISION, REST
                    ),
                )
            folded = _none()
            for tile in tl.static_range(TILES):
                folded += (_fold(states[tile], scores[tile], v, v_high, mantissa, unscale, KIND, PRECISION, REST),)
            states = folded

        if CHAINED:  # noqa: SIM102 - a compile-time condition
            if unit + tl.num_programs(0) >= n_units:
                tl.extra.cuda.gdc_launch_dependents()
        e = tl.arange(0, HEAD_TILE)
        for tile in tl.static_range(TILES):
            greatest, total, sums, sums_high = states[tile]
            if KIND:
                sums = tl.reshape(tl.join(sums, sums_high), [ROWS, HEAD_TILE])
                if KIND == 2 and not ASSEMBLY:
                    sums *= 256.0
            entry, g, used = _lanes(rows_of_part, count, tile, GROUP, ROWS)
            head = kv_head * GROUP + g
            sink = tl.load(sinks + head, mask=used & (part == 0), other=float("-inf")) * _LOG2_E
            # Rounded, as where `decode_kernel` has it before its loop. The compiler would fuse the product with the
            # subtraction below, and the bits would be others. All sinks are below the bound.
            sink = tl.minimum(sink, 3e38)
            new_greatest = tl.maximum(greatest, sink)
            shrink = tl.exp2(greatest - new_greatest)
            if SUM_WARPS:
                whole = sum_as_decoded(total, KEYS, SUM_WARPS)
            else:
                whole = tl.sum(total, 1)
            weight = whole * shrink + tl.exp2(sink - new_greatest)
            result = sums * (shrink / weight)[:, None]
            result_rest = sums_high * (shrink / weight)[:, None]
            here = (tl.load(entry + _FIRST_PARTIAL) + part) * HEADS + head
            mask = used[:, None] & (e < HEAD_SIZE)[None, :]
            numbers = partials + here.to(tl.int64)[:, None] * HEAD_SIZE
            tl.store(numbers + e[None, :], result, mask=mask)
            if REST:
                tl.store(numbers + rest[None, :], result_rest, mask=used[:, None] & (rest < HEAD_SIZE)[None, :])
            tl.store(sizes + here, new_greatest + tl.log2(weight), mask=used)
