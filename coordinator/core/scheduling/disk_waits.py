"""Requests that wait for blocks of their prompt from the disk tier before they start.

A request waits once it could start, and for `schedule.disk_wait_s` in all. Whatever has not come by then is computed.
"""

from __future__ import annotations

from ..cache.disk_hits import load_from_disk
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.placement import NO_DONOR, Placement
from ..cache.sequences import NO_POOL
from ..deadlines import DISK_WAIT
from ..limits import microseconds
from ..requests.phases import PREEMPTED
from ..requests.request import NO_SLOT, Request
from ..waits import DISK, Wait, load_of, patience_of
from .choice import Choice


class DiskWaits:
    """Orders loads from the disk, and lets requests wait for them."""

    def __init__(self, cache: KVCacheManager, choice: Choice) -> None:
        self._cache, self._choice, self._clock = cache, choice, cache.clock
        self._wait_us = microseconds(cache.limits.schedule.disk_wait_s)

    def wait_of(self, request: Request, placement: Placement) -> Wait | None:
        """Return what a request waits for that could start as planned; None: it starts.

        Args:
            request: The request.
            placement: Its placement. It is void if the request waits.
        """
        host, now_us, s = placement.group.host, self._clock.now_us, self._cache.sequences
        if host is None or host.disk is None or placement.donor != NO_DONOR:
            return None
        if request.phases.phase == PREEMPTED:  # see `swapping`: what the host tier has is weighed against computing it
            return None
        if 0 <= request.disk_until_us <= now_us:
            return None
        slot = s.slot_of.get(request.sequence_id, NO_SLOT)
        if slot != NO_SLOT and s.pool[slot] != NO_POOL:
            return None
        tokens, hashes = self._choice.prefix_of(request)
        first, most = placement.hits.size + len(placement.host), self._choice.shareable(request, tokens)
        prefix, end = (request.salt, tokens, hashes), most // s.block_size
        if placement.group.pool.mixed:
            windows = self._cache.windows
            loads = load_from_disk(placement, prefix, end, request.tenant, first_of=windows.first)
        else:
            loads = host.disk.load(*prefix, placement.host, first, end, request.tenant)
        if not loads:
            return None
        if request.disk_until_us < 0:
            request.disk_until_us = now_us + self._wait_us
            self._clock.deadlines.set(request.disk_until_us, request.id, DISK_WAIT)
        epoch = placement.group.epoch
        return Wait(DISK, (*(load_of(epoch, load) for load in loads), patience_of(request.id)), epoch)

    def give_up(self, request: Request) -> None:
        """Let a request start without the disk: its time is over."""
        if request.wait is None or request.wait.limit != DISK:
            return
        for group in self._cache.groups.values():
            if group.epoch == request.wait.group and group.disk is not None:
                group.disk.late()
        self._cache.waits.wake(patience_of(request.id))
