"""Rows times a weight that lies in tiles, each row by itself: whatever is beside it, its sums have one order.

One number of the inner dimension is multiplied after the other, into a sum for each of a tile's rows; that begins anew
after each BLOCK of them, and the blocks' sums are added up in their order, then the bias. (oneDNN's products in float32
have the same order on CPUs with AVX2, and so the same bits.) A block of a tile stays in a core's cache while rows pass,
six together: their sums are all that the registers of AVX2 hold beside what is multiplied.
"""

from __future__ import annotations

from worker.device.host_kernel import host_kernel, part
from worker.device.rows import load, spread, store
from worker.device.vector import LANES, add, fma, read_float, reading_integers, take_ticket

BLOCK = 1024
WIDE = 4 * LANES  # rows of a weight in a tile; fewer where it has few
TICKET_ROWS = 96  # of x
read_13 = reading_integers(13)


@part
def put(target, sums, first, bias):
    """target [16] = sums, after those of the blocks before (first: the block's first number), and bias (0: none)."""
    if first:
        sums = add(load(target), sums)
    if bias:
        sums = add(sums, load(bias))
    store(target, sums)


@part
def six_rows(x, x_bytes, weight, step, first, end, bias, target, target_bytes):
    """target [6, 16] of x [6, first to end] times a block [first to end, 16], whose rows begin `step` bytes apart."""
    zero = spread(0.0)
    a, b, c, d, e, f = zero, zero, zero, zero, zero, zero
    for k in range(first, end):
        numbers, at = load(weight + step * k), x + 4 * k
        a = fma(spread(read_float(at)), numbers, a)
        b = fma(spread(read_float(at + x_bytes)), numbers, b)
        c = fma(spread(read_float(at + 2 * x_bytes)), numbers, c)
        d = fma(spread(read_float(at + 3 * x_bytes)), numbers, d)
        e = fma(spread(read_float(at + 4 * x_bytes)), numbers, e)
        f = fma(spread(read_float(at + 5 * x_bytes)), numbers, f)
    put(target, a, first, bias)
    put(target + target_bytes, b, first, bias)
    put(target + 2 * target_bytes, c, first, bias)
    put(target + 3 * target_bytes, d, first, bias)
    put(target + 4 * target_bytes, e, first, bias)
    put(target + 5 * target_bytes, f, first, bias)


@part
def four_rows(x, x_bytes, weight, step, first, end, bias, target, target_bytes):
    """The same of x [4, first to end]."""
    zero = spread(0.0)
    a, b, c, d = zero, zero, zero, zero
    for k in range(first, end):
        numbers, at = load(weight + step * k), x + 4 * k
        a = fma(spread(read_float(at)), numbers, a)
        b = fma(spread(read_float(at + x_bytes)), numbers, b)
        c = fma(spread(read_float(at + 2 * x_bytes)), numbers, c)
        d = fma(spread(read_float(at + 3 * x_bytes)), numbers, d)
    put(target, a, first, bias)
    put(target + target_bytes, b, first, bias)
    put(target + 2 * target_bytes, c, first, bias)
    put(target + 3 * target_bytes, d, first, bias)


@part
def one_row(x, weight, step, first, end, bias, target):
    """The same of x [first to end]."""
    sums = spread(0.0)
    for k in range(first, end):
        sums = fma(spread(read_float(x + 4 * k)), load(weight + step * k), sums)
    put(target, sums, first, bias)


@part
def one_row_of_64(x, weight, first, end, bias, target):
    """The same of a tile of 64 at once, which is read from its first byte to its last."""
    zero = spread(0.0)
    a, b, c, d = zero, zero, zero, zero
    for k in range(first, end):
        number, at = spread(read_float(x + 4 * k)), weight + 4 * WIDE * k
        a = fma(number, load(at), a)
        b = fma(number, load(at + 4 * LANES), b)
        c = fma(number, load(at + 8 * LANES), c)
        d = fma(number, load(at + 12 * LANES), d)
    put(target, a, first, bias)
    put(target + 4 * LANES, b, first, bias + 4 * LANES if bias else 0)
    put(target + 8 * LANES, c, first, bias + 8 * LANES if bias else 0)
    put(target + 12 * LANES, d, first, bias + 12 * LANES if bias else 0)


@part
def some_rows(x, x_bytes, row, rows, weight, width, first, end, bias, target, target_bytes):
    """target [row to rows, width] of x [row to rows, first to end] times a block of a tile."""
    step = 4 * width
    while row < rows:
        left, from_x, to = rows - row, x + x_bytes * row, target + target_bytes * row
        if left < 4 and width == WIDE:
            one_row_of_64(from_x, weight, first, end, bias, to)
            row += 1
            continue
        for at in range(0, step, 4 * LANES):
            more = bias + at if bias else 0
            if left >= 6:
                six_rows(from_x, x_bytes, weight + at, step, first, end, more, to + at, target_bytes)
            elif left >= 4:
                four_rows(from_x, x_bytes, weight + at, step, first, end, more, to + at, target_bytes)
            else:
                one_row(from_x, weight + at, step, first, end, more, to + at)
        row += 6 if left >= 6 else (4 if left >= 4 else 1)


@host_kernel("11q")
def multiply_tiles(arguments):
    """target [rows, tiles x width] = x [rows, count] times tiles [tiles, tile_bytes], and bias, as long as they are.

    parts: of the rows. A ticket is a part of them and a tile; those of one tile follow each other.
    """
    _, _, x, rows, weight, bias, target, target_bytes, count, width, tile_bytes, tiles, parts = read_13(arguments)
    while True:
        ticket = take_ticket(arguments)
        if ticket >= tiles * parts:
            return
        tile = ticket // parts
        row = TICKET_ROWS * (ticket - tile * parts)
        into, numbers = target + 4 * width * tile, weight + tile_bytes * tile
        for first in range(0, count, BLOCK):
            end = min(first + BLOCK, count)
            own = bias + 4 * width * tile if bias and end == count else 0
            last = min(row + TICKET_ROWS, rows)
            some_rows(x, 4 * count, row, last, numbers, width, first, end, own, into, target_bytes)
