"""Tenants: names to small integers, their quotas and weights, and their prefix-cache counters.

Index 0 is nobody. A name keeps its index for the life of the core, so the table is bounded by `tenants_max`.
"""

from __future__ import annotations

import numpy as np

from protocol.errors import CapacityExceeded, InvalidRequest

from .limits import Limits

NAME_LENGTH_MAX = 128
NO_CEILING = np.iinfo(np.int64).max


class Tenants:
    """Interned tenants. Arrays are indexed by tenant."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._index: dict[str, int] = {}
        self.names: list[str] = [""]
        self.floor = np.zeros(limits.tenants_max + 1, np.int64)
        self.ceiling = np.full(limits.tenants_max + 1, NO_CEILING, np.int64)
        self.weight = np.ones(limits.tenants_max + 1, np.float64)
        self.prefix_queried_tokens = np.zeros(limits.tenants_max + 1, np.int64)
        self.prefix_hit_tokens = np.zeros(limits.tenants_max + 1, np.int64)
        self.past_byte_seconds = np.zeros(limits.tenants_max + 1, np.float64)  # in pools that are gone
        for name, quota in limits.quotas.items():
            index = self.intern(name)
            self.floor[index] = quota.floor
            self.ceiling[index] = quota.ceiling or NO_CEILING
            self.weight[index] = quota.weight
        self.has_quotas = any(quota.floor or quota.ceiling for quota in limits.quotas.values())

    def check(self, name: str) -> None:
        """Raises InvalidRequest or CapacityExceeded where `intern` would; changes nothing."""
        if name in self._index:
            return
        if not 0 < len(name) <= NAME_LENGTH_MAX or not name.isprintable():
            raise InvalidRequest("tenant", f"a tenant's name is 1 to {NAME_LENGTH_MAX} printable characters")
        if len(self.names) > self._limits.tenants_max:
            raise CapacityExceeded("tenants", 1, 0, "raise limits.tenants_max")

    def intern(self, name: str) -> int:
        """The tenant's index, a new one for a new name."""
        index = self._index.get(name)
        if index is None:
            self.check(name)
            index = self._index[name] = len(self.names)
            self.names.append(name)
        return index

    def peek(self, name: str) -> int:
        """The tenant's index, 0 for a name that was never seen (nobody has no quota)."""
        return self._index.get(name, 0)

    def reserved_for_others(self, name: str) -> int:
        """Blocks of each pool that no one but other tenants than this one, known or not, may take."""
        return int(self.floor.sum() - self.floor[self._index.get(name, 0)])

    def ceiling_of(self, name: str) -> int:
        """The most blocks of one pool that the tenant may occupy, known or not."""
        return int(self.ceiling[self._index.get(name, 0)])
