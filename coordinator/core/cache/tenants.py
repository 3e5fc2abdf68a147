"""Tenants: names to small integers, their quotas and weights, and their prefix-cache counters.

Index 0 is nobody. The table is bounded by `tenants_max`. When it is full, a new name takes the place of one that the
configuration does not name and that nothing is left of but cached blocks: the one that was not heard of for longest.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import InvalidRequest

from ..limits import Limits
from .meters import FEW, Meters

NAME_LENGTH_MAX = 128
NO_CEILING = np.iinfo(np.int64).max


class Tenants:
    """Interned tenants. Arrays are indexed by tenant.

    requests: how many of its requests are alive. service: what was computed for it, in tokens divided by its weight.
    meters: what monitors are told. changed: whose names are to be published.
    """

    def __init__(self, limits: Limits) -> None:
        self._most = most = limits.bounds.tenants_max
        self._index: dict[str, int] = {}  # in the order in which they were last heard of
        self.forgotten_total = 0
        self.names: list[str] = [""]
        self.floor = np.zeros(most + 1, np.int64)
        self.ceiling = np.full(most + 1, NO_CEILING, np.int64)
        self.weight = np.ones(most + 1, np.float64)
        self.requests = np.zeros(most + 1, np.int64)
        self.service = np.zeros(most + 1, np.float64)
        self.prefix_queried_tokens = np.zeros(most + 1, np.int64)
        self.prefix_hit_tokens = np.zeros(most + 1, np.int64)
        self.past_byte_seconds = np.zeros(most + 1, np.float64)  # in pools that are gone
        self.meters = Meters(most)
        self.changed: set[int] = set()
        for name, quota in limits.quotas.items():
            index = self.intern(name)
            self.floor[index] = quota.floor
            self.ceiling[index] = quota.ceiling or NO_CEILING
            self.weight[index] = quota.weight
        self._configured = len(self.names)
        self.has_quotas = any(quota.floor or quota.ceiling for quota in limits.quotas.values())

    def check(self, name: str) -> None:
        """Raises InvalidRequest for what cannot be a tenant's name."""
        if name not in self._index and (not 0 < len(name) <= NAME_LENGTH_MAX or not name.isprintable()):
            raise InvalidRequest("tenant", f"a tenant's name is 1 to {NAME_LENGTH_MAX} printable characters")

    def has_place_for(self, name: str) -> bool:
        """Whether the name is known, or can be, and nobody is forgotten for it."""
        return name in self._index or len(self.names) <= self._most

    def intern(self, name: str, instead: int = 0) -> int:
        """The tenant's index; for a new name a new one, or that of the tenant that it comes `instead` of."""
        index = self._index.pop(name, None)
        if index is None:
            index = instead or len(self.names)
            if instead:
                self._forget(instead)
                self.names[instead] = name
            else:
                self.names.append(name)
            self.changed.add(index)
        self._index[name] = index
        return index

    def first_but(self, busy: Container[int]) -> int | None:
        """Of the tenants that are not busy nor named by the configuration: who was not heard of for longest."""
        return next((i for i in self._index.values() if i >= self._configured and i not in busy), None)

    def _forget(self, index: int) -> None:
        assert not self.requests[index], "a tenant whose requests are alive was forgotten"
        del self._index[self.names[index]]
        for column in (self.service, self.prefix_queried_tokens, self.prefix_hit_tokens, self.past_byte_seconds):
            column[index] = 0
        self.meters.forget(index)
        self.forgotten_total += 1

    def peek(self, name: str) -> int:
        """The tenant's index, 0 for a name that was never seen (nobody has no quota)."""
        return self._index.get(name, 0)

    def kept_for_others(self, tenant: int, usage: npt.NDArray[np.int64]) -> int:
        """Blocks of a pool that the others' floors still lack. usage: what each has of it."""
        if not self.has_quotas:
            return 0
        if self._configured <= FEW:  # nobody else has a floor
            floors, used = self.floor[: self._configured].tolist(), usage[: self._configured].tolist()
            lacking = [floor - own if floor > own else 0 for floor, own in zip(floors, used, strict=True)]
            return sum(lacking) - (lacking[tenant] if tenant < self._configured else 0)
        missing = np.maximum(self.floor - usage, 0)
        return int(np.add.reduce(missing) - missing[tenant])  # half the time of its `sum`

    def reserved_for_others(self, name: str) -> int:
        """Blocks of each pool that no one but other tenants than this one, known or not, may take."""
        if not self.has_quotas:
            return 0
        return int(np.add.reduce(self.floor) - self.floor[self._index.get(name, 0)])

    def ceiling_told(self, index: int) -> int:
        """The most blocks of one pool that the tenant may occupy, 0 where there is no limit."""
        return 0 if self.ceiling[index] == NO_CEILING else int(self.ceiling[index])
