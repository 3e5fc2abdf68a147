"""A few rows times a packed weight, as oneDNN computes them among many: bit by bit the same sums, and little else.

oneDNN multiplies float32 one number of the inner dimension after the other, into a sum for each of a tile's rows, and
begins anew after each BLOCK of them; the blocks' sums are added up in their order, then the bias. Who multiplies a few
rows by the same rule reads the weight once, from its first byte to its last, and does nothing else. Whether this oneDNN
does so on this CPU is found by trying (see few_rows.py).
"""

from __future__ import annotations

from worker.device.host_kernel import host_kernel, part
from worker.device.rows import load, spread, store
from worker.device.vector import LANES, add, fma, read_float, reading_integers, take_ticket

BLOCK = 1024
WIDE = 4 * LANES  # rows of a weight in a tile; fewer where it has few, or on another CPU
read_12 = reading_integers(12)


@part
def one_row(x, weight, bias, target, count):
    """target [64] = x [count] times a tile [count, 64], and bias [64] (an address; 0: none)."""
    zero = spread(0.0)
    a, b, c, d = zero, zero, zero, zero
    first = 0
    while first < count:
        e, f, g, h = zero, zero, zero, zero
        for k in range(first, min(first + BLOCK, count)):
            number, at = spread(read_float(x + 4 * k)), weight + 4 * WIDE * k
            e = fma(number, load(at), e)
            f = fma(number, load(at + 4 * LANES), f)
            g = fma(number, load(at + 8 * LANES), g)
            h = fma(number, load(at + 12 * LANES), h)
        if first == 0:
            a, b, c, d = e, f, g, h
        else:
            a, b, c, d = add(a, e), add(b, f), add(c, g), add(d, h)
        first += BLOCK
    if bias:
        a, b = add(a, load(bias)), add(b, load(bias + 4 * LANES))
        c, d = add(c, load(bias + 8 * LANES)), add(d, load(bias + 12 * LANES))
    store(target, a)
    store(target + 4 * LANES, b)
    store(target + 8 * LANES, c)
    store(target + 12 * LANES, d)


@part
def sixteen(x, weight, step, bias, target, count):
    """target [16] = x [count] times [count, 16], whose rows begin `step` bytes apart, and bias [16]."""
    a, first = spread(0.0), 0
    while first < count:
        e = spread(0.0)
        for k in range(first, min(first + BLOCK, count)):
            e = fma(spread(read_float(x + 4 * k)), load(weight + step * k), e)
        a = e if first == 0 else add(a, e)
        first += BLOCK
    store(target, add(a, load(bias)) if bias else a)


@host_kernel("10q")
def multiply_rows(arguments):
    """target [rows, tiles x width] = x [rows, count] times tiles [tiles, tile_bytes], and bias. A ticket is a tile."""
    _, _, x, rows, weight, bias, target, target_bytes, count, width, tile_bytes, tiles = read_12(arguments)
    while True:
        tile = take_ticket(arguments)
        if tile >= tiles:
            return
        numbers, into = weight + tile_bytes * tile, target + 4 * width * tile
        own = bias + 4 * width * tile if bias else 0
        for row in range(rows):
            from_x, to = x + 4 * count * row, into + target_bytes * row
            if width == WIDE:
                one_row(from_x, numbers, own, to, count)
            else:
                for at in range(0, 4 * width, 4 * LANES):
                    sixteen(from_x, numbers + at, 4 * width, own + at if own else 0, to + at, count)
