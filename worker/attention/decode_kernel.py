"""The kernel of paged decode attention: one new token per row, split over the row's keys and merged exactly.

A program handles one part of one row (see `decode_plan`) for the query heads of one KV head, with the online softmax of
Milakov and Gimelshein (arXiv 1805.02867) over tiles of keys. The query heads of a KV head are padded to 16 rows, the
minimum of matrix instructions; the kernel is memory-bound, so the padding is free. The last program of a row to finish
merges its parts in order, so the result does not depend on which program is last (Flash-Decoding: Dao, Haziza, Massa,
Sizov, 2023).

Keys beyond the ends of a part are replaced by its nearest key with weight 0, so unreachable slots, which may hold NaN,
are never read. Scores are in units of log2, so that exp2 needs no factor. The first part of a row adds the sinks (-inf
in layers without: exactly nothing), so that the merge counts them once.

int8 and fp8 (e4m3fn) are read as pairs in an int16, because matrix instructions need pairs of adjacent *keys* in V, and
shared memory can transpose 16-bit numbers, not bytes. The even and the odd dimensions of a head are therefore two
tiles. Only the exact conversion to float16 is done per number. A key's scale multiplies its score. A value's scale
multiplies its weight, with its exponent applied before the maximum is taken: no *scaled* weight exceeds 2 then,
whatever the scales, so float16 can hold it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvforge.worker.device.target import HEAD_UNIT

from .plan_items import DECODE_HEAD, DECODE_PART, FIELDS, place

_LOG2_E = tl.constexpr(1.4426950408889634)
_UNIT = tl.constexpr(HEAD_UNIT)
_FIELDS = tl.constexpr(FIELDS)
_ITEMS = tl.constexpr(place(DECODE_HEAD, "items"))
_ROW, _BEGIN, _END, _FIRST_PARTIAL, _PART, _PARTS, _OWN = (
    tl.constexpr(place(DECODE_PART, name)) for name in ("row", "begin", "end", "first_partial", "part", "parts", "own")
)


@triton.jit
def _unpack(pairs, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Unpack int16 pairs of int8 or e4m3fn numbers into the low and the high ones as float16.

    e4m3fn numbers are scaled by 2 ** -8 unless ASSEMBLY.
    """
    if ASSEMBLY and KIND == 1:
        # A float16 with the bits 0x6400 + n is 1024 + n; flipping the sign bit of an int8 adds 128 to it.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 shifted, bias;
            mov.b32 bias, 0x64806480;
            shr.u32 shifted, $2, 8;
            lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
            lop3.b32 $1, shifted, 0x00ff00ff, 0x64806480, 0x6a;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif KIND == 1:
        low = ((pairs & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        high = (((pairs >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        return low.to(tl.float16), high.to(tl.float16)
    else:
        # Shift exponent and mantissa into place; the exponent bias of float16 is larger by 8.
        low = ((pairs & 0x7F) << 7) | ((pairs << 8) & -32768)
        high = ((pairs >> 1) & 0x3F80) | (pairs & -32768)
        return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def _capped(scores, softcap):
    """Compute softcap x tanh(scores), in units of log2."""
    # tanh(x) = 1 - 2 / (e^2x + 1), which is also correct at both infinities
    return (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E)) + 1.0)) * (softcap * _LOG2_E)


@triton.jit
def _merge(
    partials,
    sizes,
    output,
    first_partial,
    parts,
    first_head,
    heads_left,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the parts of query heads from first_head on into output [heads, HEAD_SIZE], for one row.

    The tile is [groups of four numbers, parts, 4], in this order because Triton spreads the threads over the first
    dimension: a thread loads four numbers of every part at once, and sums over parts stay within the thread.
    """
    FOURS: tl.constexpr = HEAD_TILE // 4
    lane = tl.arange(0, ROWS * FOURS)
    four = tl.arange(0, 4)
    i = tl.arange(0, PARTS)
    d = lane % FOURS * 4
    head = tl.minimum(first_head + lane // FOURS, HEADS - 1)
    greatest = tl.full([ROWS * FOURS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * FOURS], tl.float32)
    merged = tl.zeros([ROWS * FOURS, 4], tl.float32)
    for low in range(0, parts, PARTS):
        here = (low + i < parts)[None, :]
        place = (first_partial + low + i)[None, :] * HEADS + head[:, None]
        numbers = (place.to(tl.int64) * HEAD_SIZE + d[:, None])[:, :, None] + four[None, None, :]
        # Other multiprocessors wrote these: bypass the L1 cache, which is not coherent.
        size = tl.load(sizes + place, mask=here, other=float("-inf"), cache_modifier=".cg")
        mask = (here & (d < HEAD_SIZE)[:, None])[:, :, None]
        part = tl.load(partials + numbers, mask=mask, other=0.0, cache_modifier=".cg")
        new_greatest = tl.maximum(greatest, tl.max(size, 1))
        shrink = tl.exp2(greatest - new_greatest)
        weight = tl.exp2(size - new_greatest[:, None])
        greatest = new_greatest
        total = total * shrink + tl.sum(weight, 1)
        merged = merged * shrink[:, None] + tl.sum(weight[:, :, None] * part, 1)
    result = (merged / total[:, None]).to(output.dtype.element_ty)
    mask = ((lane // FOURS < heads_left) & (d < HEAD_SIZE))[:, None]
    tl.store(output + (head * HEAD_SIZE + d)[:, None] + four[None, :], result, mask=mask)


# Specialising on these arguments gains nothing: numbers loaded one by one at any alignment, and strides used once. Each
# specialisation would be one more kernel to compile, possibly while requests wait.
@triton.jit(
    do_not_specialize=["key_scales", "value_scales", "query_stride", "table_stride"],
    do_not_specialize_on_alignment=["tables", "sinks"],
)
def decode_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tables,
    plan,
    output,
    partials,
    sizes,
    counters,
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
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
    CHAINED: tl.constexpr,
    PRECISION: tl.constexpr,
    FLUSHED: tl.constexpr,
):
    """Compute parts of rows, each for one KV head or a slice of ROWS of its query heads. Grid: [any number].

    query, output: [rows, HEADS, HEAD_SIZE]. tables: [rows, table_stride] int32. plan: see DecodePlanner.plan.
    keys, values: [blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE], or int16 [..., HEAD_SIZE / 2] if KIND is a quantised dtype.
    sinks: [HEADS] float32, -inf: none.
    partials: [items, HEADS, HEAD_SIZE] float32, the result of each part; sizes: [items, HEADS] float32, log2 of the
    sum of its exponentials; counters: [rows x KV_HEADS x slices] int32, finished parts of this plan, 0 before and
    after.

    scale: factor of q.k, giving units of log2, or the argument of tanh. query_stride: in units of HEAD_UNIT numbers.
    HEAD_TILE, REST: see `divided_head`. SOFTCAP: 0 never, 1 always, 2 if `softcap` is above 0. ASSEMBLY: use NVIDIA's
    conversions. WIDEN: multiply float32 (for the interpreter). CHAINED: launched before the previous kernel has ended
    (programmatic dependent launch).
    FLUSHED: see its use.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SLICES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    UNITS: tl.constexpr = KV_HEADS * SLICES
    PACK: tl.constexpr = 2 if KIND else 1
    WIDTH: tl.constexpr = HEAD_SIZE // PACK  # numbers of K or V per load
    TILE: tl.constexpr = HEAD_TILE // PACK
    HIGH: tl.constexpr = REST or TILE  # of the second tile of a head: its odd numbers if KIND, else its rest
    n_units = tl.load(plan + _ITEMS) * UNITS
    if CHAINED:
        tl.extra.cuda.gdc_wait()  # wait for the previous kernel, which does not write the plan
    for unit in range(tl.program_id(0), n_units, tl.num_programs(0)):
        kv_head = unit % UNITS // SLICES
        first_in_group = unit % SLICES * ROWS
        item = plan + _FIELDS * (1 + unit // UNITS)
        row = tl.load(item + _ROW).to(tl.int64)
        begin = tl.load(item + _BEGIN)
        end = tl.load(item + _END)
        first_partial = tl.load(item + _FIRST_PARTIAL)
        part = tl.load(item + _PART)
        parts = tl.load(item + _PARTS)

        g = first_in_group + tl.arange(0, ROWS)
        d = tl.arange(0, TILE)
        rest = TILE + tl.arange(0, HIGH)
        n = tl.arange(0, KEYS)
        in_group = (g < GROUP)[:, None]
        head = kv_head * GROUP + g
        query_row = query + row * (query_stride * _UNIT)
        if KIND:
            places = head[:, None] * HEAD_SIZE + 2 * d[None, :]
            low = tl.load(query_row + places, mask=in_group & (d < WIDTH)[None, :], other=0.0).to(tl.float32)
            high = tl.load(query_row + places + 1, mask=in_group & (d < WIDTH)[None, :], other=0.0).to(tl.float32)
            # float16 has fewer exponents than the query's dtype: scale a head's greatest number to 1.
            size = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
            size = tl.where(size > 0.0, size, 1.0)
            q = (low / size[:, None]).to(tl.float16)
            q_high = (high / size[:, None]).to(tl.float16)
            factor = size * scale
            if KIND == 2 and not ASSEMBLY:
                factor *= 256.0
        else:
            places = head[:, None] * HEAD_SIZE + d[None, :]
            q = tl.load(query_row + places, mask=in_group & (d < WIDTH)[None, :], other=0.0).to(keys.dtype.element_ty)
            if WIDEN:
                q = q.to(tl.float32)
            q_high = q
            if REST:
                places = head[:, None] * HEAD_SIZE + rest[None, :]
                q_high = tl.load(query_row + places, mask=in_group & (rest < WIDTH)[None, :], other=0.0)
                q_high = q_high.to(q.dtype)
            factor = tl.full([ROWS], 1.0, tl.float32) * scale
        sink = tl.load(sinks + head, mask=(g < GROUP) & (part == 0), other=float("-inf")) * _LOG2_E

        table = tables + row * table_stride
        key_columns = (keys + kv_head * WIDTH + d)[None, :]
        value_columns = (values + kv_head * WIDTH + d)[None, :]
        rest_of_key = (keys + kv_head * WIDTH + rest)[None, :]
        rest_of_value = (values + kv_head * WIDTH + rest)[None, :]
        greatest = tl.full([ROWS], float("-inf"), tl.float32)
        # Summed over keys at the end: a sum across warps per tile is expensive.
        total = tl.zeros([ROWS, KEYS], tl.float32)
        sums = tl.zeros([ROWS, TILE], tl.float32)
        sums_high = tl.zeros([ROWS, HIGH], tl.float32)
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
            if REST:
                k_high = tl.load(rest_of_key + offset, mask=(rest < WIDTH)[None, :], other=0)
                v_high = tl.load(rest_of_value + offset, mask=(rest < WIDTH)[None, :], other=0)
            if KIND:
                key_scale = tl.load(key_scales + kv_head + slot.to(tl.int64) * KV_HEADS)
                value_scale = tl.load(value_scales + kv_head + slot.to(tl.int64) * KV_HEADS)
                k, k_high = _unpack(k, KIND, ASSEMBLY)
                scores = tl.dot(q, tl.trans(k))
                scores = tl.dot(q_high, tl.trans(k_high), scores) * factor[:, None] * key_scale[None, :]
            else:
                if WIDEN:
                    k = k.to(tl.float32)
                    v = v.to(tl.float32)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if REST:
                    if WIDEN:
                        k_high = k_high.to(tl.float32)
                        v_high = v_high.to(tl.float32)
                    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
                scores *= factor[:, None]
            if SOFTCAP == 1:
                scores = _capped(scores, softcap)
            elif SOFTCAP == 2:  # a branch would duplicate the loop, which costs registers
                scores = tl.where(softcap > 0.0, _capped(scores, softcap), scores)
            scores = tl.where(seen, scores, float("-inf"))
            if KIND:
                # The scale is 2 ** exponent x mantissa. The exponent enters the maximum, the mantissa (1 to 2) does
                # not. A key with scale 0 keeps its weight in the total, and a scale of NaN (broken numbers) makes the
                # result NaN.
                exponent = tl.maximum(value_scale, 1e-18).to(tl.int32, bitcast=True) & 0x7F800000
                scores += ((exponent >> 23) - 127).to(tl.float32)[None, :]
                unscale = ((254 << 23) - exponent).to(tl.float32, bitcast=True)  # 2 ** -exponent
                mantissa = value_scale * unscale
            new_greatest = tl.maximum(greatest, tl.max(scores, 1))
            shrink = tl.exp2(greatest - new_greatest)[:, None]
            weights = tl.exp2(scores - new_greatest[:, None])
            greatest = new_greatest
            if KIND:
                total = total * shrink + weights * unscale[None, :]
                weights *= mantissa[None, :]
                v, v_high = _unpack(v, KIND, ASSEMBLY)
                sums = tl.dot(weights.to(tl.float16), v, sums * shrink)
                sums_high = tl.dot(weights.to(tl.float16), v_high, sums_high * shrink)
            else:
                total = total * shrink + weights
                sums = tl.dot(weights.to(v.dtype), v, sums * shrink, input_precision=PRECISION)
                if REST:
                    sums_high = tl.dot(weights.to(v.dtype), v_high, sums_high * shrink, input_precision=PRECISION)
        if KIND:
            sums = tl.reshape(tl.join(sums, sums_high), [ROWS, HEAD_TILE])
            if KIND == 2 and not ASSEMBLY:
                sums *= 256.0

        if CHAINED:  # noqa: SIM102 - a compile-time condition
            if unit + tl.num_programs(0) >= n_units:
                tl.extra.cuda.gdc_launch_dependents()
        # Not before the loop: float16 weights of quantised keys need the maximum of these keys alone.
        new_greatest = tl.maximum(greatest, sink)
        shrink = tl.exp2(greatest - new_greatest)
        weight = tl.sum(total, 1) * shrink + tl.exp2(sink - new_greatest)
        greatest = new_greatest
        result = sums * (shrink / weight)[:, None]
        result_rest = sums_high * (shrink / weight)[:, None]
        e = tl.arange(0, HEAD_TILE)
        mask = in_group & (e < HEAD_SIZE)[None, :]
        mask_rest = in_group & (rest < HEAD_SIZE)[None, :]
        output_row = output + row * (HEADS * HEAD_SIZE)
        if parts == 1:
            here = output_row + head[:, None] * HEAD_SIZE + e[None, :]
            tl.store(here, result.to(output.dtype.element_ty), mask=mask)
            if REST:
                here = output_row + head[:, None] * HEAD_SIZE + rest[None, :]
                tl.store(here, result_rest.to(output.dtype.element_ty), mask=mask_rest)
        else:
            place = (first_partial + part) * HEADS + head
            numbers = partials + place.to(tl.int64)[:, None] * HEAD_SIZE
            tl.store(numbers + e[None, :], result, mask=mask)
            if REST:
                tl.store(numbers + rest[None, :], result_rest, mask=mask_rest)
            tl.store(sizes + place, greatest + tl.log2(weight), mask=g < GROUP)
            if FLUSHED:
                # The barrier of these GPUs waits for shared memory only.
                tl.inline_asm_elementwise(
                    "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v,~{memory}", [g], dtype=tl.int32, is_pure=False, pack=1
                )
            tl.debug_barrier()  # order all threads' stores before the counter
            counter = counters + row * UNITS + unit % UNITS
            if tl.atomic_add(counter, 1, sem="acq_rel") == tl.load(item + _OWN) - 1:
                tl.store(counter, 0)  # for the next launch
                left = tl.minimum(GROUP - first_in_group, ROWS)
                for done in range(0, left, MERGE_ROWS):
                    _merge(
                        partials, sizes, output_row, first_partial, parts, kv_head * GROUP + first_in_group + done,
                        left - done, HEADS, HEAD_SIZE, HEAD_TILE + (HEAD_TILE if REST else 0), MERGE_ROWS, MERGE_PARTS,
                    )  # fmt: skip
