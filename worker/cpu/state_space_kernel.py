"""CPU kernels of Mamba 2's state spaces: one token of each row, and what comes before and behind the states of prompts.

A ticket of the first is a head of a row, with a state [head_size, state_size]: each line is read and written once.
The second normalises the results of a group of heads. Sums run in the order of the numbers, so that a row's bits
depend on its own numbers alone.
"""

from __future__ import annotations

import math

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import (
    item_bytes,
    load_any,
    memory_of,
    read_any,
    spread,
    spread_one,
    store_any,
    widen,
    write_any,
)
from kvforge.worker.cpu.vector import (
    FLOAT32,
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
    read_integer32,
    reading_integers,
    spreading,
    subtract,
    total,
    write_float,
)

NUMBERS_PER_US = 3_000  # of a state, throughput of one thread
INPUTS_PER_US = 1_000  # numbers of a prompt, before and behind its states
F = np.float32
read_10 = reading_integers(10)


@part
def advance_line(line, b, c, code, count, kept, factor, state_code):
    """Compute S = kept S + factor b for a line S of a state; return the sum of S c."""
    size, state_size = item_bytes(code), item_bytes(state_code)
    decays, factors, sums, at = spread(kept), spread(factor), spread(F(0)), 0
    while at + LANES <= count:
        place = line + state_size * at
        held = fma(load_any(b + size * at, code), factors, multiply(load_any(place, state_code), decays))
        store_any(place, held, state_code)
        sums = fma(held, load_any(c + size * at, code), sums)
        at += LANES
    found = total(sums)
    for index in range(at, count):
        place = line + state_size * index
        number = read_any(place, state_code) * kept + read_any(b + size * index, code) * factor
        write_any(place, number, state_code)
        found += number * read_any(c + size * index, code)
    return found


@cpu_kernel(
    "mixed stride gate gate_stride steps steps_stride rates biases skips target rounded rows heads groups head_size "
    "state_size code memory page_bytes pages page_count lines whole state_code"
)
def advance_state_space(arguments):
    """Advance the state of each row and head by one token; see `StateOperations.advance_state_space`.

    Strides: bytes from one row to the next. rates, biases, skips: [heads] float32. target: [rows, heads x head_size]
    float32, y silu(gate). rounded: the same numbers in the dtype of the inputs, space to round y in. pages: [rows,
    page_count] int32. lines: see StateRows. whole: whether the lines of each head lie together.
    """
    _, _, mixed, stride, gate, gate_stride, steps, steps_stride, rates, biases = read_10(arguments)
    skips, target, rounded, rows, heads, groups, head_size, state_size, code, memory = read_10(arguments + 80)
    page_bytes, pages, page_count = (
        read_integer(arguments + 160),
        read_integer(arguments + 168),
        read_integer(arguments + 176),
    )
    lines, whole, state_code = (
        read_integer(arguments + 184),
        read_integer(arguments + 192),
        read_integer(arguments + 200),
    )
    size, line_bytes = item_bytes(code), item_bytes(state_code) * state_size
    while True:
        ticket = next_ticket(arguments)
        if ticket >= rows * heads:
            return
        row, head = ticket // heads, ticket % heads
        own, first = pages + 4 * page_count * row, lines + 8 * head_size * head
        x = mixed + stride * row + size * head_size * head
        b = mixed + stride * row + size * (head_size * heads + state_size * (head // (heads // groups)))
        c = b + size * state_size * groups
        time = read_any(steps + steps_stride * row + size * head, code) + read_any(biases + 4 * head, FLOAT32)
        step = F(time) if time > F(20) else F(math.log1p(math.exp(float(time))))
        kept = F(math.exp(float(read_any(rates + 4 * head, FLOAT32) * step)))
        skip, base = read_any(skips + 4 * head, FLOAT32), 0
        if whole != 0:
            page = read_integer32(own + 4 * read_integer32(first))
            base = memory + page_bytes * page + read_integer32(first + 4)
        for index in range(head_size):
            if whole != 0:
                line = base + line_bytes * index
            else:
                page = read_integer32(own + 4 * read_integer32(first + 8 * index))
                line = memory + page_bytes * page + read_integer32(first + 8 * index + 4)
            number = read_any(x + size * index, code)
            found = advance_line(line, b, c, code, state_size, kept, step * number, state_code) + skip * number
            place = head_size * ticket + index
            write_any(rounded + size * place, found, code)
            given = read_any(gate + gate_stride * row + size * (head_size * head + index), code)
            opened = given / (F(1) + first_lane(exp(spread_one(-given))))
            write_any(target + 4 * place, read_any(rounded + size * place, code) * opened, FLOAT32)


@cpu_kernel("source target weight rows groups count code epsilon:d")
def group_norm(arguments):
    """Normalise each group of a row, `count` numbers, by its root mean square, and multiply it by its weight.

    source: [rows, groups x count] float32. target, weight: in another dtype. They must not overlap.
    """
    _, _, source, target, weight, rows, groups, count, code, _ = read_10(arguments)
    epsilon, size = F(read_double(arguments + 72)), item_bytes(code)
    while True:
        ticket = next_ticket(arguments)
        if ticket >= rows * groups:
            return
        given, place = source + 4 * count * ticket, target + size * count * ticket
        factors, squares, at = weight + size * count * (ticket % groups), spread(F(0)), 0
        while at + LANES <= count:
            x = load_any(given + 4 * at, FLOAT32)
            squares = fma(x, x, squares)
            at += LANES
        summed = total(squares)
        for index in range(at, count):
            x = read_any(given + 4 * index, FLOAT32)
            summed += x * x
        scale, at = F(1) / F(math.sqrt(summed / F(count) + epsilon)), 0
        while at + LANES <= count:
            to = place + size * at
            store_any(to, multiply(load_any(given + 4 * at, FLOAT32), spread(scale)), code)
            store_any(to, multiply(load_any(factors + size * at, code), load_any(to, code)), code)
            at += LANES
        for index in range(at, count):
            to = place + size * index
            write_any(to, read_any(given + 4 * index, FLOAT32) * scale, code)
            write_any(to, read_any(factors + size * index, code) * read_any(to, code), code)


@cpu_kernel(
    "mixed stride steps steps_stride rates biases tokens heads groups head_size state_size width code queries keys "
    "values decays factors least:d most:d"
)
def prepare_spaces(arguments):
    """Compute what `prompt_kernel.advance_prompts` takes, from the inputs of `tokens` tokens.

    A ticket is a token. Queries are C, keys B, values x, and factors time steps between `least` and `most`.
    """
    _, _, mixed, stride, steps, steps_stride, rates, biases, tokens, heads = read_10(arguments)
    groups, head_size, state_size, width, code, queries, keys, values, decays, factors = read_10(arguments + 80)
    least, most, size = F(read_double(arguments + 160)), F(read_double(arguments + 168)), item_bytes(code)
    while True:
        token = next_ticket(arguments)
        if token >= tokens:
            return
        x = mixed + stride * token
        b = x + size * head_size * heads
        widen(b, code, keys + 4 * groups * state_size * token, groups * state_size, F(1))
        widen(
            b + size * groups * state_size, code, queries + 4 * groups * state_size * token, groups * state_size, F(1)
        )
        for head in range(heads):
            place = heads * token + head
            widen(x + size * head_size * head, code, values + 4 * width * place, head_size, F(1))
            time = read_any(steps + steps_stride * token + size * head, code) + read_any(biases + 4 * head, FLOAT32)
            step = F(time) if time > F(20) else F(math.log1p(math.exp(float(time))))
            step = min(max(step, least), most)
            write_float(factors + 4 * place, step)
            rate = read_any(rates + 4 * head, FLOAT32)
            write_float(decays + 4 * place, F(math.exp(float(rate * step))))


def opening(lanes):
    """Make the procedure that adds the skip to `lanes` results, rounds and gates them."""
    (load, store), spread_out = memory_of(lanes), spreading(lanes)

    @part
    def open_some(source, target, x, given, skip, code):
        found = add(load(source, FLOAT32), multiply(spread_out(skip), load(x, code)))
        store(target, found, code)
        gate = load(given, code)
        silu = divide(gate, add(spread_out(F(1)), exp(subtract(spread_out(F(0)), gate))))
        store(target, multiply(load(target, code), silu), FLOAT32)

    return open_some


open_16, open_1 = opening(LANES), opening(1)


@cpu_kernel("source target mixed stride gate gate_stride skips tokens heads head_size width code")
def finish_spaces(arguments):
    """Add the skips to results of `prompt_kernel.advance_prompts`, and gate them.

    A ticket is a token. source: [tokens, heads, width] float32. target: [tokens, heads x head_size] float32.
    """
    _, _, source, target, mixed, stride, gate, gate_stride, skips, tokens = read_10(arguments)
    heads, head_size, width, code = (
        read_integer(arguments + 80),
        read_integer(arguments + 88),
        read_integer(arguments + 96),
        read_integer(arguments + 104),
    )
    size = item_bytes(code)
    while True:
        token = next_ticket(arguments)
        if token >= tokens:
            return
        for head in range(heads):
            found, place = source + 4 * width * (heads * token + head), 4 * head_size * (heads * token + head)
            x, given = mixed + stride * token, gate + gate_stride * token
            skip, first, at = read_any(skips + 4 * head, FLOAT32), size * head_size * head, 0
            while at + LANES <= head_size:
                own = first + size * at
                open_16(found + 4 * at, target + place + 4 * at, x + own, given + own, skip, code)
                at += LANES
            for index in range(at, head_size):
                own = first + size * index
                open_1(found + 4 * index, target + place + 4 * index, x + own, given + own, skip, code)
