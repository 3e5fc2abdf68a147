"""Sequences that moved down to the host tier come back while a request for them waits for a row.

An idle sequence that was evicted keeps its tokens, and its blocks go to the host. When a request for it is queued and
no row is free, the sequence takes blocks again and the next step fills them, so that the request does not wait for the
copy when its row comes. It takes cached blocks, and no idle sequence is evicted for it.
"""

from __future__ import annotations

import numpy as np

from ..cache.kv_cache_manager import KVCacheManager
from ..cache.placement import Placement
from ..cache.sequences import NO_POOL
from ..cache.supply import Spare
from ..requests.request import NO_SLOT, Request
from .choice import Choice


class Prefetch:
    """Brings sequences back from the host tier."""

    def __init__(self, cache: KVCacheManager, choice: Choice) -> None:
        self._cache, self._choice = cache, choice

    def hurry(self, request: Request) -> None:
        """Let the next step carry all that is on its way to the sequence of a new request."""
        s = self._cache.sequences
        slot = s.slot_of.get(request.sequence_id or request.continues, NO_SLOT)
        group = self._cache.groups.get(int(s.pool[slot])) if slot != NO_SLOT else None
        if group is not None and group.host is not None and group.host.paced.slot == slot:
            group.host.hurry(slot)
            s.last_step[slot] = group.next_step
            group.pool.await_step(group.next_step)  # the request starts then

    def bring(self, request: Request) -> None:
        """Bring the sequence of a queued request back, if there is room and a host tier has blocks of it."""
        s, residency = self._cache.sequences, self._cache.residency
        slot = s.slot_of.get(request.sequence_id or request.continues, NO_SLOT)
        if slot == NO_SLOT or s.pool[slot] != NO_POOL or residency.still_read(slot):
            return
        if s.salt[slot] != request.salt or s.tenant[slot] != request.tenant:
            return
        placement = self._placement(request, slot)
        if placement is not None:
            residency.move_in(slot, placement)

    def _placement(self, request: Request, slot: int) -> Placement | None:
        """Return the placement of the sequence with the most tokens on the host; None without any, or without room."""
        s, indexing = self._cache.sequences, self._cache.indexing
        tokens = indexing.contents(s.tokens[slot, : int(s.length[slot])])
        hashes, found = None, None
        for group in self._cache.groups.values():
            if group.host is None or group.away or not self._choice.could_hold(group, request):
                continue
            hashes = indexing.hashes(request.salt, tokens) if hashes is None else hashes
            placement = self._cache.planner.plan_placement(group, request.salt, tokens, hashes)
            if not placement.reads or (found is not None and len(placement.reads) <= len(found.reads)):
                continue
            spare = Spare(group.running + 1, int(np.count_nonzero(s.running & (s.tenant == request.tenant))) + 1)
            if group.pool.has(request.tenant, placement.needed, placement.keep, spare):
                found = placement
        return found
