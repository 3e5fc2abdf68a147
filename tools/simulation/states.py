"""Recurrent states in simulated workers: what the blocks of a sequence's state must hold.

A state is a hash of its text, chunk by chunk: prompt tokens in chunks that end at multiples of the chunk's size and at
the end of their run, generated tokens one by one. Another cut of the same text gives another state, as it does on a
real device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvforge.protocol.messages import GENERATED

EMPTY = 0


class StatePage(NamedTuple):
    """The content of one block of a state: behind how many tokens, of which text, and its place among the blocks."""

    tokens: int
    state: int
    number: int


def advanced(state: int, tokens: Sequence[int], start: int, chunk: int) -> int:
    """Return the state after one row of a step.

    Args:
        state: the state before it.
        tokens: the row's tokens as workers see them, all of one kind.
        start: the position of the first.
        chunk: tokens of a chunk.
    """
    at = 0
    while at < len(tokens):
        end = min(len(tokens), at + chunk - (start + at) % chunk) if tokens[at] < GENERATED else at + 1
        state = hash((state, *tokens[at:end]))
        at = end
    return state


@lru_cache(maxsize=4096)
def state_of(tokens: tuple[int, ...], chunk: int) -> int:
    """Return the state behind a text. Its last run of prompt tokens ends with it."""
    state, at = EMPTY, 0
    while at < len(tokens):
        generated = tokens[at] >= GENERATED
        end = at + 1
        while end < len(tokens) and (tokens[end] >= GENERATED) == generated:
            end += 1
        state, at = advanced(state, tokens[at:end], at, chunk), end
    return state
