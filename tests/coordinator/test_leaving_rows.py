"""Rows of a batch leave a window block behind when their tokens say so, also when they are no longer counted."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.coordinator.core.cache.leaving_rows import LeavingRows

SIZE, WINDOW = 4, 10


@pytest.mark.parametrize("seed", range(5))
def test_rows_leave_blocks_behind_as_if_each_was_counted(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.permutation(20)[:7]
    computed = np.zeros(20, np.int64)
    computed[rows] = draw.integers(1, 40, rows.size)  # some have not reached the end of their first window
    first = np.maximum(0, computed - WINDOW) // SIZE
    leaving = LeavingRows(rows, first[rows] * SIZE + WINDOW + SIZE - computed[rows], SIZE)
    leaving.check_invariants(first, computed, WINDOW)
    for _ in range(60):
        computed[rows] += 1
        slots, numbers = leaving.next(first)
        out = rows[np.maximum(0, computed[rows] - WINDOW) // SIZE > first[rows]]
        assert sorted(slots.tolist()) == sorted(out.tolist())
        assert numbers.tolist() == first[slots].tolist()
        first[slots] += 1
        leaving.check_invariants(first, computed, WINDOW)


def test_later_rounds_are_not_counted() -> None:
    rows, first = np.arange(3), np.array([5, 5, 7])
    leaving = LeavingRows(rows, np.array([1, 1, 3]), SIZE)
    for _ in range(SIZE):
        slots, _ = leaving.next(first)
        first[slots] += 1
    nowhere = np.full(3, -1)  # is not asked any more
    found = [leaving.next(nowhere) for _ in range(SIZE)]
    assert [(slots.tolist(), numbers.tolist()) for slots, numbers in found] == [
        ([0, 1], [6, 6]),
        ([], []),
        ([2], [8]),
        ([], []),
    ]
