"""CPU kernel of a product with a weight in tiles: each row is summed in one order, whatever the number of rows.

The numbers of the inner dimension are multiplied one after the other, into a sum for each of a tile's rows. The sum
starts anew after each BLOCK; the blocks' sums are added in order, then the bias. (oneDNN's float32 products use the
same order on CPUs with AVX2, and so give the same bits.) A block of a tile stays in a core's cache while rows pass,
six at a
time: their sums fill the AVX2 registers beside the operands.
"""

from __future__ import annotations

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import load, spread, store
from kvforge.worker.cpu.vector import LANES, add, fma, next_ticket, read_float, reading_integers

BLOCK = 1024
WIDE = 4 * LANES  # rows of a weight in a tile; fewer if it has few
TICKET_ROWS = 96  # rows of x per ticket
read_13 = reading_integers(13)


@part
def put(target, sums, first, bias):
    """Write sums to target [16], after adding those of earlier blocks (if `first` is not 0) and the bias (0: none)."""
    if first:
        sums = add(load(target), sums)
    if bias:
        sums = add(sums, load(bias))
    store(target, sums)


@part
def six_rows(x, x_bytes, weight, step, first, end, bias, target, target_bytes):
    """Multiply x [6, first to end] by a block [first to end, 16] with `step` bytes between rows; target: [6, 16]."""
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
    """Multiply x [4, first to end] likewise."""
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
    """Multiply x [first to end] likewise."""
    sums = spread(0.0)
    for k in range(first, end):
        sums = fma(spread(read_float(x + 4 * k)), load(weight + step * k), sums)
    put(target, sums, first, bias)


@part
def one_row_of_64(x, weight, first, end, bias, target):
    """Multiply by a tile of 64 rows at once, which is read sequentially."""
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
    """Multiply x [row to rows, first to end] by a block of a tile; target: [row to rows, width]."""
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


@cpu_kernel("x rows weight bias target target_bytes count width tile_bytes tiles parts")
def multiply_tiles(arguments):
    """Write x [rows, count] times tiles [tiles, tile_bytes], plus bias, to target [rows, tiles x width].

    bias has the length of the tiles. parts: parts of the rows. A ticket is a part and a tile; the tickets of one tile
    are consecutive.
    """
    _, _, x, rows, weight, bias, target, target_bytes, count, width, tile_bytes, tiles, parts = read_13(arguments)
    while True:
        ticket = next_ticket(arguments)
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
