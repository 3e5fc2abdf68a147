"""CPU kernel of a short causal convolution: one token of each row, with the states in the pages of the pool.

A ticket is a part of a row's channels. A channel's sum runs over its taps in order, rounded where plain torch rounds
(see plain.py). Channels are computed 16 at a time where their lines follow each other, and else one by one, with the
same bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import item_bytes, load_any, read_any, spread, spread_one, store_any, write_any
from kvforge.worker.cpu.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LANES,
    Vector,
    add,
    divide,
    exp,
    first_lane,
    multiply,
    next_ticket,
    read_integer,
    read_integer32,
    reading_integers,
    subtract,
)

CHANNELS = 512  # per ticket, a multiple of LANES
CHANNELS_PER_US = 300  # throughput of one thread
F = np.float32
STORED = {FLOAT32: ir.FloatType(), FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16)}
read_10 = reading_integers(10)


def _places(builder, address, stride, code):
    """Yield a pointer to each of LANES numbers that are `stride` bytes apart."""
    for lane in range(LANES):
        place = builder.add(address, builder.mul(stride, ir.Constant(stride.type, lane)))
        yield lane, builder.inttoptr(place, STORED[code].as_pointer())


def picking(code):
    """Make the function pick(address, stride): LANES numbers of that dtype, `stride` bytes apart, as float32."""

    @intrinsic
    def pick(_, address, stride):
        def generate(_context, builder, _signature, arguments):
            address, stride = arguments
            stored, wide = (ir.VectorType(kind, LANES) for kind in (STORED[code], ir.FloatType()))
            found = ir.Constant(stored, ir.Undefined)
            for lane, place in _places(builder, address, stride, code):
                found = builder.insert_element(found, builder.load(place), ir.Constant(ir.IntType(32), lane))
            if code == FLOAT32:
                return found
            if code == FLOAT16:
                return builder.fpext(found, wide)
            integers = ir.VectorType(ir.IntType(32), LANES)
            high = builder.shl(builder.zext(found, integers), ir.Constant(integers, [16] * LANES))
            return builder.bitcast(high, wide)

        return Vector(LANES)(types.int64, types.int64), generate

    return pick


def putting(code):
    """Make the procedure put(address, stride, vector) for numbers that the dtype has exactly; see `picking`."""

    @intrinsic
    def put(_, address, stride, vector):
        def generate(context, builder, _signature, arguments):
            address, stride, numbers = arguments
            if code == FLOAT16:
                numbers = builder.fptrunc(numbers, ir.VectorType(STORED[code], LANES))
            elif code == BFLOAT16:
                integers = ir.VectorType(ir.IntType(32), LANES)
                high = builder.lshr(builder.bitcast(numbers, integers), ir.Constant(integers, [16] * LANES))
                numbers = builder.trunc(high, ir.VectorType(STORED[code], LANES))
            for lane, place in _places(builder, address, stride, code):
                builder.store(builder.extract_element(numbers, ir.Constant(ir.IntType(32), lane)), place)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, Vector(LANES)), generate

    return put


_pick_32, _pick_16, _pick_brain = picking(FLOAT32), picking(FLOAT16), picking(BFLOAT16)
_put_32, _put_16, _put_brain = putting(FLOAT32), putting(FLOAT16), putting(BFLOAT16)


@part
def pick(address, stride, code):
    """Load LANES numbers, `stride` bytes apart."""
    if code == FLOAT32:
        return _pick_32(address, stride)
    return _pick_brain(address, stride) if code == BFLOAT16 else _pick_16(address, stride)


@part
def put(address, stride, vector, code):
    """Store LANES numbers that were loaded from this dtype."""
    if code == FLOAT32:
        _put_32(address, stride, vector)
    elif code == BFLOAT16:
        _put_brain(address, stride, vector)
    else:
        _put_16(address, stride, vector)


@part
def convolve_16(given, place, factors, bias, line, channels, taps, code, state_code, gated, silu):
    """Compute LANES channels whose lines follow each other from `line` on."""
    size, state_size = item_bytes(code), item_bytes(state_code)
    newest = load_any(given, code)
    if gated != 0:
        store_any(place, multiply(newest, load_any(given + 2 * size * channels, code)), code)
        newest = load_any(place, code)
    total = spread(F(0))
    for tap in range(taps - 1):
        numbers = pick(line + state_size * (tap + 1), state_size * taps, state_code)
        put(line + state_size * tap, state_size * taps, numbers, state_code)
        total = add(total, multiply(pick(factors + size * tap, size * taps, code), numbers))
    store_any(place, newest, code)
    for lane in range(LANES):
        write_any(line + state_size * (taps * (lane + 1) - 1), read_any(place + size * lane, code), state_code)
    total = add(total, multiply(pick(factors + size * (taps - 1), size * taps, code), newest))
    if bias != 0:
        total = add(total, load_any(bias, code))
    store_any(place, total, code)
    if silu != 0:
        total = load_any(place, code)
        store_any(place, divide(total, add(spread(F(1)), exp(subtract(spread(F(0)), total)))), code)
    if gated != 0:
        store_any(place, multiply(load_any(place, code), load_any(given + size * channels, code)), code)


@part
def convolve_one(given, place, factors, bias, line, channels, taps, code, state_code, gated, silu):
    """Compute one channel."""
    size, state_size = item_bytes(code), item_bytes(state_code)
    newest = read_any(given, code)
    if gated != 0:
        write_any(place, newest * read_any(given + 2 * size * channels, code), code)
        newest = read_any(place, code)
    total = F(0)
    for tap in range(taps - 1):
        number = read_any(line + state_size * (tap + 1), state_code)
        write_any(line + state_size * tap, number, state_code)
        total += read_any(factors + size * tap, code) * number
    write_any(line + state_size * (taps - 1), newest, state_code)
    total += read_any(factors + size * (taps - 1), code) * newest
    if bias != 0:
        total += read_any(bias, code)
    write_any(place, total, code)
    if silu != 0:
        total = read_any(place, code)
        write_any(place, total / (F(1) + first_lane(exp(spread_one(-total)))), code)
    if gated != 0:
        write_any(place, read_any(place, code) * read_any(given + size * channels, code), code)


@cpu_kernel(
    "x stride target weight bias rows channels taps code memory page_bytes pages page_count lines state_code gated silu"
)
def convolve(arguments):
    """Shift the inputs of each row and channel, append the new one, and write their sum to target [rows, channels].

    stride: bytes from one row of x to the next. bias: 0 for none. pages: [rows, page_count] int32. lines: see
    StateRows. gated: x has three parts b, c and x; b x is convolved, and the sum is multiplied by c.
    """
    _, _, x, stride, target, weight, bias, rows, channels, taps = read_10(arguments)
    code, memory, page_bytes = read_integer(arguments + 80), read_integer(arguments + 88), read_integer(arguments + 96)
    pages, page_count, lines = (
        read_integer(arguments + 104),
        read_integer(arguments + 112),
        read_integer(arguments + 120),
    )
    state_code, gated, silu = (
        read_integer(arguments + 128),
        read_integer(arguments + 136),
        read_integer(arguments + 144),
    )
    size, state_size, blocks = item_bytes(code), item_bytes(state_code), (channels + CHANNELS - 1) // CHANNELS
    while True:
        ticket = next_ticket(arguments)
        if ticket >= rows * blocks:
            return
        row, first = ticket // blocks, CHANNELS * (ticket % blocks)
        own, end, channel = pages + 4 * page_count * row, min(first + CHANNELS, channels), first
        while channel < end:
            given, place = x + stride * row + size * channel, target + size * (channels * row + channel)
            where, factors = lines + 8 * channel, weight + size * taps * channel
            page, offset = read_integer32(where), read_integer32(where + 4)
            line = memory + page_bytes * read_integer32(own + 4 * page) + offset
            own_bias = bias + size * channel if bias != 0 else 0
            last = where + 8 * (LANES - 1)
            together = channel + LANES <= end
            if together:
                far = offset + state_size * taps * (LANES - 1)
                together = read_integer32(last) == page and read_integer32(last + 4) == far
            if together:
                convolve_16(given, place, factors, own_bias, line, channels, taps, code, state_code, gated, silu)
                channel += LANES
            else:
                convolve_one(given, place, factors, own_bias, line, channels, taps, code, state_code, gated, silu)
                channel += 1
