"""Choosing the likeliest token on the CPU: what `SamplingState.sample_simple` does, in two passes over a row."""

from __future__ import annotations

import math

import numpy as np

from worker.device.host_kernel import host_kernel, part
from worker.device.rows import load, spread, spread_one
from worker.device.vector import (
    LANES,
    add,
    exp,
    first_lane,
    largest,
    maximum,
    read_float,
    read_integer,
    reading_integers,
    subtract,
    take_ticket,
    total,
    write_float,
    write_integer,
    write_integer32,
)

FINITE = 1  # as sampler.py has it
BLOCK = 1024  # numbers that are summed in float32 before they are added up in float64
F = np.float32
read_sizes = reading_integers(10)


@part
def peak_of(row, count):
    """The largest of a row's numbers, whether all are finite, and the block that has the first of the largest ones."""
    peak, block, rest = F(-math.inf), 0, F(0)
    for first in range(0, count, BLOCK):
        end, at = min(first + BLOCK, count), first
        highest, differences = F(-math.inf), spread(F(0))
        peaks = spread(F(-math.inf))
        while at + LANES <= end:
            x = load(row + 4 * at)
            peaks = maximum(peaks, x)
            differences = add(differences, subtract(x, x))  # NaN for what is not finite
            at += LANES
        highest = largest(peaks)
        rest += total(differences)
        for index in range(at, end):
            x = read_float(row + 4 * index)
            highest = max(highest, x)
            rest += x - x
        if highest > peak:
            peak, block = highest, first
    return peak, rest == F(0), block


@part
def weight_of(row, count, peak):
    """The sum of e^(x - peak) of a row's numbers, in float64."""
    summed, peaks = 0.0, spread(peak)
    for first in range(0, count, BLOCK):
        end, at, sums = min(first + BLOCK, count), first, spread(F(0))
        while at + LANES <= end:
            sums = add(sums, exp(subtract(load(row + 4 * at), peaks)))
            at += LANES
        summed += total(sums)
        for index in range(at, end):
            summed += first_lane(exp(spread_one(read_float(row + 4 * index) - peak)))
    return summed


@host_kernel("8q")
def choose(arguments):
    """See `SamplingState.sample_simple`, which lays out the arguments. A ticket is a row."""
    _, _, logits, rows, vocab, slots, wanted, last_token, generated, packed = read_sizes(arguments)
    while True:
        row = take_ticket(arguments)
        if row >= rows:
            return
        here = logits + 4 * vocab * row
        peak, finite, token = peak_of(here, vocab)
        while token < vocab - 1 and read_float(here + 4 * token) != peak:
            token += 1
        write_integer32(packed + 4 * row, np.int32(token))
        write_float(packed + 4 * (rows + row), F(-math.log(weight_of(here, vocab, peak))))
        write_integer32(packed + 4 * (2 * rows + row), np.int32(FINITE if finite else 0))
        if finite and read_integer(wanted + 8 * row) != 0:
            slot = read_integer(slots + 8 * row)
            write_integer(last_token + 8 * slot, token)
            write_integer(generated + 8 * slot, read_integer(generated + 8 * slot) + 1)
