"""CPU kernels of the layers' small operations, one each, rounded where plain torch rounds (see plain.py).

A ticket is a few rows. Sums run over 16 lanes, which are added at the end: their order depends on the row's length
only.
"""

from __future__ import annotations

import math

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import copy, item_bytes, load_any, read_any, spread, spread_one, store_any, write_any
from kvforge.worker.cpu.vector import (
    LANES,
    add,
    divide,
    exp,
    first_lane,
    fma,
    multiply,
    next_ticket,
    read_double,
    read_integer,
    reading_integers,
    subtract,
    total,
)

ROWS = 4  # per ticket
NUMBERS_PER_US = 2_000  # throughput of one thread
F = np.float32
read_8, read_9, read_10 = reading_integers(8), reading_integers(9), reading_integers(10)


@part
def scale_of(row, code, count, epsilon):
    """Return 1 / the root mean square of a row."""
    size, at = item_bytes(code), 0
    squares = spread(F(0))
    while at + LANES <= count:
        x = load_any(row + size * at, code)
        squares = fma(x, x, squares)
        at += LANES
    summed = total(squares)
    for index in range(at, count):
        x = read_any(row + size * index, code)
        summed += x * x
    return F(1) / F(math.sqrt(summed / F(count) + epsilon))


@part
def normalise(row, weight, target, code, count, epsilon):
    """Write a row's norm to target [count], possibly the row itself. Rounded before and after the weight."""
    scale, size, at = scale_of(row, code, count, epsilon), item_bytes(code), 0
    scales = spread(scale)
    while at + LANES <= count:
        place = target + size * at
        store_any(place, multiply(load_any(row + size * at, code), scales), code)
        store_any(place, multiply(load_any(place, code), load_any(weight + size * at, code)), code)
        at += LANES
    for index in range(at, count):
        place = target + size * index
        write_any(place, read_any(row + size * index, code) * scale, code)
        write_any(place, read_any(place, code) * read_any(weight + size * index, code), code)


@part
def normalise_with(row, weight, target, code, count, epsilon, offset, rounds_first):
    """Write a row's norm to target [count], with an offset of the weight. rounds_first: as `Norm` has it."""
    scale, size, at = scale_of(row, code, count, epsilon), item_bytes(code), 0
    scales, offsets = spread(scale), spread(offset)
    while at + LANES <= count:
        place = target + size * at
        x = multiply(load_any(row + size * at, code), scales)
        if rounds_first != 0:
            store_any(place, x, code)
            x = load_any(place, code)
        store_any(place, multiply(x, add(load_any(weight + size * at, code), offsets)), code)
        at += LANES
    for index in range(at, count):
        place = target + size * index
        y = read_any(row + size * index, code) * scale
        if rounds_first != 0:
            write_any(place, y, code)
            y = read_any(place, code)
        write_any(place, y * (read_any(weight + size * index, code) + offset), code)


@cpu_kernel("tokens table weight residual normed rows count code epsilon:d")
def embed_norm(arguments):
    """Copy rows of the table to residual [rows, count], and write their norms to normed."""
    _, _, tokens, table, weight, residual, normed, rows, count, code = read_10(arguments)
    epsilon, width = F(read_double(arguments + 80)), count * item_bytes(code)
    while True:
        first = ROWS * next_ticket(arguments)
        if first >= rows:
            return
        for row in range(first, min(first + ROWS, rows)):
            place = residual + width * row
            copy(table + width * read_integer(tokens + 8 * row), code, place, code, count)
            normalise(place, weight, normed + width * row, code, count, epsilon)


@cpu_kernel("addend residual weight normed rows count code epsilon:d")
def add_norm(arguments):
    """Add addend to residual [rows, count], and write the norms of the sums to normed."""
    _, _, addend, residual, weight, normed, rows, count, code = read_9(arguments)
    epsilon, size = F(read_double(arguments + 72)), item_bytes(code)
    while True:
        first = ROWS * next_ticket(arguments)
        if first >= rows:
            return
        for row in range(first, min(first + ROWS, rows)):
            more, place, at = addend + size * count * row, residual + size * count * row, 0
            while at + LANES <= count:
                here = place + size * at
                store_any(here, add(load_any(here, code), load_any(more + size * at, code)), code)
                at += LANES
            for index in range(at, count):
                here = place + size * index
                write_any(here, read_any(here, code) + read_any(more + size * index, code), code)
            normalise(place, weight, normed + size * count * row, code, count, epsilon)


@cpu_kernel("projected stride query_weight key_weight rows heads kv_heads size code epsilon:d")
def head_norm(arguments):
    """Normalise each head of Q and K in place. stride: bytes from one row to the next."""
    _, _, projected, stride, query_weight, key_weight, rows, heads, kv_heads, size = read_10(arguments)
    code, epsilon = read_integer(arguments + 80), F(read_double(arguments + 88))
    while True:
        first = ROWS * next_ticket(arguments)
        if first >= rows:
            return
        for row in range(first, min(first + ROWS, rows)):
            for head in range(heads + kv_heads):
                place = projected + stride * row + item_bytes(code) * size * head
                weight = query_weight if head < heads else key_weight
                normalise(place, weight, place, code, size, epsilon)


@cpu_kernel(
    "source stride head_stride target target_stride into_stride weight key_weight "
    "rows heads key_heads size code rounds_first epsilon:d offset:d"
)
def norm(arguments):
    """Normalise rows of `heads` heads with weight and `key_heads` heads with key_weight.

    Strides are in bytes: from row to row, and from head to head (head_stride, and into_stride of the target).
    """
    _, _, source, stride, head_stride, target, target_stride, into_stride, weight, key_weight = read_10(arguments)
    rows, heads, key_heads = read_integer(arguments + 80), read_integer(arguments + 88), read_integer(arguments + 96)
    size, code, rounds_first = (
        read_integer(arguments + 104),
        read_integer(arguments + 112),
        read_integer(arguments + 120),
    )
    epsilon, offset = F(read_double(arguments + 128)), F(read_double(arguments + 136))
    while True:
        first = ROWS * next_ticket(arguments)
        if first >= rows:
            return
        for row in range(first, min(first + ROWS, rows)):
            for head in range(heads + key_heads):
                place = source + stride * row + head_stride * head
                into = target + target_stride * row + into_stride * head
                factors = weight if head < heads else key_weight
                normalise_with(place, factors, into, code, size, epsilon, offset, rounds_first)


@cpu_kernel("source stride target rows count code")
def gate(arguments):
    """Write silu(x[:, :count]) x[:, count:] to target [rows, count]. stride: bytes from one row of x to the next."""
    _, _, source, stride, target, rows, count, code = read_8(arguments)
    size, zero, one = item_bytes(code), spread(F(0)), spread(F(1))
    while True:
        first = ROWS * next_ticket(arguments)
        if first >= rows:
            return
        for row in range(first, min(first + ROWS, rows)):
            here, there, at = source + stride * row, target + size * count * row, 0
            while at + LANES <= count:
                x, place = load_any(here + size * at, code), there + size * at
                store_any(place, divide(x, add(one, exp(subtract(zero, x)))), code)
                up = load_any(here + size * (count + at), code)
                store_any(place, multiply(load_any(place, code), up), code)
                at += LANES
            for index in range(at, count):
                x, place = read_any(here + size * index, code), there + size * index
                write_any(place, x / (F(1) + first_lane(exp(spread_one(-x)))), code)
                up = read_any(here + size * (count + index), code)
                write_any(place, read_any(place, code) * up, code)
