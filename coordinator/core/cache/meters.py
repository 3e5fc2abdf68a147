"""What is counted by tenant, for monitors: a row of numbers for each, as they are published.

A tenant beyond the rows that there are, and one that was forgotten, counts among the others. Time is the events' own,
so a journal makes the same numbers again.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from kvforge.protocol.meters import GAP, OTHERS, TENANT_CELLS, TENANT_ROWS, Distribution

Cells = npt.NDArray[np.int64]
FEW = 8  # for so many, numpy takes longer than Python does for one after the other
GAP_BOUNDS = np.array(GAP.bounds, np.int64)


class Meters:
    """rows: [1 + tenants that have a row, TENANT_CELLS] int64, as `protocol.meters` says. changed: those that are to be
    published."""

    def __init__(self, tenants_max: int) -> None:
        self._last = min(tenants_max, TENANT_ROWS)
        self.rows = np.zeros((self._last + 1, TENANT_CELLS), np.int64)
        self.changed: set[int] = set()

    def count(self, tenant: int, cell: int, amount: int = 1) -> None:
        """So many more."""
        row = tenant if tenant <= self._last else OTHERS
        self.rows[row, cell] += amount
        self.changed.add(row)

    def observe(self, tenant: int, what: Distribution, value: int, times: int = 1) -> None:
        """One value more, or the same so many times."""
        row = tenant if tenant <= self._last else OTHERS
        observe(self.rows[row], what, value, times)
        self.changed.add(row)

    def observe_gaps(self, tenants: Cells, gaps_us: Cells | int) -> None:
        """Times between tokens, of [n] tenants; gaps_us: [n] or one for all, below zero where no token was before."""
        if tenants.size <= FEW:
            each = [gaps_us] * tenants.size if isinstance(gaps_us, int) else gaps_us.tolist()
            for tenant, gap_us in zip(tenants.tolist(), each, strict=True):
                if gap_us >= 0:
                    self.observe(tenant, GAP, gap_us)
            return
        rows = np.where(tenants <= self._last, tenants, OTHERS)
        if not isinstance(gaps_us, int):
            later = gaps_us >= 0
            rows, gaps_us = rows[later], gaps_us[later]
        cells = GAP.start + np.searchsorted(GAP_BOUNDS, gaps_us)
        np.add.at(self.rows.reshape(-1), rows * TENANT_CELLS + cells, 1)
        np.add.at(self.rows[:, GAP.total], rows, gaps_us)
        self.changed.update(rows.tolist())

    def forget(self, tenant: int) -> None:
        """What was counted for the tenant is counted among the others from now on."""
        if tenant <= self._last:
            self.rows[OTHERS] += self.rows[tenant]
            self.rows[tenant] = 0
            self.changed |= {OTHERS, tenant}

    def all_changed(self) -> None:
        """The tables are new."""
        self.changed.update(range(self._last + 1))


def observe(cells: Cells, what: Distribution, value: int, times: int = 1) -> None:
    """A value in the cells of a row, so many times."""
    cells[what.start + bisect_left(what.bounds, value)] += times
    cells[what.total] += times * value
