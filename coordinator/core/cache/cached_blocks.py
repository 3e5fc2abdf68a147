"""Cached blocks of a pool by tenant, in the order of their last use.

Each block has the time of its last use, and each tenant a log of its blocks in that order. A block that is held again,
evicted or used later stays in the log with a time that is no longer its own, and is skipped there. So blocks are added
and removed with a few operations on arrays, however many they are. A log is written anew when most of it is out of
date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .blocks import BlockIds

SPARE = 1024  # entries of a log that may be out of date, beside as many as there are cached blocks
AT_ONCE = 256  # entries that become tuples together

Stamps = npt.NDArray[np.int64]


class RecentLog:
    """Cached blocks of a tenant in the order of their last use, and entries that are out of date.

    Attributes:
        first: The oldest entries, the oldest last: when it was used, and the block.
        parts: The others, the oldest first: blocks, and when they were used, [n] each.
        size: The number of entries.
    """

    __slots__ = ("first", "parts", "size")

    def __init__(self) -> None:
        self.first: list[tuple[int, int]] = []
        self.parts: deque[tuple[BlockIds, Stamps]] = deque()
        self.size = 0

    def move(self) -> None:
        """Move the oldest entries of `parts` to `first`, which is empty."""
        ids, stamps = self.parts.popleft()
        if ids.size > AT_ONCE:
            self.parts.appendleft((ids[AT_ONCE:], stamps[AT_ONCE:]))
            ids, stamps = ids[:AT_ONCE], stamps[:AT_ONCE]
        self.first = list(zip(stamps[::-1].tolist(), ids[::-1].tolist(), strict=True))

    def whole(self) -> tuple[BlockIds, Stamps]:
        """Return all entries in order: blocks, and when they were used, [n] each."""
        first = np.array(self.first[::-1], np.int64).reshape(-1, 2)
        ids = np.concatenate([first[:, 1], *(part for part, _ in self.parts)])
        return ids, np.concatenate([first[:, 0], *(part for _, part in self.parts)])


class CachedBlocks:
    """The cached blocks of a pool.

    Attributes:
        stamp: When the most recently used block was used: a number that grows with each use.
        counts: How many cached blocks each tenant has, of those that have had some.
        logs: Their blocks in order. It follows from the rest, up to what is out of date.
    """

    def __init__(self, end: int) -> None:
        """Begin without blocks; all ids will be below `end`."""
        self.stamp = 0
        self.counts: dict[int, int] = {}
        self.logs: dict[int, RecentLog] = {}
        self._stamps = np.zeros(end, np.int64)  # 0: not cached

    def count(self, tenant: int) -> int:
        """Return how many cached blocks a tenant has."""
        return self.counts.get(tenant, 0)

    def add(self, ids: BlockIds, owners: npt.NDArray[np.integer]) -> None:
        """Add blocks that are not cached, each as more recently used than the one before.

        Args:
            ids: The blocks, [n > 0].
            owners: Their tenants, [n].
        """
        first = self.stamp + 1
        self.stamp += ids.size
        stamps = np.arange(first, first + ids.size)
        self._stamps[ids] = stamps
        parts = [(owners.item(0), ids, stamps)]
        if np.count_nonzero(owners == owners[0]) < ids.size:
            masks = {tenant: owners == tenant for tenant in dict.fromkeys(owners.tolist())}
            parts = [(tenant, ids[own], stamps[own]) for tenant, own in masks.items()]
        for tenant, own, used in parts:
            if (log := self.logs.get(tenant)) is None:
                log, self.counts[tenant] = self.logs.setdefault(tenant, RecentLog()), 0
            log.parts.append((own, used))
            log.size += own.size
            count = self.counts[tenant] = self.counts[tenant] + own.size
            if log.size > 2 * count + SPARE:
                self.restore(tenant, *self.items(tenant))

    def discard(self, ids: BlockIds, owners: npt.NDArray[np.integer]) -> None:
        """Remove cached blocks, [n], of these tenants, [n]."""
        self._stamps[ids] = 0
        for tenant in owners.tolist():
            self.counts[tenant] -= 1

    def discard_few(self, blocks: Iterable[int], owners: npt.NDArray[np.integer]) -> None:
        """Remove a few cached blocks; `owners` are the tenants of all blocks of all pools."""
        stamps, counts, owner_of = self._stamps, self.counts, owners.item
        for block in blocks:
            stamps[block] = 0
            counts[owner_of(block)] -= 1

    def pop(self, tenant: int, count: int) -> list[int]:
        """Remove the least recently used blocks of a tenant, which has as many, and return them: oldest first."""
        log, stamp_of = self.logs[tenant], self._stamps.item
        found: list[int] = []
        while len(found) < count:
            if not log.first:
                log.move()
            stamp, block = log.first.pop()
            log.size -= 1
            if stamp_of(block) == stamp:
                found.append(block)
        self._stamps[found] = 0
        self.counts[tenant] -= count
        return found

    def oldest(self, tenant: int) -> tuple[int, int]:
        """Return when the least recently used block of a tenant, which has some, was used, and the block."""
        log, stamp_of = self.logs[tenant], self._stamps.item
        while True:
            while log.first:
                oldest = log.first[-1]
                if stamp_of(oldest[1]) == oldest[0]:
                    return oldest
                log.first.pop()
                log.size -= 1
            log.move()

    def items(self, tenant: int) -> tuple[BlockIds, Stamps]:
        """Return the cached blocks of a tenant, the oldest first, and when they were used: [n] each."""
        ids, stamps = self.logs[tenant].whole()
        cached = self._stamps[ids] == stamps
        return ids[cached], stamps[cached]

    def restore(self, tenant: int, ids: BlockIds, stamps: Stamps) -> None:
        """Set the cached blocks of a tenant to what `items` has returned."""
        self._stamps[ids] = stamps
        self.counts[tenant] = ids.size
        log = self.logs[tenant] = RecentLog()
        if ids.size:
            log.parts.append((ids, stamps))
            log.size = ids.size
