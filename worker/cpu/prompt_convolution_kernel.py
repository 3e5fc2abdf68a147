"""CPU kernel of a short causal convolution over prompts: all tokens of each row.

A ticket is TOKENS of a row. Each token's inputs are those of the tokens before it, or of the state before the row. A
sum runs over the taps in order, rounded where plain torch rounds (see prompt_reference.py), so that a token's bits
depend on its own row alone.
"""

from __future__ import annotations

import numpy as np

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import item_bytes, memory_of
from kvforge.worker.cpu.vector import (
    FLOAT32,
    LANES,
    add,
    divide,
    exp,
    multiply,
    next_ticket,
    read_integer,
    read_integer32,
    reading_integers,
    spreading,
    subtract,
)

TOKENS = 16  # of a ticket
CHANNELS_PER_US = 2_000  # throughput of one thread
ROUNDED_EACH = 64  # tokens: a state is rounded to the dtype of its pages at multiples of it; prompt_rows.CHUNK
F = np.float32
read_10 = reading_integers(10)


def convolving(lanes):
    """Make the procedures convolve(...), of `lanes` channels of one token, and keep(...), of its inputs."""
    (load, store), spread = memory_of(lanes), spreading(lanes)

    @part
    def rounded(place, vector, code):
        """Round a vector to a dtype. place: the memory to do it in."""
        store(place, vector, code)
        return load(place, code)

    @part
    def input_of(token, x, stride, channels, channel, code, gated, before, taps, place):
        """Return the inputs of a row's token; negative: of the state before the row."""
        if token < 0:
            return load(before + 4 * (channels * (taps + token) + channel), FLOAT32)
        size = item_bytes(code)
        given = x + stride * token + size * channel
        if gated == 0:
            return load(given, code)
        return rounded(place, multiply(load(given, code), load(given + 2 * size * channels, code)), code)

    @part
    def convolve(
        token, start, x, stride, target, factors, bias, channels, channel, taps, code, state_code, gated, silu, before
    ):  # fmt: skip
        size = item_bytes(code)
        place = target + size * (channels * token + channel)
        chunk = (start + token) // ROUNDED_EACH
        summed = spread(F(0))
        for tap in range(taps):
            other = token - taps + 1 + tap
            numbers = input_of(other, x, stride, channels, channel, code, gated, before, taps, place)
            if state_code != FLOAT32 and other >= 0 and (start + other) // ROUNDED_EACH != chunk:
                numbers = rounded(place, numbers, state_code)
            summed = add(summed, multiply(load(factors + 4 * (channels * tap + channel), FLOAT32), numbers))
        if bias != 0:
            summed = add(summed, load(bias + 4 * channel, FLOAT32))
        summed = rounded(place, summed, code)
        if silu != 0:
            summed = divide(summed, add(spread(F(1)), exp(subtract(spread(F(0)), summed))))
            summed = rounded(place, summed, code)
        if gated != 0:
            gate = load(x + stride * token + size * (channels + channel), code)
            summed = multiply(summed, gate)
        store(place, summed, code)

    @part
    def keep(token, x, stride, channels, channel, taps, code, gated, before, after, tap):
        place = after + 4 * (channels * tap + channel)
        store(place, input_of(token, x, stride, channels, channel, code, gated, before, taps, place), FLOAT32)

    return convolve, keep


convolve_16, keep_16 = convolving(LANES)
convolve_1, keep_1 = convolving(1)


@cpu_kernel("x stride target factors bias table rows tickets channels taps code state_code gated silu before after")
def convolve_prompts(arguments):
    """Convolve the tokens of prompt rows into target [tokens, channels]; see `convolution_kernel.convolve`.

    factors: [taps, channels] float32. bias: [channels] float32; 0 for none. table: `PromptRows.rows`. tickets: of each
    row. before, after: [rows, taps, channels] float32, the last inputs before the row and those behind it. state_code:
    the dtype that states are rounded to behind every chunk, FLOAT32 if they are not.
    """
    _, _, x, stride, target, factors, bias, table, rows, tickets = read_10(arguments)
    channels, taps, code, state_code, gated, silu, before, after = (
        read_integer(arguments + 80),
        read_integer(arguments + 88),
        read_integer(arguments + 96),
        read_integer(arguments + 104),
        read_integer(arguments + 112),
        read_integer(arguments + 120),
        read_integer(arguments + 128),
        read_integer(arguments + 136),
    )
    size = item_bytes(code)
    while True:
        ticket = next_ticket(arguments)
        if ticket >= rows * tickets:
            return
        row, begin = ticket // tickets, TOKENS * (ticket % tickets)
        start, first, count = (
            read_integer32(table + 12 * row),
            read_integer32(table + 12 * row + 4),
            read_integer32(table + 12 * row + 8),
        )
        own, place = x + stride * first, target + size * channels * first
        old, new = before + 4 * taps * channels * row, after + 4 * taps * channels * row
        for token in range(begin, min(begin + TOKENS, count)):
            channel = 0
            while channel + LANES <= channels:
                convolve_16(
                    token, start, own, stride, place, factors, bias, channels, channel, taps, code, state_code, gated,
                    silu, old,
                )  # fmt: skip
                channel += LANES
            for left in range(channel, channels):
                convolve_1(
                    token, start, own, stride, place, factors, bias, channels, left, taps, code, state_code, gated,
                    silu, old,
                )  # fmt: skip
        if begin == 0:
            for tap in range(taps):
                token, channel = count - taps + tap, 0
                while channel + LANES <= channels:
                    keep_16(token, own, stride, channels, channel, taps, code, gated, old, new, tap)
                    channel += LANES
                for left in range(channel, channels):
                    keep_1(token, own, stride, channels, left, taps, code, gated, old, new, tap)
