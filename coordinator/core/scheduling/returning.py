"""Idle sequences and pins that moved down come back from the host tier before a request needs them.

A sequence comes back when it is expected by the idle times of its tenant (`IdleTracker`), and a pin at once; both only
where there is room beside what runs: no request waits, free or cached blocks suffice and some are left, and no other
sequence or pin gives its blocks up. One comes back at a time, and steps carry a few of its blocks each. A sequence that
was not continued in the expected time gives its blocks up again: they stay cached, and are evicted before others.

If only the disk tier has its blocks, they are copied to the host tier first.
"""

from __future__ import annotations

import numpy as np

from ..cache.groups import Group
from ..cache.idle_tracker import RETRY_US
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.paced_reads import NO_SLOT
from ..cache.placement import Placement
from ..cache.sequences import NO_POOL
from ..cache.supply import Spare
from ..deadlines import NEVER
from .disk_waits import order_loads
from .queue import WaitingQueue

SHARE = 4  # sequences that came back and were not continued yet have at most 1 / SHARE of a pool
LEFT = 16  # 1 / LEFT of the pool stays free or cached
DUE_MAX = 32  # sequences that are dealt with in a turn: others of a lost worker are due together
TRIES_MAX = 4  # sequences with a prefix that is looked up in a turn


class Returning:
    """Brings idle sequences and pins back from the host tier."""

    def __init__(self, cache: KVCacheManager, waiting: WaitingQueue) -> None:
        self._cache, self._waiting, self._clock = cache, waiting, cache.clock

    def pass_time(self) -> int:
        """Bring back sequences that are due. Return when the next one is, or NEVER."""
        s, now_us = self._cache.sequences, self._clock.now_us
        (timed,) = s.return_us.nonzero()
        due = timed[s.return_us[timed] <= now_us]
        if due.size:
            tries = TRIES_MAX
            # The shorter a sequence has been idle, the likelier it is to be continued.
            due = due[np.lexsort((s.id[due], -s.accessed_us[due]))]
            s.return_us[due[DUE_MAX:]] = now_us + RETRY_US
            for slot in due[:DUE_MAX].tolist():
                tries -= self._act(slot, look_up=tries > 0)
            (timed,) = s.return_us.nonzero()
        return int(s.return_us[timed].min()) if timed.size else NEVER

    def _act(self, slot: int, *, look_up: bool) -> bool:
        """Do what is due for a sequence. Return whether its prefix was looked up."""
        s, idle = self._cache.sequences, self._cache.idle
        s.return_us[slot] = 0
        if s.pool[slot] != NO_POOL:
            if s.returned[slot]:
                self._cache.residency.release_kv(slot)  # it was not continued in the expected time
            return False
        late_us = self._late_us(slot)
        if late_us is None:
            idle.try_again(slot)
            return False
        if not look_up or self._waiting.size or self._cache.residency.still_read(slot):
            idle.try_again(slot)
            return False
        groups = [group for group in self._cache.groups.values() if self._has_place(group, slot)]
        if not groups:
            idle.try_again(slot)
            return False
        placement = self._placement(slot, groups)
        if placement is None:
            idle.try_again(slot)
            return True
        self._cache.residency.move_in(slot, placement, paced=True)
        assert placement.group.host is not None
        placement.group.host.tier.returns_total += 1
        idle.came_back(slot, late_us)
        return True

    def _late_us(self, slot: int) -> int | None:
        """Return after which idle time a sequence is not expected any more; 0: it always is; None: nothing is known."""
        s = self._cache.sequences
        if s.pinned[slot]:
            return 0
        expected = self._cache.idle.expected(slot)
        return expected[1] if expected is not None else None

    def _has_place(self, group: Group, slot: int) -> bool:
        """Return whether a sequence might come back to a group now, before its prefix is looked up."""
        s, host = self._cache.sequences, group.host
        if host is None or group.away or any(load.paced for load in host.loads.values()):
            return False
        blocks, pool = s.blocks_for(int(s.length[slot])), group.pool
        mine = s.returned & (s.pool == group.number)
        held = int(s.used[mine].sum() + s.state_used[mine].sum())
        if (held + blocks + group.state_blocks) * SHARE > pool.count:
            return False
        if s.pinned[slot] and not self._cache.prefix_pins.may_return(slot, group):
            return False
        return pool.available(int(s.tenant[slot])) >= blocks + self._spare(group, slot).pool

    def _spare(self, group: Group, slot: int) -> Spare:
        """Return the blocks that must be left: for the rows to grow, and for requests to come."""
        s, each = self._cache.sequences, 1 + group.window_pages
        mine = int(np.count_nonzero(s.running & (s.pool == group.number) & (s.tenant == s.tenant[slot])))
        return Spare((group.running + 1) * each + group.pool.count // LEFT, (mine + 1) * each)

    def _placement(self, slot: int, groups: list[Group]) -> Placement | None:
        """Return the placement of a sequence with most tokens on a host; None without any, or without room."""
        s, indexing = self._cache.sequences, self._cache.indexing
        salt, tenant = int(s.salt[slot]), int(s.tenant[slot])
        tokens = indexing.contents(s.tokens[slot, : int(s.length[slot])])
        whole = bool(s.pinned[slot])  # nothing goes on behind a pin
        hashes = indexing.hashes(salt, tokens, whole=whole)
        found = None
        for group in groups:
            placement = self._cache.planner.plan_placement(group, salt, tokens, hashes, whole=whole)
            most = tokens.size - 1 + whole
            if group.disk is not None and order_loads(self._cache, placement, (salt, tokens, hashes), most, tenant):
                return None
            if not placement.reads or (found is not None and len(placement.reads) <= len(found.reads)):
                continue
            needed = placement.needed + placement.ahead
            if group.pool.has(tenant, needed, placement.keep, self._spare(group, slot)):
                found = placement
        return found

    def make_way(self, group: Group) -> bool:
        """Give up what comes back to a group and no request waits for. Return whether there was anything."""
        if group.host is None or not group.host.paced.waiting:
            return False
        self._cache.residency.release_kv(group.host.paced.slot)
        return True

    def hold(self, group: Group, step: int) -> None:
        """Keep a sequence on its way from eviction until the step with a part of its blocks is done."""
        assert group.host is not None
        slot = group.host.paced.slot
        assert slot != NO_SLOT
        self._cache.sequences.last_step[slot] = step
        group.pool.await_step(step)
