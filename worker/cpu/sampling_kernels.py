"""CPU kernels that sample from the whole vocabulary, as `SamplingState.sample_simple` defines it.

They take a few passes over a row. A row that draws uses the same uniform numbers as `draws.py`.
"""

from __future__ import annotations

import math

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import load, spread, spread_one
from kvforge.worker.cpu.vector import (
    LANES,
    add,
    exp,
    first_lane,
    largest,
    maximum,
    next_ticket,
    read_double,
    read_float,
    read_integer,
    read_integer32,
    reading_integers,
    subtract,
    total,
    write_float,
    write_integer,
    write_integer32,
)
from kvforge.worker.random_constants import (
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    SPLITMIX_GAMMA,
    SPLITMIX_MULTIPLIERS,
)
from kvforge.worker.wanted import ADVANCES, AHEAD

FINITE = 1  # as in sampler.py
BLOCK = 1024  # numbers summed in float32 before they are added in float64
HALVINGS_PER_NAT = 1.4426  # a little less than 1 / ln 2, so that no possible winner is skipped
CANNOT_LACK = 38.0  # -log(-log u) is at most 37.43, for u = 1 - 2^-54
F, U = np.float32, np.uint64
MASK_32 = U(0xFFFFFFFF)
MULTIPLIER_0, MULTIPLIER_1 = map(U, PHILOX_MULTIPLIERS)
WEYL_0, WEYL_1 = map(U, PHILOX_WEYL)
GAMMA, MIX_0, MIX_1 = map(U, (SPLITMIX_GAMMA, *SPLITMIX_MULTIPLIERS))
read_8, read_15 = reading_integers(8), reading_integers(15)


@part
def peak_of(row, count):
    """Return a row's largest number, whether all numbers are finite, and the block of its first occurrence."""
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
    """Return the sum of e^(x - peak) over a row, in float64."""
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


@part
def random_state(seed, position):
    """Return the SplitMix64 seed of a request's token; see `draws.uniforms` and `draws.philox`."""
    c0, c1 = U(position) & MASK_32, U(position) >> U(32)
    c2, c3 = U(0), U(0)
    k0, k1 = U(seed) & MASK_32, U(seed) >> U(32)
    for _ in range(PHILOX_ROUNDS):
        first, second = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (second >> U(32)) ^ c1 ^ k0, second & MASK_32, (first >> U(32)) ^ c3 ^ k1, first & MASK_32
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    return c0 | (c1 << U(32))


@part
def random_bits(state, token):
    """Return the 53 bits of a token's uniform number."""
    z = state + U(token + 1) * GAMMA
    z = (z ^ (z >> U(30))) * MIX_0
    z = (z ^ (z >> U(27))) * MIX_1
    return (z ^ (z >> U(31))) >> U(11)


@part
def key_of(bits, score):
    """Return score - log(-log u); the token with the largest key is drawn."""
    return score - math.log(-math.log((float(bits) + 0.5) * 2.0**-53))


@part
def score_of(row, token, temperature):
    """Return a token's score: a float32 logit over the temperature, or a float64 score if the temperature is 0."""
    return float(read_float(row + 4 * token)) / temperature if temperature > 0 else read_double(row + 8 * token)


@part
def drawn(row, count, likeliest, temperature, state):
    """Return the token with the largest key, the first of equals. temperature: see `score_of`.

    Two logarithms per token would take most of the time. A token wins only if -log u <= e^-d, where d is the gap
    between its score and the largest key so far. Since 1 - u never exceeds -log u, comparing bits rules out most
    tokens.
    """
    chosen, best = likeliest, key_of(random_bits(state, likeliest), score_of(row, likeliest, temperature))
    for token in range(count):
        score = score_of(row, token, temperature)
        lacks = best - score
        if lacks > CANNOT_LACK:
            continue
        bits = random_bits(state, token)
        if lacks > 1.0:
            halvings = U(int(lacks * HALVINGS_PER_NAT))
            if (U(1) << U(53)) - bits - U(1) > (U(1) << U(53)) >> halvings:
                continue
        key = key_of(bits, score)
        if key > best or (key == best and token < chosen):
            best, chosen = key, token
    return chosen


@part
def allowed(mask, token):
    """Return whether a mask, 32 tokens to a word, has a token's bit."""
    return (read_integer32(mask + 4 * (token >> 5)) >> (token & 31)) & 1 != 0


@part
def likeliest_allowed(row, count, mask):
    """Return the allowed token with the largest logit, the first of equals."""
    found, peak = 0, F(-math.inf)
    for first in range(0, count, 32):
        if read_integer32(mask + (first >> 3)) != 0:
            for token in range(first, min(first + 32, count)):
                x = read_float(row + 4 * token)
                if x > peak and allowed(mask, token):
                    found, peak = token, x
    return found


@part
def drawn_allowed(row, count, likeliest, temperature, state, mask):
    """Draw as `drawn` does, from the allowed tokens. One function for both would make all draws three times as slow."""
    chosen, best = likeliest, key_of(random_bits(state, likeliest), score_of(row, likeliest, temperature))
    for first in range(0, count, 32):
        if read_integer32(mask + (first >> 3)) == 0:
            continue
        for token in range(first, min(first + 32, count)):
            score = score_of(row, token, temperature)
            lacks = best - score
            if lacks > CANNOT_LACK or not allowed(mask, token):
                continue
            bits = random_bits(state, token)
            if lacks > 1.0:
                halvings = U(int(lacks * HALVINGS_PER_NAT))
                if (U(1) << U(53)) - bits - U(1) > (U(1) << U(53)) >> halvings:
                    continue
            key = key_of(bits, score)
            if key > best or (key == best and token < chosen):
                best, chosen = key, token
    return chosen


@cpu_kernel("scores rows vocab seeds positions tokens")
def draw(arguments):
    """Draw a token from each row. A ticket is a row.

    tokens: [rows] int64, the result. scores: [rows, vocab] float64, after the temperature; -inf excludes a token.
    seeds, positions: [rows] int64, see `draws.uniforms`.
    """
    _, _, scores, rows, vocab, seeds, positions, tokens = read_8(arguments)
    while True:
        row = next_ticket(arguments)
        if row >= rows:
            return
        here, likeliest = scores + 8 * vocab * row, 0
        for token in range(1, vocab):
            if read_double(here + 8 * token) > read_double(here + 8 * likeliest):
                likeliest = token
        state = random_state(read_integer(seeds + 8 * row), read_integer(positions + 8 * row))
        write_integer(tokens + 8 * row, drawn(here, vocab, likeliest, 0.0, state))


@cpu_kernel("logits rows vocab slots wanted values columns seeds generated last_token packed masks words")
def choose(arguments):
    """Sample a token for each row; see `SamplingState.sample_simple`. A ticket is a row. masks: 0 for none."""
    _, _, logits, rows, vocab, slots, wanted, values, columns, seeds, generated, last_token, packed, masks, words = (
        read_15(arguments)
    )
    while True:
        row = next_ticket(arguments)
        if row >= rows:
            return
        here, slot, mask = logits + 4 * vocab * row, read_integer(slots + 8 * row), masks + 4 * words * row
        peak, finite, token = peak_of(here, vocab)
        if masks != 0:
            token = likeliest_allowed(here, vocab, mask)
        while masks == 0 and token < vocab - 1 and read_float(here + 4 * token) != peak:
            token += 1
        temperature = read_double(values + 8 * columns * slot)
        if finite and temperature > 0:
            position = read_integer(generated + 8 * slot) + max(read_integer(wanted + 8 * row) - AHEAD, 0)
            state = random_state(read_integer(seeds + 8 * slot), position)
            if masks != 0:
                token = drawn_allowed(here, vocab, token, temperature, state, mask)
            else:
                token = drawn(here, vocab, token, temperature, state)
        weight = math.log(weight_of(here, vocab, peak))
        write_integer32(packed + 4 * row, np.int32(token))
        write_float(packed + 4 * (rows + row), F(float(read_float(here + 4 * token)) - float(peak) - weight))
        write_integer32(packed + 4 * (2 * rows + row), np.int32(FINITE if finite else 0))
        if finite and read_integer(wanted + 8 * row) == ADVANCES:
            write_integer(last_token + 8 * slot, token)
            write_integer(generated + 8 * slot, read_integer(generated + 8 * slot) + 1)
