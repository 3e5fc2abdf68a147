"""A trial copy of a pool's counts: how many blocks each tenant could get."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded

from .tenants import Tenants


class Spare(NamedTuple):
    """Blocks that must remain after an allocation.

    Attributes:
        pool: Blocks left in the pool for the rows that run there.
        own: Blocks left below the tenant's ceiling.
    """

    pool: int = 0
    own: int = 0


NO_SPARE = Spare()


class Supply:
    """How many blocks each tenant could get. Hypothetical releases can be applied to this copy."""

    def __init__(self, tenants: Tenants, free: int, cached: dict[int, int], usage: npt.NDArray[np.int64]) -> None:
        self._tenants, self._free, self._cached, self._usage = tenants, free, cached, usage

    def room(self, tenant: int) -> int:
        """Return how many more blocks fit under the tenant's ceiling if it evicts its own cached blocks."""
        return int(self._tenants.ceiling[tenant] - self._usage[tenant]) + self._cached.get(tenant, 0)

    def available(self, tenant: int) -> int:
        """Return how many blocks the tenant could get within its ceiling and beyond the floors of others."""
        return max(0, min(self.room(tenant), self.stock(tenant)))

    def has(self, tenant: int, count: int, spare: Spare) -> bool:
        """Return whether the tenant could get `count` blocks and leave `spare`."""
        return self.room(tenant) >= count + spare.own and self.stock(tenant) >= count + spare.pool

    def stock(self, tenant: int) -> int:
        """Return how many blocks the tenant could get if it had no ceiling."""
        floor, usage = self._tenants.floor, self._usage
        supply = self._free + self._cached.get(tenant, 0) - self._tenants.kept_for_others(tenant, usage)
        for other, count in self._cached.items():
            if other != tenant:
                supply += min(count, max(0, int(usage[other] - floor[other])))
        return supply

    def shortage(self, tenant: int, count: int, spare: Spare = NO_SPARE) -> CapacityExceeded:
        """Build the error that explains why `tenant` cannot have `count` blocks and leave `spare`."""
        ceiling, room = int(self._tenants.ceiling[tenant]), self.room(tenant)
        if count + spare.own > room:
            return QuotaExceeded(self._tenants.names[tenant], ceiling - room + count + spare.own, ceiling)
        hint = "remove sequences or wait for requests to end"
        return CapacityExceeded("blocks", count + spare.pool, max(0, self.stock(tenant)), hint)

    def give_up(self, owner: int) -> None:
        """Stop charging `owner` for one held block, which another tenant pays for."""
        self._usage[owner] -= 1

    def gain(self, owner: int, indexed: bool) -> None:
        """Release the last holder of one block of `owner`: it is cached if indexed, else freed."""
        if indexed:
            self._cached[owner] = self._cached.get(owner, 0) + 1
        else:
            self._free += 1
            self._usage[owner] -= 1

    def gain_each(self, owners: npt.NDArray[np.int32], indexed: npt.NDArray[np.bool_]) -> None:
        """Apply `gain` to each of [n] blocks."""
        for owner, count in zip(*np.unique(owners[indexed], return_counts=True), strict=True):
            self._cached[int(owner)] = self._cached.get(int(owner), 0) + int(count)
        freed = owners[~indexed]
        self._free += freed.size
        self._usage -= np.bincount(freed, minlength=self._usage.size)


def short_of(error: CapacityExceeded) -> int:
    """Return how many blocks were missing."""
    available = error.ceiling if isinstance(error, QuotaExceeded) else error.available
    return int(error.needed) - int(available)
