"""Requests that wait for blocks of their prompt from the disk tier before they start.

A request waits once it could start, and for `schedule.disk_wait_s` in all. Whatever has not come by then is computed.
"""

from __future__ import annotations

from ..cache.disk_hits import load_from_disk
from ..cache.hashing import Hashes
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.placement import NO_DONOR, Placement
from ..cache.sequences import NO_POOL, Tokens
from ..deadlines import DISK_WAIT
from ..limits import microseconds
from ..requests.phases import PREEMPTED
from ..requests.request import NO_SLOT, Request
from ..waits import DISK, Wait, load_of, patience_of
from .choice import Choice


def order_loads(
    cache: KVCacheManager, placement: Placement, prefix: tuple[int, Tokens, Hashes], most: int, tenant: int
) -> tuple[int, ...]:
    """Order what a placement lacks and a disk has to be copied to the host tier.

    Args:
        cache: The cache.
        placement: The placement, in a group with a disk tier.
        prefix: The salt, the tokens and the hashes of their full blocks.
        most: How many leading tokens may be shared.
        tenant: The tenant that is charged for the blocks of the host tier.

    Returns:
        The loads to wait for; () if the disk has nothing that is worth reading.
    """
    group, end = placement.group, most // cache.blocks.block_size
    assert group.disk is not None
    if group.pool.mixed:
        return load_from_disk(placement, prefix, end, tenant, first_of=cache.windows.first)
    first = int(placement.hits.size) + len(placement.host)
    return group.disk.load(*prefix, placement.host, first, end, tenant)


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
        most = self._choice.shareable(request, tokens)
        loads = order_loads(self._cache, placement, (request.salt, tokens, hashes), most, request.tenant)
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
