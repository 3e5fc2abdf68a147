"""What `make test` leaves out of a product of parameters."""

from __future__ import annotations

import pytest

from tests.pairs import every_pair


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (4, 2), (2, 4), (3, 3), (7, 5), (5, 7), (6, 4), (4, 6)])
def test_each_value_is_in_a_pair_without_the_mark(rows: int, columns: int) -> None:
    found = every_pair(range(rows), [(column, "more") for column in range(columns)])
    assert [each.values for each in found] == [
        (row, column, "more") for row in range(rows) for column in range(columns)
    ]
    kept = [each.values for each in found if not each.marks]
    assert {row for row, *_ in kept} == set(range(rows)) and {column for _, column, _ in kept} == set(range(columns))
    assert len(kept) == max(rows, columns)
    assert all([mark.name for mark in each.marks] in ([], ["soak"]) for each in found)
