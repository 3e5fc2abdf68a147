"""Scales the number of replicas by the queueing time of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..settings import Autoscale, FleetFile


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory between two decisions.

    Attributes:
        above_s: Since when the queueing time is too long, None if it is not.
        below_s: Since when it is short, None if it is not.
        changed_s: When the number last changed.
    """

    above_s: float | None = None
    below_s: float | None = None
    changed_s: float | None = None


def scaled(
    rule: Autoscale, count: int, queues_s: tuple[float, ...], now_s: float, memory: Memory, *, settled: bool
) -> tuple[int, Memory]:
    """Return the wanted number of replicas.

    Args:
        rule: The bounds.
        count: The present number.
        queues_s: The queueing time on each serving replica.
        now_s: The time in seconds.
        memory: The memory of the last decision.
        settled: Whether all replicas serve; before that, their number cannot be judged.

    Returns:
        The number, and the new memory.
    """
    bounded = min(max(count, rule.replicas_min), rule.replicas_max)
    if bounded != count:
        return bounded, Memory(changed_s=now_s)
    if not settled or not queues_s:
        return count, replace(memory, above_s=None, below_s=None)
    wait_s = sum(queues_s) / len(queues_s)
    above_s = _since(wait_s > rule.queue_up_s, memory.above_s, now_s)
    below_s = _since(wait_s < rule.queue_down_s or wait_s == 0.0, memory.below_s, now_s)
    memory = replace(memory, above_s=above_s, below_s=below_s)
    if memory.changed_s is not None and now_s - memory.changed_s < rule.pause_s:
        return count, memory
    if above_s is not None and now_s - above_s >= rule.up_after_s:
        wanted = min(2 * count, math.ceil(count * wait_s / rule.queue_up_s), rule.replicas_max)
        return (wanted, Memory(changed_s=now_s)) if wanted > count else (count, memory)
    if below_s is not None and now_s - below_s >= rule.down_after_s and count > rule.replicas_min:
        return count - 1, Memory(changed_s=now_s)
    return count, memory


def carried(before: FleetFile, count: int | None, now: FleetFile) -> int | None:
    """Return the number of replicas to keep when another file is used.

    Args:
        before: The previous file.
        count: The decided number, None if the previous file set it.
        now: The new file.

    Returns:
        The number; None: the number in the new file.
    """
    if now.autoscale is not None:  # scaling starts from the present number, within the bounds
        return before.count if count is None else count
    said_otherwise = before.autoscale is not None or before.replicas.count != now.replicas.count
    return None if said_otherwise else count


def _since(holds: bool, before: float | None, now_s: float) -> float | None:
    return (now_s if before is None else before) if holds else None
