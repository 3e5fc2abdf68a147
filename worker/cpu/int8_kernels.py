"""CPU kernels around an int8 product: one rotates and quantises x, the other converts the sums to numbers.

They implement the quantisation of `Int8Weight`: the levels of a row do not depend on other rows.
"""

from __future__ import annotations

import math

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import item_bytes, load, load_any, read_any, spread, store, store_any, widen, write_any
from kvforge.worker.cpu.vector import (
    LANES,
    add,
    fma,
    hadamard,
    largest,
    maximum,
    multiply,
    next_ticket,
    read_double,
    read_float,
    reading_integers,
    store_bytes,
    subtract,
    total,
    write_byte,
    write_float,
)

ROWS = 2  # per ticket
NUMBERS_PER_US = 600  # throughput of one thread
MIDDLE = 128.5  # middle of the levels 1 to 255; the half rounds
F = np.float32
read_9, read_11 = reading_integers(9), reading_integers(11)


@part
def rotate_block(place, size):
    """Multiply `size` numbers by the Hadamard matrix in place: sums and differences (Fino and Algazi, 1976).

    "Unified Matrix Treatment of the Fast Walsh-Hadamard Transform".
    """
    distance = 1
    if size >= LANES:
        for at in range(0, size, LANES):
            store(place + 4 * at, hadamard(load(place + 4 * at)))
        distance = LANES
    while distance < size:
        for first in range(0, size, 2 * distance):
            if distance >= LANES:
                for at in range(first, first + distance, LANES):
                    here, there = place + 4 * at, place + 4 * (at + distance)
                    a, b = load(here), load(there)
                    store(here, add(a, b))
                    store(there, subtract(a, b))
            else:
                for at in range(first, first + distance):
                    here, there = place + 4 * at, place + 4 * (at + distance)
                    x, y = read_float(here), read_float(there)
                    write_float(here, x + y)
                    write_float(there, x - y)
        distance *= 2


@part
def peak_of(place, count):
    """Return the largest absolute number; NaN if any number is not finite."""
    peaks, rest, at, peak = spread(F(0)), spread(F(0)), 0, F(0)
    while at + LANES <= count:
        x = load(place + 4 * at)
        peaks = maximum(peaks, maximum(x, subtract(spread(F(0)), x)))
        rest = add(rest, subtract(x, x))  # NaN if not finite
        at += LANES
    peak, broken = largest(peaks), total(rest)
    for index in range(at, count):
        x = read_float(place + 4 * index)
        peak = max(peak, abs(x))
        broken += x - x
    return peak + broken


@cpu_kernel("source code rows count size levels peaks scratch scratch_stride smallest:d")
def quantise(arguments):
    """Quantise x [rows, count], rotated in blocks of `size`.

    Results: levels [rows, count] uint8 and peaks [rows] float32, the largest number of each row. The largest level is
    127 from the middle. A row's peak is at least `smallest`.
    """
    _, _, source, code, rows, count, size, levels, peaks, scratch, scratch_stride = read_11(arguments)
    smallest, shrunk = F(read_double(arguments + 88)), F(1.0 / math.sqrt(size))
    rotated = scratch + scratch_stride * next_ticket(arguments + 8)
    item = item_bytes(code)
    while True:
        first = ROWS * next_ticket(arguments)
        if first >= rows:
            return
        for row in range(first, min(first + ROWS, rows)):
            widen(source + item * count * row, code, rotated, count, shrunk)
            for at in range(0, count, size):
                rotate_block(rotated + 4 * at, size)
            peak = peak_of(rotated, count)
            if peak < smallest:
                peak = smallest
            write_float(peaks + 4 * row, peak)
            factor, target, at = F(127) / peak, levels + count * row, 0
            if peak != peak:
                factor = F(0)  # undefined levels; the result is NaN
                for index in range(count):
                    write_float(rotated + 4 * index, F(0))
            factors, middles = spread(factor), spread(F(MIDDLE))
            while at + LANES <= count:
                store_bytes(target + at, fma(load(rotated + 4 * at), factors, middles))
                at += LANES
            for index in range(at, count):
                write_byte(target + index, np.uint8(read_float(rotated + 4 * index) * factor + F(MIDDLE)))


@cpu_kernel("sums peaks bias target rows count code")
def make_numbers(arguments):
    """Write target [rows, count] = sums [rows, count] float32 x peaks [rows] + bias [count].

    Rounded after each operation. The address 0 stands for no bias.
    """
    _, _, sums, peaks, bias, target, rows, count, code = read_9(arguments)
    item = item_bytes(code)
    while True:
        first = ROWS * next_ticket(arguments)
        if first >= rows:
            return
        for row in range(first, min(first + ROWS, rows)):
            peak, here, there, at = read_float(peaks + 4 * row), sums + 4 * count * row, target + item * count * row, 0
            factors = spread(peak)
            while at + LANES <= count:
                place = there + item * at
                store_any(place, multiply(load(here + 4 * at), factors), code)
                if bias != 0:
                    store_any(place, add(load_any(place, code), load_any(bias + item * at, code)), code)
                at += LANES
            for index in range(at, count):
                place = there + item * index
                write_any(place, read_float(here + 4 * index) * peak, code)
                if bias != 0:
                    write_any(place, read_any(place, code) + read_any(bias + item * index, code), code)
