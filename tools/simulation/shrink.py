"""Delta debugging: finds a minimal list of actions that still fails.

A. Zeller, R. Hildebrandt: Simplifying and Isolating Failure-Inducing Input. IEEE TSE 28 (2), 2002.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def shrink(items: list[T], fails: Callable[[list[T]], bool], runs_max: int) -> list[T]:
    """Return a sublist that still fails, minimal unless `runs_max` was reached.

    Args:
        items: a failing list.
        fails: whether a list fails.
        runs_max: maximum calls of `fails`.

    Returns:
        A failing sublist from which no single item can be removed.
    """
    runs = 0
    pieces = 2
    while len(items) >= 1:
        size = -(-len(items) // pieces)
        for start in range(0, len(items), size):
            rest = items[:start] + items[start + size :]
            runs += 1
            if fails(rest):
                items, pieces = rest, max(2, pieces - 1)
                break
            if runs >= runs_max:
                return items
        else:
            if size <= 1:
                return items
            pieces = min(len(items), 2 * pieces)
    return items
