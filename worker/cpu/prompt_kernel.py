"""CPU kernel of recurrent states over prompts: a row's tokens one after the other, a part of the state at a time.

A state is a matrix with a line for each number of a key and a column for each number of a value. Columns do not depend
on each other. A ticket is COLUMNS of them, a *strip*, which advances through all tokens of its row and stays in the
first cache. For each token, with its key k, its query q, its value v and its factor f:

    S = decay S + k (f (v - k^T decay S)), or S = decay S + k (f v) for state spaces
    result = q^T S

All numbers are float32. Sums run over the lines in order, so that bits depend on no other row and on no schedule: the
sum with the key of the next token is taken while the state is at hand, and has the bits of one that is taken alone.
"""

from __future__ import annotations

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import load_any, store_any
from kvforge.worker.cpu.vector import (
    FLOAT32,
    LANES,
    fma,
    loading,
    multiply,
    next_ticket,
    read_float,
    read_integer,
    read_integer32,
    reading_integers,
    spreading,
    storing,
    subtract,
)

COLUMNS = 2 * LANES  # of a strip
ROUNDED_EACH = 64  # tokens: a state is rounded to the dtype of its pages at multiples of it; prompt_rows.CHUNK
NUMBERS_PER_US = 12_000  # of a state, throughput of one thread
F = np.float32
read_10 = reading_integers(10)
load, store, spread = loading(COLUMNS, FLOAT32), storing(COLUMNS, FLOAT32), spreading(COLUMNS)


@part
def summed(strip, keys, count):
    """Return the sum of the lines of a strip, each times its number of `keys`."""
    found = spread(F(0))
    for line in range(count):
        found = fma(load(strip + 4 * COLUMNS * line), spread(read_float(keys + 4 * line)), found)
    return found


@part
def advance_known(strip, key, query, next_key, decay, correction, count):
    """Advance a strip with one decay; return the sums with the query and with the next key."""
    found, known, decays = spread(F(0)), spread(F(0)), spread(decay)
    for line in range(count):
        place = strip + 4 * COLUMNS * line
        held = fma(spread(read_float(key + 4 * line)), correction, multiply(load(place), decays))
        store(place, held)
        found = fma(held, spread(read_float(query + 4 * line)), found)
        known = fma(held, spread(read_float(next_key + 4 * line)), known)
    return found, known


@part
def advance_by_line(strip, key, query, next_key, decays, correction, count):
    """Advance a strip with a decay of each line; return the sums with the query and with the next key."""
    found, known = spread(F(0)), spread(F(0))
    for line in range(count):
        place = strip + 4 * COLUMNS * line
        kept = multiply(load(place), spread(read_float(decays + 4 * line)))
        held = fma(spread(read_float(key + 4 * line)), correction, kept)
        store(place, held)
        found = fma(held, spread(read_float(query + 4 * line)), found)
        known = fma(held, spread(read_float(next_key + 4 * line)), known)
    return found, known


@part
def advance_space(strip, key, query, decay, correction, count):
    """Advance a strip of a state space; return the sum with the query."""
    found, decays = spread(F(0)), spread(decay)
    for line in range(count):
        place = strip + 4 * COLUMNS * line
        held = fma(spread(read_float(key + 4 * line)), correction, multiply(load(place), decays))
        store(place, held)
        found = fma(held, spread(read_float(query + 4 * line)), found)
    return found


@part
def round_strip(strip, count, code):
    """Round the numbers of a strip to another dtype. Its first numbers are the space to do it in."""
    for at in range(0, COLUMNS * count, LANES):
        place = strip + 4 * at
        numbers = load_any(place, FLOAT32)
        store_any(place, numbers, code)
        store_any(place, load_any(place, code), FLOAT32)


@cpu_kernel(
    "queries keys known values decays factors target states table rows heads groups key_size width state_code kind"
)
def advance_prompts(arguments):
    """Advance the states of prompt rows by their tokens.

    queries, keys: [tokens, heads / groups, key_size]. known: the keys that the state is multiplied by before a token:
    `keys`, or with decays by line [tokens, heads, key_size], with the decays in them. values, target: [tokens, heads,
    width], a multiple of COLUMNS. decays: [tokens, heads], or by line [tokens, heads, key_size]. factors: [tokens,
    heads]. states: [rows, heads, width / COLUMNS, key_size, COLUMNS]. table: `PromptRows.rows`. state_code: the dtype
    that states are rounded to behind every chunk. kind: 0 for state spaces, 1 for the delta rule with a decay of each
    head, 2 with a decay of each line.
    """
    _, _, queries, keys, known, values, decays, factors, target, states = read_10(arguments)
    table, rows, heads, groups, key_size, width = (
        read_integer(arguments + 80),
        read_integer(arguments + 88),
        read_integer(arguments + 96),
        read_integer(arguments + 104),
        read_integer(arguments + 112),
        read_integer(arguments + 120),
    )
    state_code, kind = read_integer(arguments + 128), read_integer(arguments + 136)
    strips, key_bytes, key_stride = width // COLUMNS, 4 * key_size, 4 * key_size * (heads // groups)
    known_stride = key_stride if kind < 2 else key_bytes * heads
    while True:
        ticket = next_ticket(arguments)
        if ticket >= rows * heads * strips:
            return
        row, head, column = ticket // (heads * strips), ticket // strips % heads, ticket % strips * COLUMNS
        start, first, count = (
            read_integer32(table + 12 * row),
            read_integer32(table + 12 * row + 4),
            read_integer32(table + 12 * row + 8),
        )
        strip, own = states + key_bytes * COLUMNS * ticket, key_bytes * (head // groups)
        seen_from = known + (own if kind < 2 else key_bytes * head)
        seen, is_summed = spread(F(0)), False
        for token in range(first, first + count):
            key, query = keys + own + key_stride * token, queries + own + key_stride * token
            place = heads * token + head
            value = values + 4 * (width * place + column)
            factor = spread(read_float(factors + 4 * place))
            if kind == 0:
                decay = read_float(decays + 4 * place)
                found = advance_space(strip, key, query, decay, multiply(load(value), factor), key_size)
            else:
                if not is_summed:
                    seen = summed(strip, seen_from + known_stride * token, key_size)
                behind = min(token + 1, first + count - 1)
                following = seen_from + known_stride * behind
                if kind == 1:
                    decay = read_float(decays + 4 * place)
                    correction = multiply(subtract(load(value), multiply(seen, spread(decay))), factor)
                    found, seen = advance_known(strip, key, query, following, decay, correction, key_size)
                else:
                    correction = multiply(subtract(load(value), seen), factor)
                    lines = decays + key_bytes * place
                    found, seen = advance_by_line(strip, key, query, following, lines, correction, key_size)
                is_summed = True
            store(target + 4 * (width * place + column), found)
            if state_code != FLOAT32 and (start + token - first + 1) % ROUNDED_EACH == 0:
                round_strip(strip, key_size, state_code)
                is_summed = False
