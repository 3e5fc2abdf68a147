"""When rows that decode together leave window blocks behind.

In a batch that repeats, each row is one token further with each result, and leaves a window block behind every
`block_size` results. The first round finds by counting which rows do so with which result. If it had each row once,
so has each later round, and the rows of a result are known without an operation on all rows.
"""

from __future__ import annotations

import numpy as np

from .sequences import ONE, ZERO, Slots


class LeavingRows:
    """The rows of a steady decode batch, by the result with which they leave a window block behind."""

    __slots__ = ("_at", "_in_sight", "_round", "_rows", "_size")

    def __init__(self, rows: Slots, in_sight: Slots, size: int) -> None:
        """Begin behind a result.

        Args:
            rows: The slots of the rows, [n].
            in_sight: Tokens until the first window block of each is out of sight, above 0, [n]. It changes here.
            size: Tokens of a block.
        """
        self._rows, self._in_sight, self._size = rows, in_sight, size
        self._round: list[tuple[Slots, Slots]] = []
        self._at = -1  # the next place in a complete round

    def next(self, window_first: Slots) -> tuple[Slots, Slots]:
        """Return the rows that leave a block behind with the next result, and the numbers of these blocks: [m] each.

        Args:
            window_first: The first block with window blocks of each slot.
        """
        if self._at < 0:
            return self._count(window_first)
        at = self._at
        slots, numbers = self._round[at]
        if slots.size:
            numbers = numbers + ONE  # a new array: the step before may still name the old one
            self._round[at] = slots, numbers
        self._at = at + 1 if at + 1 < self._size else 0
        return slots, numbers

    def _count(self, window_first: Slots) -> tuple[Slots, Slots]:
        in_sight = self._in_sight
        np.subtract(in_sight, ONE, in_sight)
        (at,) = (in_sight <= ZERO).nonzero()
        in_sight[at] += self._size
        slots = self._rows[at]
        found = slots, window_first[slots]
        self._round.append(found)
        if len(self._round) == self._size:
            if sum(each.size for each, _ in self._round) == self._rows.size:
                self._at = 0
            else:  # some rows have not reached the end of their first window
                self._round.clear()
        return found

    def check_invariants(self, window_first: Slots, computed: Slots, window: int) -> None:
        """Check that the next result makes no other rows leave a block behind than those that are known.

        Args:
            window_first: The first block with window blocks of each slot.
            computed: Acknowledged tokens of each slot.
            window: Tokens that the layers see.
        """
        rows = self._rows
        left = window_first[rows] * self._size + (window + self._size) - computed[rows]
        assert (left > 0).all(), "a window block out of sight is held"
        if self._at < 0:
            assert (left == self._in_sight).all(), "the kept tokens in sight differ"
            return
        slots, numbers = self._round[self._at]
        if slots.size:
            numbers = numbers + ONE
        assert np.array_equal(np.sort(slots), np.sort(rows[left == ONE])), "other rows leave a window block behind"
        assert (window_first[slots] == numbers).all(), "a row leaves another window block behind"
