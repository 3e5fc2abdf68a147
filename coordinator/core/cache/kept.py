"""Sequences that ended requests left to the next turn: bounded for each tenant, and dropped where a place is needed."""

from __future__ import annotations

import numpy as np

from ..limits import Bounds
from .groups import Group
from .removals import Removals
from .residency import Residency
from .sequences import NO_POOL, Sequences, Slots
from .tenants import Tenants

WHY_PLACE, WHY_BOUND = "its place was needed", "its tenant kept others that were used later"


class KeptSequences:
    """Drops kept sequences, least recently used first. One that a request works on is never dropped.

    Attributes:
        removals: Why sequences were removed, these and others.
    """

    def __init__(
        self, bounds: Bounds, sequences: Sequences, groups: dict[int, Group], residency: Residency, tenants: Tenants
    ) -> None:
        self._bounds, self._sequences, self._groups, self._residency = bounds, sequences, groups, residency
        self._tenants = tenants
        self.removals = Removals(bounds.finished_max)

    def keep(self, slot: int, ttl_us: int) -> None:
        """Keep the sequence of a request that ended, and drop others beyond the tenant's bound."""
        s = self._sequences
        s.owned[slot] = s.kept[slot] = True
        s.touch(slot)
        s.keep_idle(slot, ttl_us)
        mine = self._idle(s.tenant == s.tenant[slot])
        for other in mine[: max(0, mine.size - self._bounds.kept_per_tenant_max)].tolist():
            self._drop(other, WHY_BOUND)

    def could_free(self, count: int, but: int = 0) -> bool:
        """Return whether `count` slots are free, or would be if all kept sequences except `but` were dropped."""
        missing = count - self._sequences.slots_free
        return missing <= 0 or self._at_once(but).size >= missing

    def free_slots(self, count: int, but: int = 0) -> None:
        """Drop kept sequences except `but` until `count` slots are free, as far as that helps at once."""
        missing = count - self._sequences.slots_free
        for slot in self._at_once(but)[:missing].tolist() if missing > 0 else ():
            self._drop(slot, WHY_PLACE)

    def _idle(self, which: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Slots:
        """Return kept sequences that no request works on, least recently used first."""
        s = self._sequences
        slots = np.flatnonzero(s.kept & (s.request == 0) & which)
        return slots[np.lexsort((s.id[slots], s.accessed_us[slots]))]

    def _at_once(self, but: int) -> Slots:
        """Return the kept sequences, except one, with rows that no step in flight may read."""
        slots = self._idle(self._sequences.id != but)
        return np.array([slot for slot in slots.tolist() if not self._read(slot)], np.int64)

    def _read(self, slot: int) -> bool:
        s = self._sequences
        if s.pool[slot] != NO_POOL:
            return bool(s.last_step[slot] > self._groups[int(s.pool[slot])].pool.done_step)
        return self._residency.still_read(slot)

    def _drop(self, slot: int, why: str) -> None:
        s = self._sequences
        self.removals.note(int(s.id[slot]), self._tenants.names[int(s.tenant[slot])], why)
        self._residency.remove(slot)
