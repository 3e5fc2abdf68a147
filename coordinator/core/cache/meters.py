"""What is counted by tenant, for monitors: a row of numbers for each, as they are published.

A tenant beyond the rows that there are, and one that was forgotten, counts among the others. Time is the events' own,
so a journal makes the same numbers again.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from kvforge.protocol.meters import GAP, GENERATED, OTHERS, TENANT_CELLS, TENANT_ROWS, Distribution

Cells = npt.NDArray[np.int64]
GAP_BOUNDS = np.array(GAP.bounds, np.int64)


class Meters:
    """rows: [TENANT_ROWS + 1, TENANT_CELLS] int64, as `protocol.meters` says. changed: those that are to be
    published."""

    def __init__(self) -> None:
        self.rows = np.zeros((TENANT_ROWS + 1, TENANT_CELLS), np.int64)
        self.changed: set[int] = set()

    def count(self, tenant: int, cell: int, amount: int = 1) -> None:
        """So many more."""
        row = tenant if tenant <= TENANT_ROWS else OTHERS
        self.rows[row, cell] += amount
        self.changed.add(row)

    def observe(self, tenant: int, what: Distribution, value: int) -> None:
        """One value more."""
        row = tenant if tenant <= TENANT_ROWS else OTHERS
        observe(self.rows[row], what, value)
        self.changed.add(row)

    def tokens(self, tenant: int, count: int, gap_us: int) -> None:
        """So many tokens of rows of a tenant, each of them so long after the one before in its row."""
        row = tenant if tenant <= TENANT_ROWS else OTHERS
        cells = self.rows[row]
        cells[GENERATED] += count
        cells[GAP.start + bisect_left(GAP.bounds, gap_us)] += count
        cells[GAP.total] += count * gap_us
        self.changed.add(row)

    def tokens_each(self, tenants: Cells, gaps_us: Cells | int) -> None:
        """One token for each entry, [n] tenants; gaps_us: [n] or one for all, below zero where none was before it."""
        rows = np.where(tenants <= TENANT_ROWS, tenants, OTHERS)
        self.changed.update(np.unique(rows).tolist())
        np.add.at(self.rows[:, GENERATED], rows, 1)
        if not isinstance(gaps_us, int):
            later = gaps_us >= 0
            rows, gaps_us = rows[later], gaps_us[later]
        cells = GAP.start + np.searchsorted(GAP_BOUNDS, gaps_us)
        np.add.at(self.rows.reshape(-1), rows * TENANT_CELLS + cells, 1)
        np.add.at(self.rows[:, GAP.total], rows, gaps_us)

    def forget(self, tenant: int) -> None:
        """What was counted for the tenant is counted among the others from now on."""
        if tenant <= TENANT_ROWS:
            self.rows[OTHERS] += self.rows[tenant]
            self.rows[tenant] = 0
            self.changed |= {OTHERS, tenant}

    def all_changed(self) -> None:
        """The tables are new."""
        self.changed.update(range(TENANT_ROWS + 1))


def observe(cells: Cells, what: Distribution, value: int) -> None:
    """One value more in the cells of a row."""
    cells[what.start + bisect_left(what.bounds, value)] += 1
    cells[what.total] += value
