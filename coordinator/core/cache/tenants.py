"""Tenants: index, quota, weight, and prefix-cache counters of each.

Index 0 means no tenant. `tenants_max` bounds the table. When it is full, a new name replaces the least recently seen
tenant that is not in the configuration and has nothing left except cached blocks.
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
Shares = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # floors and ceilings in blocks, [tenants] each


class Tenants:
    """The table of tenants. Arrays are indexed by tenant.

    Attributes:
        requests: Live requests of each tenant.
        service: Tokens computed for each tenant, divided by its weight.
        meters: Metrics of each tenant.
        floor: Blocks of each pool that are reserved for each tenant.
        ceiling: Blocks of each pool that each may occupy.
        host_floor: The same of each host file.
        host_ceiling: The same of each host file.
        disk_floor: The same of each disk.
        disk_ceiling: The same of each disk.
        changed: Tenants with new names, to be published.
    """

    def __init__(self, limits: Limits) -> None:
        self._most = most = limits.bounds.tenants_max
        self._index: dict[str, int] = {}  # least recently seen first
        self.forgotten_total = 0
        self.names: list[str] = [""]
        self.floor = np.zeros(most + 1, np.int64)
        self.ceiling = np.full(most + 1, NO_CEILING, np.int64)
        self.host_floor = np.zeros(most + 1, np.int64)
        self.host_ceiling = np.full(most + 1, NO_CEILING, np.int64)
        self.disk_floor = np.zeros(most + 1, np.int64)
        self.disk_ceiling = np.full(most + 1, NO_CEILING, np.int64)
        self.weight = np.ones(most + 1, np.float64)
        self.requests = np.zeros(most + 1, np.int64)
        self.service = np.zeros(most + 1, np.float64)
        self.prefix_queried_tokens = np.zeros(most + 1, np.int64)
        self.prefix_hit_tokens = np.zeros(most + 1, np.int64)
        self.past_byte_seconds = np.zeros(most + 1, np.float64)  # in pools that no longer exist
        self.meters = Meters(most)
        self.changed: set[int] = set()
        for name, quota in limits.quotas.items():
            index = self.intern(name)
            self.floor[index] = quota.floor
            self.ceiling[index] = quota.ceiling or NO_CEILING
            self.host_floor[index] = quota.host_floor
            self.host_ceiling[index] = quota.host_ceiling or NO_CEILING
            self.disk_floor[index] = quota.disk_floor
            self.disk_ceiling[index] = quota.disk_ceiling or NO_CEILING
            self.weight[index] = quota.weight
        self._configured = len(self.names)
        self.has_quotas = any(quota.floor or quota.ceiling for quota in limits.quotas.values())
        self.has_host_quotas = any(quota.host_floor or quota.host_ceiling for quota in limits.quotas.values())
        self.has_disk_quotas = any(quota.disk_floor or quota.disk_ceiling for quota in limits.quotas.values())

    def check(self, name: str) -> None:
        """Validate a tenant name.

        Raises:
            InvalidRequest: The name is empty, too long, or not printable.
        """
        if name not in self._index and (not 0 < len(name) <= NAME_LENGTH_MAX or not name.isprintable()):
            raise InvalidRequest("tenant", f"must be 1 to {NAME_LENGTH_MAX} printable characters")

    def has_place_for(self, name: str) -> bool:
        """Return whether the name has an index, or can get one without replacing another tenant."""
        return name in self._index or len(self.names) <= self._most

    def intern(self, name: str, instead: int = 0) -> int:
        """Return the index of a tenant, adding the name if it is new.

        Args:
            name: The tenant's name.
            instead: For a new name, the tenant to replace; 0 allocates a new index.
        """
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
        """Return the least recently seen tenant that is not busy and not in the configuration."""
        return next((i for i in self._index.values() if i >= self._configured and i not in busy), None)

    def _forget(self, index: int) -> None:
        assert not self.requests[index], "a tenant with live requests was forgotten"
        del self._index[self.names[index]]
        for column in (self.service, self.prefix_queried_tokens, self.prefix_hit_tokens, self.past_byte_seconds):
            column[index] = 0
        self.meters.forget(index)
        self.forgotten_total += 1

    def peek(self, name: str) -> int:
        """Return the tenant's index, or 0 (which has no quota) for an unknown name."""
        return self._index.get(name, 0)

    def kept_for_others(self, tenant: int, usage: npt.NDArray[np.int64]) -> int:
        """Return how many blocks of a pool are reserved for the unused floors of other tenants.

        Args:
            tenant: The tenant that asks.
            usage: Blocks of the pool charged to each tenant, [tenants] int64.
        """
        if not self.has_quotas:
            return 0
        if self._configured <= FEW:  # only configured tenants have floors
            floors, used = self.floor[: self._configured].tolist(), usage[: self._configured].tolist()
            lacking = [floor - own if floor > own else 0 for floor, own in zip(floors, used, strict=True)]
            return sum(lacking) - (lacking[tenant] if tenant < self._configured else 0)
        missing = np.maximum(self.floor - usage, 0)
        return int(np.add.reduce(missing) - missing[tenant])  # twice as fast as `missing.sum()`

    def reserved_for_others(self, name: str) -> int:
        """Return how many blocks of each pool are reserved for tenants other than `name`, which may be unknown."""
        if not self.has_quotas:
            return 0
        return int(np.add.reduce(self.floor) - self.floor[self._index.get(name, 0)])

    def ceiling_blocks(self, index: int) -> int:
        """Return the tenant's ceiling in blocks of one pool, or 0 if it has none."""
        return 0 if self.ceiling[index] == NO_CEILING else int(self.ceiling[index])

    @property
    def host_shares(self) -> Shares | None:
        """The floors and ceilings of each host file; None if no tenant has any."""
        return (self.host_floor, self.host_ceiling) if self.has_host_quotas else None

    @property
    def disk_shares(self) -> Shares | None:
        """The floors and ceilings of each disk; None if no tenant has any."""
        return (self.disk_floor, self.disk_ceiling) if self.has_disk_quotas else None

    def host_ceiling_blocks(self, index: int) -> int:
        """Return the tenant's ceiling in blocks of one host file, or 0 if it has none."""
        return 0 if self.host_ceiling[index] == NO_CEILING else int(self.host_ceiling[index])

    def disk_ceiling_blocks(self, index: int) -> int:
        """Return the tenant's ceiling in blocks of one disk, or 0 if it has none."""
        return 0 if self.disk_ceiling[index] == NO_CEILING else int(self.disk_ceiling[index])
