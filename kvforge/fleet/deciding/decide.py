"""Decides the next actions, once per look at the fleet.

Tests check these rules:

- A serving replica is drained only if enough others remain, except during an update with `surge` 0.
- During an update, one replica at a time leaves, after every gateway knows its successor.
- A leaving replica ends when its requests have ended, or after `drain_s`.
- Looking again does not undo a decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvforge.fleet.messages import DRAINING, FAILED, GATEWAY, READY, REPLICA, STARTING, STOPPED

from .scaling import Memory, scaled
from .views import ON_THE_WAY, Decision, Gateway, RemoveAction, Replica, StopAction, View, Wanted, order_of_leaving

# Requests handed back at the deadline leave a moment later.
GRACE_S = 5.0


def decide(wanted: Wanted, view: View, memory: Memory, now_s: float, names: Sequence[str]) -> tuple[Decision, Memory]:
    """Decide the next actions.

    Args:
        wanted: The wanted state.
        view: The present state.
        memory: The memory of the last decision.
        now_s: The time in seconds.
        names: Names for new members; their number limits the creations.

    Returns:
        The decision and the new memory.
    """
    decision = Decision(list(names))
    if wanted.ended:
        _end(wanted, view, decision)
        return decision, memory
    staying = [one for one in view.replicas if not one.leaving]
    new = [one for one in staying if one.revision == wanted.file.revision]
    old = [one for one in staying if one.revision != wanted.file.revision]
    decision.count, memory = _count(wanted, view, new, now_s, memory)
    _see_off(wanted, view.replicas, decision)
    _try_again(wanted, view.replicas, decision)
    if old:
        _update(wanted, view, new, old, decision)
    else:
        _keep(wanted, new, decision)
    _gateways(wanted, view.gateways, decision)
    return decision, memory


def _count(wanted: Wanted, view: View, new: list[Replica], now_s: float, memory: Memory) -> tuple[int, Memory]:
    """Return the wanted number of replicas."""
    count = wanted.file.count if wanted.count is None else wanted.count
    rule = wanted.file.autoscale
    if rule is None:
        return count, memory
    settled = len(new) == len(view.replicas) == count and all(one.phase == READY for one in new)
    return scaled(rule, count, tuple(one.status.queue_s for one in new), now_s, memory, settled=settled)


def _see_off(wanted: Wanted, ones: Sequence[Replica], decision: Decision) -> None:
    """Stop or remove members that are leaving."""
    for one in ones:
        if one.phase == STOPPED:
            decision.act(RemoveAction(_kind(one), one.name))
        elif one.phase == DRAINING:
            left, limit_s = one.status.running + one.status.pending, wanted.file.replicas.drain_s + GRACE_S
            if not left or one.status.draining_s >= limit_s:
                decision.act(StopAction(_kind(one), one.name))
            else:
                decision.sentences.append(f"{one.name} is leaving: {left} requests still run there")


def _try_again(wanted: Wanted, ones: Sequence[Replica], decision: Decision) -> None:
    """Replace members that could not start, after a while."""
    own = wanted.file.replicas
    for one in ones:
        if one.phase == FAILED:
            decision.sentences.append(f"{one.name} cannot start: {one.status.reason}")
            if wanted.again or one.status.failed_s >= own.retry_s:
                decision.act(StopAction(_kind(one), one.name))
        elif one.phase == STARTING and one.status.age_s >= own.start_s:
            decision.explain(one, f"{one.name}, after {one.status.age_s:.0f} s, is")
            decision.act(StopAction(_kind(one), one.name))


def _keep(wanted: Wanted, new: list[Replica], decision: Decision) -> None:
    """Create missing replicas and drain surplus ones, those that do not serve first."""
    for _ in range(decision.count - len(new)):
        decision.create(REPLICA, wanted.file.revision)
    leaving = sorted(new, key=order_of_leaving)[: max(0, len(new) - decision.count)]
    for one in leaving:
        decision.leave(one, wanted.file)
    for one in new:
        if one.phase in ON_THE_WAY and one not in leaving:
            decision.explain(one, f"{one.name} is")


def _update(wanted: Wanted, view: View, new: list[Replica], old: list[Replica], decision: Decision) -> None:
    """Replace old replicas by new ones, one at a time."""
    useless = [one for one in old if one.can_end_at_once]
    for one in useless:
        decision.leave(one, wanted.file)
    if any(one.phase == FAILED for one in new):
        decision.sentences.append("the update is stopped, and the old replicas go on")
        return
    coming = [one for one in new if one.phase in ON_THE_WAY]
    unknown = [one for one in new if one.phase == READY and not view.known(one)]
    for one in coming:
        decision.explain(one, f"the update waits for {one.name}, which is")
    decision.sentences += [f"the update waits for {one.name}, which not all gateways know yet" for one in unknown]
    if coming or unknown or useless or any(one.leaving for one in view.replicas):
        return
    there, surge = len(new) + len(old), wanted.file.replicas.surge
    if len(new) < decision.count and there < decision.count + surge:
        decision.create(REPLICA, wanted.file.revision)
    else:
        decision.leave(min(old, key=order_of_leaving), wanted.file)


def _gateways(wanted: Wanted, gateways: Sequence[Gateway], decision: Decision) -> None:
    """Create missing gateways, drain surplus ones, and replace old ones one at a time.

    An old gateway leaves before its successor starts, because both may use the same port.
    """
    revision, count = wanted.file.gateway_revision, wanted.file.gateways.count
    _see_off(wanted, gateways, decision)
    _try_again(wanted, gateways, decision)
    staying = [one for one in gateways if not one.leaving]
    for _ in range(count - len(gateways)):
        decision.create(GATEWAY, revision)
    for one in sorted(staying, key=order_of_leaving)[: max(0, len(staying) - count)]:
        decision.leave(one, wanted.file)
    for one in staying:
        if one.phase in ON_THE_WAY:
            decision.explain(one, f"{one.name} is")
    old = [one for one in staying if one.revision != revision]
    settled = len(staying) == len(gateways) == count
    if old and settled and all(one.phase == READY for one in staying if one not in old):
        decision.leave(min(old, key=order_of_leaving), wanted.file)


def _end(wanted: Wanted, view: View, decision: Decision) -> None:
    """Remove the fleet: first the gateways, then the replicas."""
    for ones in (view.gateways, view.replicas):
        _see_off(wanted, ones, decision)
        for one in ones:
            if not one.leaving:
                decision.leave(one, wanted.file)
        if ones:
            decision.sentences.append(f"{len(ones)} {_kind(ones[0])}{'s' if len(ones) > 1 else ''} to leave")
            return


def _kind(one: Replica) -> str:
    return GATEWAY if isinstance(one, Gateway) else REPLICA
