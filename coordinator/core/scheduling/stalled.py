"""Stalled rows: they lack room for their next tokens, and no other row is preempted for them.

They keep their blocks and are tried again with each plan. A row ends if only clients can release the blocks that it
lacks.
"""

from __future__ import annotations

from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded
from kvforge.protocol.messages import Step

from ..cache.groups import Group
from ..cache.holders import largest_holders
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.supply import NO_SPARE
from ..requests.request import NO_SLOT, Request
from ..requests.table import RequestTable
from ..waits import TENANT_CEILING
from .choice import lack
from .finisher import RequestFinisher


def stall(group: Group, request: Request, error: CapacityExceeded, needed: int, now_us: int) -> None:
    """Stall the row of a request for which no other row is preempted.

    Args:
        group: The group.
        request: The request.
        error: Why its row got no blocks.
        needed: The blocks that it needs.
        now_us: The time.
    """
    request.wait = lack(group, error, needed)
    request.phases.stall(now_us)
    group.stopped.append(request.id)


def unstall(group: Group, stalled: list[Request], now_us: int) -> None:
    """Clear the stalled state of rows that the last plan did not stop again.

    A row that stays stalled keeps the time when it stalled, because a turn that plans nothing changes nothing.
    """
    for request in stalled:
        if request.id not in group.stopped:
            request.wait = None
            request.phases.unstall(now_us)


def requests_of(group: Group, requests: RequestTable) -> list[Request]:
    """Return the requests of stalled rows that still run."""
    known = [requests.live.get(request_id) for request_id in group.stopped]
    return [request for request in known if request is not None and request.slot != NO_SLOT]


def give_up(
    cache: KVCacheManager, requests: RequestTable, finisher: RequestFinisher, group: Group, step: Step | None
) -> bool:
    """End rows that are stalled for good because only clients can release the blocks they need.

    If the whole group is stalled, the youngest row ends.

    Args:
        cache: The cache.
        requests: The request table.
        finisher: Ends the requests.
        group: The group.
        step: The step that was planned last, None if there was nothing to do.

    Returns:
        Whether any row ended, or pins gave up their blocks.
    """
    still = [request for request in requests_of(group, requests) if request.wait is not None]
    lost = [request for request in still if not _can_go_on(cache, group, request)]
    if still and not lost and step is None and not group.sent and not group.pool.awaits_step:
        if cache.prefix_pins.release(group):
            return True
        lost = [max(still, key=lambda request: request.admitted_order)]
    for request in lost:
        finisher.end(request, "fail", "failed", _hopeless(cache, group, request))
    return bool(lost)


def _can_go_on(cache: KVCacheManager, group: Group, request: Request) -> bool:
    """Return whether the row would have room after everything that ends by itself has ended."""
    supply, _ = cache.eviction.supply_when_idle(group, request.slot)
    return request.wait is None or supply.has(request.tenant, request.wait.needed, NO_SPARE)


def _hopeless(cache: KVCacheManager, group: Group, request: Request) -> CapacityExceeded:
    """Build the error of a row that cannot continue, with the holders of the blocks it lacks."""
    wait, tenants = request.wait, cache.tenants
    assert wait is not None
    needed, at_ceiling = wait.needed, wait.limit == TENANT_CEILING
    holders = largest_holders(cache, group, request.tenant, request.tenant if at_ceiling else 0, request.slot)
    hint = f"request {request.id} cannot continue: {'; '.join(holders)}"
    if at_ceiling:
        usage, ceiling = int(group.pool.usage[request.tenant]), int(tenants.ceiling[request.tenant])
        return QuotaExceeded(request.tenant_name, usage + needed, ceiling, hint)
    return CapacityExceeded("blocks", needed, max(0, needed - wait.short), hint)
