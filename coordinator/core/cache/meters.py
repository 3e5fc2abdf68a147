"""Metrics of each tenant: one row of counters for each, in the published layout.

Tenants without a row of their own, and forgotten tenants, count in the shared row OTHERS. Times come from events, so
a journal replay reproduces the numbers.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from kvforge.protocol.meters import GAP, OTHERS, TENANT_CELLS, TENANT_ROWS, Distribution

Cells = npt.NDArray[np.int64]
FEW = 8  # up to this size, a Python loop is faster than numpy
GAP_BOUNDS = np.array(GAP.bounds, np.int64)


class Meters:
    """Counters of the tenants.

    Attributes:
        rows: [1 + tenants with a row, TENANT_CELLS] int64, laid out as in `protocol.meters`.
        changed: Rows to publish.
    """

    def __init__(self, tenants_max: int) -> None:
        self._last = min(tenants_max, TENANT_ROWS)
        self.rows = np.zeros((self._last + 1, TENANT_CELLS), np.int64)
        self.changed: set[int] = set()

    def count(self, tenant: int, cell: int, amount: int = 1) -> None:
        """Add `amount` to a counter of the tenant."""
        row = tenant if tenant <= self._last else OTHERS
        self.rows[row, cell] += amount
        self.changed.add(row)

    def observe(self, tenant: int, what: Distribution, value: int, times: int = 1) -> None:
        """Add a value to a distribution of the tenant, `times` times."""
        row = tenant if tenant <= self._last else OTHERS
        cells = self.rows[row]
        cells[what.start + bisect_left(what.bounds, value)] += times
        cells[what.start + len(what.bounds) + 1] += times * value
        self.changed.add(row)

    def observe_gaps(self, tenants: Cells, gaps_us: Cells | int) -> None:
        """Record the times between tokens of n tenants.

        Args:
            tenants: [n] int64.
            gaps_us: Microseconds, [n] int64 or one value for all; negative where no token came before.
        """
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
        """Move the tenant's counts to the shared row."""
        if tenant <= self._last:
            self.rows[OTHERS] += self.rows[tenant]
            self.rows[tenant] = 0
            self.changed |= {OTHERS, tenant}

    def all_changed(self) -> None:
        """Mark every row for publication, because the tables are new."""
        self.changed.update(range(self._last + 1))
