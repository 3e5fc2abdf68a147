"""Rows behind drafts: which of them count, and which drafts each is behind."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.worker.sampling.ahead import AheadRows


def i4(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


TWO = AheadRows(i4(4, 4, 4, 2, 2, 2, 2), i4(0, 1, 2, 0, 1, 2, 3), i4(90, 7, 8, 91, 5, 6, 7))


@pytest.mark.parametrize(
    ("sampled", "bad", "expected"),
    [
        ((7, 8, 9, 5, 6, 7, 1), (), (3, 4)),
        ((7, 1, 9, 1, 6, 7, 1), (), (2, 1)),
        ((1, 8, 9, 5, 1, 7, 1), (), (1, 2)),  # an agreement behind a wrong draft does not count
        ((7, 8, 9, 5, 6, 7, 1), (1, 6), (1, 3)),
        ((7, 8, 9, 5, 6, 7, 1), (0, 3), (1, 1)),  # the first row is there for its error
    ],
)
def test_the_longest_agreeing_part_counts(
    sampled: tuple[int, ...], bad: tuple[int, ...], expected: tuple[int, int]
) -> None:
    good = ~np.isin(np.arange(7), bad)
    accepted = TWO.accepted(i4(*sampled), good)
    first, second = expected
    assert accepted.tolist() == [index < first for index in range(3)] + [index < second for index in range(4)]


def test_each_row_is_behind_the_drafts_before_it() -> None:
    rows, tokens = TWO.earlier_drafts()
    pairs = sorted(zip(rows.tolist(), tokens.tolist(), strict=True))
    assert pairs == [(1, 7), (2, 7), (2, 8), (4, 5), (5, 5), (5, 6), (6, 5), (6, 6), (6, 7)]


def test_single_rows_have_no_drafts() -> None:
    single = TWO.pick(i4(0, 3))
    assert single.accepted(i4(1, 2), np.ones(2, np.bool_)).tolist() == [True, True]
    assert [len(part) for part in single.earlier_drafts()] == [0, 0]
    assert len(single) == 2
