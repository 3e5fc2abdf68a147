"""CPU kernels of the gated delta rule: one token of each row, and what comes before and behind the states of prompts.

A ticket of the first kernel is a head of a row, with a state [key_size, value_size]. Its columns are advanced a few
vectors at a time, twice over all lines: to multiply by the key, then to add the correction and multiply by the query.
The state is written once. Sums run over the lines in order, so that a head's bits depend on its own numbers alone.
Each head has a decay, or each line of its state (Kimi delta attention).
"""

from __future__ import annotations

import math

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import item_bytes, load_any, memory_of, narrow, read_any, spread, widen, write_any
from kvforge.worker.cpu.vector import (
    FLOAT32,
    LANES,
    add,
    divide,
    exp,
    fma,
    maximum,
    multiply,
    next_ticket,
    read_double,
    read_float,
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
SUM_MIN = 1e-6  # added to the sum of squares of a query or a key
F = np.float32
ATANH = tuple(F(1 / odd) for odd in range(15, 0, -2))  # coefficients of its series, the highest first
read_10 = reading_integers(10)


@part
def inverse_length(row, code, count):
    """Return 1 / the length of a vector."""
    size, squares, at = item_bytes(code), spread(F(0)), 0
    while at + LANES <= count:
        x = load_any(row + size * at, code)
        squares = fma(x, x, squares)
        at += LANES
    summed = total(squares)
    for index in range(at, count):
        x = read_any(row + size * index, code)
        summed += x * x
    return F(1) / F(math.sqrt(summed + F(SUM_MIN)))


def advancing(lanes, by_line):
    """Make the procedure that advances `lanes` columns of a head's state.

    by_line: whether its argument `decay` is the address of the decays of the lines, not the decay of all of them.
    """
    (load, store), spread_out = memory_of(lanes), spreading(lanes)

    if by_line:

        @part
        def prepared(decay):
            return decay

        @part
        def decay_of(decays, line):
            return spread_out(read_float(decays + 4 * line))

    else:

        @part
        def prepared(decay):
            return spread_out(decay)

        @part
        def decay_of(decays, _line):
            return decays

    @part
    def line_at(base, lines, memory, page_bytes, pages, line, line_bytes, offset):
        if base != 0:
            return base + line_bytes * line + offset
        where = lines + 8 * line
        page = read_integer32(pages + 4 * read_integer32(where))
        return memory + page_bytes * page + read_integer32(where + 4) + offset

    @part
    def advance(
        query, key, value, target, code, query_scale, key_scale, decay, beta, count, offset,
        base, lines, memory, page_bytes, pages, line_bytes, state_code,
    ):  # fmt: skip
        size, decays = item_bytes(code), prepared(decay)
        seen = spread_out(F(0))
        for line in range(count):
            at = line_at(base, lines, memory, page_bytes, pages, line, line_bytes, offset)
            factor = spread_out(read_any(key + size * line, code) * key_scale)
            seen = fma(multiply(load(at, state_code), decay_of(decays, line)), factor, seen)
        correction = multiply(subtract(load(value, code), seen), spread_out(beta))
        found = spread_out(F(0))
        for line in range(count):
            at = line_at(base, lines, memory, page_bytes, pages, line, line_bytes, offset)
            factor = spread_out(read_any(key + size * line, code) * key_scale)
            state = fma(factor, correction, multiply(load(at, state_code), decay_of(decays, line)))
            store(at, state, state_code)
            found = fma(state, spread_out(read_any(query + size * line, code) * query_scale), found)
        store(target, found, code)

    return advance


def gating(lanes, has_sigmoid):
    """Make the procedure that normalises and gates `lanes` numbers of a head's result in place."""
    (load, store), spread_out = memory_of(lanes), spreading(lanes)

    @part
    def gate(target, given, weight, code, scale):
        store(target, multiply(load(target, code), spread_out(scale)), code)
        store(target, multiply(load(weight, code), load(target, code)), code)
        x = load(given, code)
        silu = divide(x, add(spread_out(F(1)), exp(subtract(spread_out(F(0)), x))))
        store(target, multiply(load(target, code), silu), code)

    @part
    def open_gate(target, given, weight, code, scale):
        normed = multiply(load(weight, code), multiply(load(target, code), spread_out(scale)))
        opened = add(spread_out(F(1)), exp(subtract(spread_out(F(0)), load(given, code))))
        store(target, divide(normed, opened), code)

    return open_gate if has_sigmoid else gate


def advancing_head(by_line):
    """Make the procedure that advances all columns of a head's state. by_line: see `advancing`."""
    advance_32, advance_16, advance_1 = (advancing(lanes, by_line) for lanes in (2 * LANES, LANES, 1))

    @part
    def advance_head(
        query, key, value, target, code, query_scale, key_scale, decay, beta, count, value_size,
        base, lines, memory, page_bytes, pages, line_bytes, state_code,
    ):  # fmt: skip
        size, state_size, column = item_bytes(code), item_bytes(state_code), 0
        while column < value_size:
            left = value_size - column
            if left >= 2 * LANES:
                advance_32(
                    query, key, value + size * column, target + size * column, code, query_scale, key_scale, decay,
                    beta, count, state_size * column, base, lines, memory, page_bytes, pages, line_bytes, state_code,
                )  # fmt: skip
                column += 2 * LANES
            elif left >= LANES:
                advance_16(
                    query, key, value + size * column, target + size * column, code, query_scale, key_scale, decay,
                    beta, count, state_size * column, base, lines, memory, page_bytes, pages, line_bytes, state_code,
                )  # fmt: skip
                column += LANES
            else:
                advance_1(
                    query, key, value + size * column, target + size * column, code, query_scale, key_scale, decay,
                    beta, count, state_size * column, base, lines, memory, page_bytes, pages, line_bytes, state_code,
                )  # fmt: skip
                column += 1

    return advance_head


def deciding(lanes):
    """Make the procedure that computes the decays of `lanes` lines, float32."""
    (load, store), spread_out = memory_of(lanes), spreading(lanes)

    @part
    def decide(target, decay, biases, code, rate):
        zero, two = spread_out(F(0)), spread_out(F(2))
        x = add(load(decay, code), load(biases, FLOAT32))
        # log(1 + e^x) = max(x, 0) + 2 atanh(s), with s = t / (2 + t) of at most a third, and t = e^-|x|.
        t = exp(subtract(zero, maximum(x, subtract(zero, x))))
        s = divide(t, add(two, t))
        square, series = multiply(s, s), zero
        for coefficient in ATANH:
            series = fma(series, square, spread_out(coefficient))
        softplus = fma(multiply(two, s), series, maximum(x, zero))
        store(target, exp(multiply(spread_out(rate), softplus)), FLOAT32)

    return decide


advance_head, advance_head_by_line = advancing_head(False), advancing_head(True)
decide_16, decide_1 = deciding(LANES), deciding(1)
gate_16, gate_1 = gating(LANES, False), gating(1, False)
open_16, open_1 = gating(LANES, True), gating(1, True)


@part
def write_decays(target, decay, biases, code, rate, count):
    """Write the decays of a head's lines, target [count] float32."""
    size, at = item_bytes(code), 0
    while at + LANES <= count:
        decide_16(target + 4 * at, decay + size * at, biases + 4 * at, code, rate)
        at += LANES
    for index in range(at, count):
        decide_1(target + 4 * index, decay + size * index, biases + 4 * index, code, rate)


@part
def decay_of_head(decay, bias, rate, code):
    """Return the decay of a head with one."""
    x = read_any(decay, code) + read_any(bias, FLOAT32)
    softplus = F(x) if x > F(20) else F(math.log1p(math.exp(float(x))))
    return F(math.exp(float(rate * softplus)))


@part
def gated_norm(target, given, weight, code, count, epsilon, sigmoid):
    """Normalise a head's result, multiply it by the weight and by SiLU of the gate, or by its sigmoid."""
    size, squares, at = item_bytes(code), spread(F(0)), 0
    while at + LANES <= count:
        x = load_any(target + size * at, code)
        squares = fma(x, x, squares)
        at += LANES
    summed = total(squares)
    for index in range(at, count):
        x = read_any(target + size * index, code)
        summed += x * x
    scale, at = F(1) / F(math.sqrt(summed / F(count) + epsilon)), 0
    while at + LANES <= count:
        if sigmoid != 0:
            open_16(target + size * at, given + size * at, weight + size * at, code, scale)
        else:
            gate_16(target + size * at, given + size * at, weight + size * at, code, scale)
        at += LANES
    for index in range(at, count):
        if sigmoid != 0:
            open_1(target + size * index, given + size * index, weight + size * index, code, scale)
        else:
            gate_1(target + size * index, given + size * index, weight + size * index, code, scale)


@cpu_kernel(
    "mixed stride gate gate_stride beta beta_stride decay decay_stride rates biases weight target rows heads groups "
    "key_size value_size code memory page_bytes pages page_count lines whole state_code epsilon:d decays sigmoid"
)
def advance_delta(arguments):
    """Advance the state of each row and head by one token; see `StateOperations.advance_delta`.

    Strides: bytes from one row to the next. rates, biases: [heads] float32. groups: heads with the same query and key.
    pages: [rows, page_count] int32. lines: see StateRows. whole: whether the lines of each head lie together.
    decays: [rows, heads, key_size] float32, room for the decays of lines, if each has one; 0: each head has one.
    sigmoid: see `GatedDelta.has_sigmoid`.
    """
    _, _, mixed, stride, gate, gate_stride, beta, beta_stride, decay, decay_stride = read_10(arguments)
    rates, biases, weight = read_integer(arguments + 80), read_integer(arguments + 88), read_integer(arguments + 96)
    target, rows, heads = read_integer(arguments + 104), read_integer(arguments + 112), read_integer(arguments + 120)
    groups, key_size, value_size = (
        read_integer(arguments + 128),
        read_integer(arguments + 136),
        read_integer(arguments + 144),
    )
    code, memory, page_bytes = (
        read_integer(arguments + 152),
        read_integer(arguments + 160),
        read_integer(arguments + 168),
    )
    pages, page_count, lines = (
        read_integer(arguments + 176),
        read_integer(arguments + 184),
        read_integer(arguments + 192),
    )
    whole, state_code = read_integer(arguments + 200), read_integer(arguments + 208)
    epsilon, decays, sigmoid = (
        F(read_double(arguments + 216)),
        read_integer(arguments + 224),
        read_integer(arguments + 232),
    )
    size, state_size, keys = item_bytes(code), item_bytes(state_code), heads // groups
    line_bytes = state_size * value_size
    while True:
        ticket = next_ticket(arguments)
        if ticket >= rows * heads:
            return
        row, head = ticket // heads, ticket % heads
        own, place = pages + 4 * page_count * row, target + size * value_size * ticket
        query = mixed + stride * row + size * key_size * (head // groups)
        key = query + size * key_size * keys
        value = mixed + stride * row + size * (2 * key_size * keys + value_size * head)
        query_scale = inverse_length(query, code, key_size) / F(math.sqrt(key_size))
        key_scale = inverse_length(key, code, key_size)
        x = read_any(beta + beta_stride * row + size * head, code)
        write_any(place, F(1.0 / (1.0 + math.exp(-x))), code)
        factor = read_any(place, code)
        rate = read_any(rates + 4 * head, FLOAT32)
        first, base = lines + 8 * key_size * head, 0
        if whole != 0:
            page = read_integer32(own + 4 * read_integer32(first))
            base = memory + page_bytes * page + read_integer32(first + 4)
        if decays != 0:
            kept_by_line, biased = decays + 4 * key_size * ticket, biases + 4 * key_size * head
            write_decays(
                kept_by_line, decay + decay_stride * row + size * key_size * head, biased, code, rate, key_size
            )
            advance_head_by_line(
                query, key, value, place, code, query_scale, key_scale, kept_by_line, factor, key_size, value_size,
                base, first, memory, page_bytes, own, line_bytes, state_code,
            )  # fmt: skip
        else:
            kept = decay_of_head(decay + decay_stride * row + size * head, biases + 4 * head, rate, code)
            advance_head(
                query, key, value, place, code, query_scale, key_scale, kept, factor, key_size, value_size,
                base, first, memory, page_bytes, own, line_bytes, state_code,
            )  # fmt: skip
        given = gate + gate_stride * row + size * value_size * head
        gated_norm(place, given, weight, code, value_size, epsilon, sigmoid)


@cpu_kernel(
    "mixed stride beta beta_stride decay decay_stride rates biases tokens heads groups key_size value_size width code "
    "queries keys known values decays factors"
)
def prepare_delta(arguments):
    """Compute what `prompt_kernel.advance_prompts` takes, from the inputs of `tokens` tokens.

    A ticket is a token. known: 0 where each head has one decay.
    """
    _, _, mixed, stride, beta, beta_stride, decay, decay_stride, rates, biases = read_10(arguments)
    tokens, heads, groups, key_size, value_size, width, code, queries, keys, known = read_10(arguments + 80)
    values, decays, factors = (
        read_integer(arguments + 160),
        read_integer(arguments + 168),
        read_integer(arguments + 176),
    )
    size, key_heads = item_bytes(code), heads // groups
    while True:
        token = next_ticket(arguments)
        if token >= tokens:
            return
        row = mixed + stride * token
        for head in range(key_heads):
            query = row + size * key_size * head
            key, place = query + size * key_size * key_heads, 4 * key_size * (key_heads * token + head)
            scale = inverse_length(query, code, key_size) / F(math.sqrt(key_size))
            widen(query, code, queries + place, key_size, scale)
            widen(key, code, keys + place, key_size, inverse_length(key, code, key_size))
        for head in range(heads):
            place = heads * token + head
            value = row + size * (2 * key_size * key_heads + value_size * head)
            widen(value, code, values + 4 * width * place, value_size, F(1))
            x, factor = read_any(beta + beta_stride * token + size * head, code), factors + 4 * place
            write_any(factor, F(1.0 / (1.0 + math.exp(-x))), code)
            write_float(factor, read_any(factor, code))
            rate = read_any(rates + 4 * head, FLOAT32)
            own = decay + decay_stride * token
            if known == 0:
                write_float(decays + 4 * place, decay_of_head(own + size * head, biases + 4 * head, rate, code))
            else:
                lines = decays + 4 * key_size * place
                write_decays(lines, own + size * key_size * head, biases + 4 * key_size * head, code, rate, key_size)
                key = keys + 4 * key_size * (key_heads * token + head // groups)
                for line in range(0, 4 * key_size, 4):
                    number = read_any(key + line, FLOAT32) * read_any(lines + line, FLOAT32)
                    write_float(known + 4 * key_size * place + line, number)


@cpu_kernel("source target gate gate_stride weight tokens heads value_size width code sigmoid epsilon:d")
def finish_delta(arguments):
    """Normalise and gate results of `prompt_kernel.advance_prompts`, source [tokens, heads, width] float32.

    A ticket is a token. target: [tokens, heads x value_size].
    """
    _, _, source, target, gate, gate_stride, weight, tokens, heads, value_size = read_10(arguments)
    width, code, sigmoid = read_integer(arguments + 80), read_integer(arguments + 88), read_integer(arguments + 96)
    epsilon, size = F(read_double(arguments + 104)), item_bytes(code)
    while True:
        token = next_ticket(arguments)
        if token >= tokens:
            return
        for head in range(heads):
            place = target + size * value_size * (heads * token + head)
            narrow(source + 4 * width * (heads * token + head), place, code, value_size, F(1))
            given = gate + gate_stride * token + size * value_size * head
            gated_norm(place, given, weight, code, value_size, epsilon, sigmoid)
