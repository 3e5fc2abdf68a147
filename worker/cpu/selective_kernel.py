"""CPU kernel of Mamba 1's state spaces: the tokens of each row, with the states in the pages of the pool.

A ticket is some channels of a row, which advance token by token. Sums run in the order of the
numbers, so that a row's bits depend on its own numbers alone.
"""

from __future__ import annotations

import math

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import item_bytes, load_any, read_any, spread, spread_one, store_any, write_any
from kvforge.worker.cpu.vector import (
    FLOAT32,
    LANES,
    exp,
    first_lane,
    fma,
    multiply,
    next_ticket,
    read_integer,
    read_integer32,
    reading_integers,
    total,
)

CHANNELS = 128  # of a ticket
NUMBERS_PER_US = 600  # of a state, throughput of one thread: most of it exponentials
F = np.float32
read_10 = reading_integers(10)


@part
def advance_channel(line, rates, b, c, code, count, step, factor, state_code):
    """Compute S = exp(rates step) S + factor b for a line S of a state; return the sum of S c."""
    size, state_size = item_bytes(code), item_bytes(state_code)
    steps, factors, sums, at = spread(step), spread(factor), spread(F(0)), 0
    while at + LANES <= count:
        place = line + state_size * at
        kept = exp(multiply(load_any(rates + 4 * at, FLOAT32), steps))
        held = fma(load_any(b + size * at, code), factors, multiply(load_any(place, state_code), kept))
        store_any(place, held, state_code)
        sums = fma(held, load_any(c + size * at, code), sums)
        at += LANES
    found = total(sums)
    for index in range(at, count):
        place = line + state_size * index
        kept_one = first_lane(exp(spread_one(read_any(rates + 4 * index, FLOAT32) * step)))
        number = read_any(place, state_code) * kept_one + read_any(b + size * index, code) * factor
        write_any(place, number, state_code)
        found += number * read_any(c + size * index, code)
    return found


@cpu_kernel(
    "x x_stride gate gate_stride steps steps_stride b b_stride c c_stride rates biases skips target rows channels "
    "state_size code memory page_bytes pages page_count lines state_code table"
)
def advance_selective(arguments):
    """Advance the states of each row by its tokens; see `StateOperations.advance_selective`.

    Strides: bytes from one row to the next. rates: [channels, state_size] float32. biases, skips: [channels] float32.
    target: [tokens, channels] in the dtype of the inputs. pages: [rows, page_count] int32. lines: see StateRows.
    table: `PromptRows.rows`, of prompts; 0: each row has one token behind a state.
    """
    _, _, x, x_stride, gate, gate_stride, steps, steps_stride, b, b_stride = read_10(arguments)
    c, c_stride, rates, biases, skips, target, rows, channels, state_size, code = read_10(arguments + 80)
    memory, page_bytes, pages, page_count, lines, state_code = (
        read_integer(arguments + 160),
        read_integer(arguments + 168),
        read_integer(arguments + 176),
        read_integer(arguments + 184),
        read_integer(arguments + 192),
        read_integer(arguments + 200),
    )
    table = read_integer(arguments + 208)
    size, state_bytes, tickets = item_bytes(code), item_bytes(state_code), (channels + CHANNELS - 1) // CHANNELS
    while True:
        ticket = next_ticket(arguments)
        if ticket >= rows * tickets:
            return
        row, first = ticket // tickets, ticket % tickets * CHANNELS
        own, start, begin, count = pages + 4 * page_count * row, 1, row, 1
        if table != 0:
            entry = table + 12 * row
            start, begin, count = read_integer32(entry), read_integer32(entry + 4), read_integer32(entry + 8)
        for channel in range(first, min(first + CHANNELS, channels)):
            page = read_integer32(own + 4 * read_integer32(lines + 8 * channel))
            line = memory + page_bytes * page + read_integer32(lines + 8 * channel + 4)
            bias, skip = read_any(biases + 4 * channel, FLOAT32), read_any(skips + 4 * channel, FLOAT32)
            if start == 0 and count > 0:
                for index in range(state_size):
                    write_any(line + state_bytes * index, F(0), state_code)
            for token in range(begin, begin + count):
                time = read_any(steps + steps_stride * token + size * channel, code) + bias
                step = F(time) if time > F(20) else F(math.log1p(math.exp(float(time))))
                number = read_any(x + x_stride * token + size * channel, code)
                found = advance_channel(
                    line,
                    rates + 4 * state_size * channel,
                    b + b_stride * token,
                    c + c_stride * token,
                    code,
                    state_size,
                    step,
                    step * number,
                    state_code,
                )
                found += skip * number
                given = read_any(gate + gate_stride * token + size * channel, code)
                opened = given / (F(1) + first_lane(exp(spread_one(-given))))
                write_any(target + size * (channels * token + channel), found * opened, code)
