"""CPU kernel of attention, reading K and V in place through the block table.

One kernel serves decodes and prefills: a decode is a prefill of one token. Both compute a token's result with the same
sums in the same order, and from its own row only. Keys are processed in chunks of 64, counted from the row's first
token. The largest score of a chunk is subtracted before the exponentials, and chunks are joined in sequence ("online
softmax": Milakov and Gimelshein, arXiv 1805.02867). Sums start anew every 512 keys, in *parts* that are joined in
order, so a long row gives the same result whether or not threads share it.

An *item* is a few neighbouring tokens of a row, or the last tokens of several rows with block tables that begin alike,
for parts that all these rows see whole. The keys are then brought once, and each row has the sums that it has alone:
the sums up to here are stored, and joined with its further parts in order. A ticket is one KV head of an item, with all
query heads that use it; a *query* here is one head of one token. A chunk's keys are transposed to [head_size, keys] and
its values are gathered, both in float32, in memory that stays in the core's cache. The rest is independent of the
storage format.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite.binding import get_host_cpu_features

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import item_bytes, load, narrow, read_any, spread, spread_one, store, widen
from kvforge.worker.cpu.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8,
    INT8,
    LANES,
    add,
    divide,
    exp,
    fetch,
    first_lane,
    fma,
    keep,
    largest,
    loading,
    multiply,
    next_ticket,
    read_double,
    read_float,
    read_integer,
    reading_integers,
    spreading,
    storing,
    subtract,
    total,
    transposing,
    write_float,
    write_integer,
)

CHUNK, PART = 64, 512  # keys
ITEM_FIELDS = 11  # int64 numbers of an item, see `attend`
# Width of a strip that four queries are multiplied with at once: it must fit the registers with their sums.
STRIP = 64 if get_host_cpu_features().get("avx512f") else 16

F = np.float32
NOTHING = F(-math.inf)
load_strip, store_strip, spread_strip = loading(STRIP, FLOAT32), storing(STRIP, FLOAT32), spreading(STRIP)
load_chunk, store_chunk, spread_chunk = loading(CHUNK, FLOAT32), storing(CHUNK, FLOAT32), spreading(CHUNK)
turn_float32, turn_float16, turn_bfloat16 = transposing(FLOAT32), transposing(FLOAT16), transposing(BFLOAT16)
turn_int8, turn_fp8 = transposing(INT8), transposing(FP8)
read_sizes, read_item = reading_integers(22), reading_integers(ITEM_FIELDS)


def scratch_bytes(queries: int, head_size: int) -> int:
    """Return the scratch bytes of one thread for items of this many queries, as laid out in `attend`."""
    padded = -(-head_size // LANES) * LANES
    return 4 * (3 * CHUNK + 2 * CHUNK * padded + queries * (3 * padded + CHUNK + 5)) + 64


def partial_bytes(queries: int, head_size: int) -> int:
    """Return the bytes of one part of an item and KV head: its sums, sums of weights and largest scores."""
    return 4 * queries * (-(-head_size // LANES) * LANES + 2)


@part
def turn_keys(addresses, code, target, size):
    """Transpose the keys [size] at CHUNK addresses to target [size, CHUNK] float32."""
    width = item_bytes(code)
    if size < LANES:
        for key in range(CHUNK):
            address = read_integer(addresses + 8 * key)
            for at in range(size):
                write_float(target + 4 * (CHUNK * at + key), read_any(address + width * at, code))
        return
    for first in range(0, CHUNK, LANES):
        for index in range(0, size, LANES):
            at = min(index, size - LANES)
            place = target + 4 * (CHUNK * at + first)
            if code == FLOAT32:
                turn_float32(addresses + 8 * first, width * at, place, 4 * CHUNK)
            elif code == BFLOAT16:
                turn_bfloat16(addresses + 8 * first, width * at, place, 4 * CHUNK)
            elif code == FLOAT16:
                turn_float16(addresses + 8 * first, width * at, place, 4 * CHUNK)
            elif code == INT8:
                turn_int8(addresses + 8 * first, width * at, place, 4 * CHUNK)
            else:
                turn_fp8(addresses + 8 * first, width * at, place, 4 * CHUNK)


@part
def scores_of_four(queries, stride, keys, size, scores):
    """Compute scores [4, CHUNK] = queries [4, size], `stride` bytes apart, times keys [size, CHUNK]."""
    for strip in range(0, 4 * CHUNK, 4 * STRIP):
        a = b = c = d = spread_strip(F(0))
        for index in range(size):
            key = load_strip(keys + strip + 4 * CHUNK * index)
            at = queries + 4 * index
            a = fma(spread_strip(read_float(at)), key, a)
            b = fma(spread_strip(read_float(at + stride)), key, b)
            c = fma(spread_strip(read_float(at + 2 * stride)), key, c)
            d = fma(spread_strip(read_float(at + 3 * stride)), key, d)
        store_strip(scores + strip, a)
        store_strip(scores + 4 * CHUNK + strip, b)
        store_strip(scores + 8 * CHUNK + strip, c)
        store_strip(scores + 12 * CHUNK + strip, d)


@part
def scores_of_one(query, keys, size, scores):
    """Compute scores [CHUNK] = query [size] times keys [size, CHUNK]."""
    for strip in range(0, 4 * CHUNK, 4 * STRIP):
        a = spread_strip(F(0))
        for index in range(size):
            a = fma(spread_strip(read_float(query + 4 * index)), load_strip(keys + strip + 4 * CHUNK * index), a)
        store_strip(scores + strip, a)


@part
def weigh(scores, first, end, softcap, peak, summed, factor):
    """Turn scores [CHUNK] of a query into weights, 0 outside [first, end), and update its peak and sum.

    factor: receives the factor of all earlier sums.
    """
    if end <= first:
        write_float(factor, F(1))
        store_chunk(scores, spread_chunk(F(0)))
        return
    x = load_chunk(scores)
    if softcap > F(0):  # tanh y = 1 - 2 / (e^2y + 1)
        one, two = spread_chunk(F(1)), spread_chunk(F(2))
        grown = exp(multiply(x, spread_chunk(F(2) / softcap)))
        x = multiply(subtract(one, divide(two, add(grown, one))), spread_chunk(softcap))
    whole = first <= 0 and end >= CHUNK
    if not whole:
        x = keep(x, first, end, NOTHING)
    before, top = read_float(peak), largest(x)
    if top <= before:
        top = before
    x = exp(subtract(x, spread_chunk(top)))
    if not whole:
        x = keep(x, first, end, F(0))
    store_chunk(scores, x)
    shrunk = first_lane(exp(spread_one(before - top)))
    write_float(factor, shrunk)
    write_float(peak, top)
    write_float(summed, read_float(summed) * shrunk + total(x))


@part
def add_four(weights, values, padded, keys, sums, factors):
    """Compute sums [4, padded] = sums x factors [4] + weights [4, CHUNK] times values [keys, padded], key by key."""
    stride, at = 4 * padded, 0
    while at + STRIP <= padded:
        place = sums + 4 * at
        a = multiply(load_strip(place), spread_strip(read_float(factors)))
        b = multiply(load_strip(place + stride), spread_strip(read_float(factors + 4)))
        c = multiply(load_strip(place + 2 * stride), spread_strip(read_float(factors + 8)))
        d = multiply(load_strip(place + 3 * stride), spread_strip(read_float(factors + 12)))
        for key in range(keys):
            value, weight = load_strip(values + stride * key + 4 * at), weights + 4 * key
            a = fma(spread_strip(read_float(weight)), value, a)
            b = fma(spread_strip(read_float(weight + 4 * CHUNK)), value, b)
            c = fma(spread_strip(read_float(weight + 8 * CHUNK)), value, c)
            d = fma(spread_strip(read_float(weight + 12 * CHUNK)), value, d)
        store_strip(place, a)
        store_strip(place + stride, b)
        store_strip(place + 2 * stride, c)
        store_strip(place + 3 * stride, d)
        at += STRIP
    for query in range(4):
        add_rest(weights + 4 * CHUNK * query, values, padded, keys, sums + stride * query, factors + 4 * query, at)


@part
def add_one(weights, values, padded, keys, sums, factor):
    """Compute sums [padded] = sums x factor + weights [CHUNK] times values [keys, padded], key by key."""
    at = 0
    while at + STRIP <= padded:
        a = multiply(load_strip(sums + 4 * at), spread_strip(read_float(factor)))
        for key in range(keys):
            value = load_strip(values + 4 * (padded * key + at))
            a = fma(spread_strip(read_float(weights + 4 * key)), value, a)
        store_strip(sums + 4 * at, a)
        at += STRIP
    add_rest(weights, values, padded, keys, sums, factor, at)


@part
def add_rest(weights, values, padded, keys, sums, factor, begin):
    """Process the rest of a head from `begin` on."""
    for at in range(begin, padded, LANES):
        a = multiply(load(sums + 4 * at), spread(read_float(factor)))
        for key in range(keys):
            a = fma(spread(read_float(weights + 4 * key)), load(values + 4 * (padded * key + at)), a)
        store(sums + 4 * at, a)


@part
def clear(queries, padded, sums, peaks, summed):
    """Reset sums, peaks and sums of weights."""
    for at in range(0, 4 * queries * padded, 4 * LANES):
        store(sums + at, spread(F(0)))
    for query in range(queries):
        write_float(peaks + 4 * query, NOTHING)
        write_float(summed + 4 * query, F(0))


@part
def join(queries, padded, sums, peaks, summed, part_sums, part_peaks, part_summed):
    """Join a part with the sums of earlier parts."""
    for query in range(queries):
        weight = read_float(part_summed + 4 * query)
        if weight == F(0):  # all its keys are outside the window
            continue
        before, top = read_float(peaks + 4 * query), read_float(part_peaks + 4 * query)
        peak = max(top, before)
        old, new = first_lane(exp(spread_one(before - peak))), first_lane(exp(spread_one(top - peak)))
        write_float(peaks + 4 * query, peak)
        write_float(summed + 4 * query, read_float(summed + 4 * query) * old + weight * new)
        for at in range(4 * query * padded, 4 * (query + 1) * padded, 4 * LANES):
            scaled = multiply(load(part_sums + at), spread(new))
            store(sums + at, fma(load(sums + at), spread(old), scaled))


@part
def factor_with_sink(sink, peak, summed):
    """Return the factor of a query's sums that makes them its result, with one more score that has no value."""
    top = max(peak, sink)
    shrunk = first_lane(exp(spread_one(peak - top)))
    return shrunk / (summed * shrunk + first_lane(exp(spread_one(sink - top))))


@part
def bring_chunk(
    table, block_size, low, first, count, end, kv_heads, head, size, keys, values, scales, code, scratch, padded
):
    """Load keys [low + first, low + count) of a row into `scratch`, laid out for `attend_chunk`.

    Other places of the chunk get copies of neighbouring keys: no key is read that the row cannot see. Meanwhile the
    next chunk is prefetched, up to `end`.
    """
    (key_scales, value_scales), length = scales, size * item_bytes(code)
    chunk_values = scratch + 4 * CHUNK * padded
    key_factors = chunk_values + 4 * CHUNK * padded
    addresses = key_factors + 4 * CHUNK
    block, ahead = (low + first) // block_size, (low + first + CHUNK) // block_size
    offset, offset_ahead = low + first - block * block_size, low + first + CHUNK - ahead * block_size
    for key in range(first, count):
        if low + key + CHUNK < end:
            slot = read_integer(table + 8 * ahead) * block_size + offset_ahead
            place = (slot * kv_heads + head) * length
            for at in range(0, length, 64):
                fetch(keys + place + at)
                fetch(values + place + at)
            offset_ahead += 1
            if offset_ahead == block_size:
                ahead, offset_ahead = ahead + 1, 0
        place = (read_integer(table + 8 * block) * block_size + offset) * kv_heads + head
        write_integer(addresses + 8 * key, keys + place * length)
        factor = F(1)
        if value_scales != 0:
            write_float(key_factors + 4 * key, read_float(key_scales + 4 * place))
            factor = read_float(value_scales + 4 * place)
        widen(values + place * length, code, chunk_values + 4 * padded * key, size, factor)
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0
    for key in range(CHUNK):
        if key < first or key >= count:
            other = first if key < first else count - 1
            write_integer(addresses + 8 * key, read_integer(addresses + 8 * other))
            write_float(key_factors + 4 * key, read_float(key_factors + 4 * other))
    turn_keys(addresses, code, scratch, size)


@part
def attend_chunk(queries, group, position, low, first, count, window, softcap, scaled, scratch, padded, size):
    """Add a chunk to the sums of the queries; the first `group` queries belong to the token at `position`."""
    values = scratch + 4 * CHUNK * padded
    key_factors = values + 4 * CHUNK * padded
    wanted = key_factors + 12 * CHUNK
    scores = wanted + 4 * queries * padded
    sums = scores + 4 * CHUNK * queries
    peaks = sums + 4 * queries * padded
    summed, factors = peaks + 4 * queries, peaks + 8 * queries
    query = 0
    while query < queries:
        if query + 4 <= queries:
            scores_of_four(wanted + 4 * padded * query, 4 * padded, scratch, size, scores + 4 * CHUNK * query)
            query += 4
        else:
            scores_of_one(wanted + 4 * padded * query, scratch, size, scores + 4 * CHUNK * query)
            query += 1
    for query in range(queries):
        at = position + query // group - low
        begin = max(at - window + 1, 0) if window > 0 else 0
        place = scores + 4 * CHUNK * query
        if scaled:
            store_chunk(place, multiply(load_chunk(place), load_chunk(key_factors)))
        places = peaks + 4 * query, summed + 4 * query, factors + 4 * query
        weigh(place, begin, min(at + 1, count), softcap, *places)
    query, values, count = 0, values + 4 * padded * first, count - first
    while query < queries:
        weights, place = scores + 4 * (CHUNK * query + first), sums + 4 * padded * query
        if query + 4 <= queries:
            add_four(weights, values, padded, count, place, factors + 4 * query)
            query += 4
        else:
            add_one(weights, values, padded, count, place, factors + 4 * query)
            query += 1


@part
def copy(size, source, target):
    """Copy float32 numbers of `size` bytes."""
    for at in range(0, size, 4):
        write_float(target + at, read_float(source + at))


@part
def finish(queries, group, heads, size, padded, head, sinks, code, output, joined):
    """Store the results of queries, `group` of each token, from joined sums, peaks and sums of weights.

    output: where the first result goes.
    """
    peaks = joined + 4 * queries * padded
    summed, item_size = peaks + 4 * queries, item_bytes(code)
    for index in range(queries):
        place = (index // group * heads + index % group) * size * item_size
        weight = read_float(summed + 4 * index)
        if sinks == 0:
            factor = F(1) / weight
        else:
            sink = read_float(sinks + 4 * (head * group + index % group))
            factor = factor_with_sink(sink, read_float(peaks + 4 * index), weight)
        narrow(joined + 4 * padded * index, output + place, code, size, factor)


ARGUMENTS = """
    items item_count scratch_memory scratch_stride query token_stride head_stride query_code output
    keys values key_scales value_scales code tables table_width block_size heads kv_heads size
    scaling:d softcap:d window partials counters sinks members stores
"""


@cpu_kernel(ARGUMENTS)
def attend(arguments):
    """Compute attention; see `CpuAttention.attend`, which makes the arguments and the items. sinks: 0 without them.

    An item holds: the row of the batch; its first token, counted over the batch, and that token's position; the number
    of tokens; the first part and the one after the last; the index of the row's stored sums, -1 if it stores none; the
    place of its own among these; how many places a row has; the index of the row's counter of stored sums; and -1, or
    the index in `members` of the tokens of the rows of a shared item. Such an item has their number in place of that
    of tokens, and of the others the indices of stored sums and of counters follow those of the first row. stores: how
    many sums each counter waits for.
    """
    sizes = read_sizes(arguments)
    items, item_count, scratch_memory, scratch_stride = sizes[2:6]
    query, token_stride, head_stride, query_code, output = sizes[6:11]
    keys, values, key_scales, value_scales, code = sizes[11:16]
    tables, table_width, block_size, heads, kv_heads, size = sizes[16:22]
    scaling, softcap = F(read_double(arguments + 176)), F(read_double(arguments + 184))
    window, partials = read_integer(arguments + 192), read_integer(arguments + 200)
    counters, sinks = read_integer(arguments + 208), read_integer(arguments + 216)
    members, stores = read_integer(arguments + 224), read_integer(arguments + 232)

    group, padded, output_size = heads // kv_heads, (size + LANES - 1) // LANES * LANES, item_bytes(query_code)
    scratch = scratch_memory + next_ticket(arguments + 8) * scratch_stride
    wanted = scratch + 8 * CHUNK * padded + 12 * CHUNK
    while True:
        ticket = next_ticket(arguments)
        if ticket >= item_count * kv_heads:
            return
        item, head = ticket // kv_heads, ticket % kv_heads
        row, token, position, count, first_part, end_part, kept, own, each, counter, listed = read_item(
            items + 8 * ITEM_FIELDS * item
        )
        queries = count * group
        sums = wanted + 4 * queries * (padded + CHUNK)
        peaks = sums + 4 * queries * padded
        summed = peaks + 4 * queries
        # Joined parts have the same layout: sums, peaks, sums of weights.
        joined = peaks + 12 * queries
        joined_peaks = joined + 4 * queries * padded
        joined_summed = joined_peaks + 4 * queries
        for index in range(queries):
            at = token + index // group if listed < 0 else read_integer(members + 8 * (listed + index // group))
            place = query + at * token_stride + (head * group + index % group) * head_stride
            widen(place, query_code, wanted + 4 * padded * index, size, scaling)
        end = position + count if listed < 0 else end_part * PART
        start = max(position - window + 1, 0) if window > 0 else 0
        clear(queries, padded, joined, joined_peaks, joined_summed)
        for at in range(first_part, end_part):
            clear(queries, padded, sums, peaks, summed)
            low = max(at * PART, start // CHUNK * CHUNK)
            while low < min((at + 1) * PART, end):
                first, last = max(start - low, 0), min(CHUNK, end - low)
                table, scales = tables + 8 * row * table_width, (key_scales, value_scales)
                bring_chunk(
                    table,
                    block_size,
                    low,
                    first,
                    last,
                    end,
                    kv_heads,
                    head,
                    size,
                    keys,
                    values,
                    scales,
                    code,
                    scratch,
                    padded,
                )
                scaled = key_scales != 0
                attend_chunk(queries, group, position, low, first, last, window, softcap, scaled, scratch, padded, size)
                low += CHUNK
            join(queries, padded, joined, joined_peaks, joined_summed, sums, peaks, summed)
        if kept < 0:
            place = output + (token * heads + head * group) * size * output_size
            finish(queries, group, heads, size, padded, head, sinks, query_code, place, joined)
            continue
        sum_bytes = 4 * group * (padded + 2)
        for number in range(count):
            place = partials + ((kept + number * each + own) * kv_heads + head) * sum_bytes
            copy(4 * group * padded, joined + 4 * number * group * padded, place)
            copy(4 * group, joined_peaks + 4 * number * group, place + 4 * group * padded)
            copy(4 * group, joined_summed + 4 * number * group, place + 4 * group * (padded + 1))
        for number in range(count):
            done = counters + 8 * ((counter + number) * kv_heads + head)
            stored = read_integer(stores + 8 * (counter + number))
            if next_ticket(done) < stored - 1:
                continue
            write_integer(done, 0)
            # The sums of this item are stored, and their place is free.
            peaks, summed = joined + 4 * group * padded, joined + 4 * group * (padded + 1)
            clear(group, padded, joined, peaks, summed)
            for at in range(stored):
                found = partials + ((kept + number * each + at) * kv_heads + head) * sum_bytes
                found_peaks = found + 4 * group * padded
                join(group, padded, joined, peaks, summed, found, found_peaks, found_peaks + 4 * group)
            at = token if listed < 0 else read_integer(members + 8 * (listed + number))
            place = output + (at * heads + head * group) * size * output_size
            finish(group, group, heads, size, padded, head, sinks, query_code, place, joined)
