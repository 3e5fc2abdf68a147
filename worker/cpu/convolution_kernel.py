"""CPU kernel of a short causal convolution: one token of each row, with the states in the pages of the pool.

A ticket is a part of a row's channels. A channel's sum runs over its taps in order, rounded where plain torch rounds
(see plain.py).
"""

from __future__ import annotations

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel
from kvforge.worker.cpu.rows import item_bytes, read_any, spread_one, write_any
from kvforge.worker.cpu.vector import (
    exp,
    first_lane,
    next_ticket,
    read_integer,
    read_integer32,
    reading_integers,
)

CHANNELS = 512  # per ticket
CHANNELS_PER_US = 150  # throughput of one thread
F = np.float32
read_10 = reading_integers(10)


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
        own = pages + 4 * page_count * row
        for channel in range(first, min(first + CHANNELS, channels)):
            given, place = x + stride * row + size * channel, target + size * (channels * row + channel)
            newest = read_any(given, code)
            if gated != 0:
                write_any(place, newest * read_any(given + 2 * size * channels, code), code)
                newest = read_any(place, code)
            where = lines + 8 * channel
            page = read_integer32(own + 4 * read_integer32(where))
            line, factors = memory + page_bytes * page + read_integer32(where + 4), weight + size * taps * channel
            total = F(0)
            for tap in range(taps - 1):
                number = read_any(line + state_size * (tap + 1), state_code)
                write_any(line + state_size * tap, number, state_code)
                total += read_any(factors + size * tap, code) * number
            write_any(line + state_size * (taps - 1), newest, state_code)
            total += read_any(factors + size * (taps - 1), code) * newest
            if bias != 0:
                total += read_any(bias + size * channel, code)
            write_any(place, total, code)
            if silu != 0:
                total = read_any(place, code)
                write_any(place, total / (F(1) + first_lane(exp(spread_one(-total)))), code)
            if gated != 0:
                write_any(place, read_any(place, code) * read_any(given + size * channels, code), code)
