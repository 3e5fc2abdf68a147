"""The deadlines of a machine, found by a scan of its state: independent of what `Deadlines` keeps."""

from __future__ import annotations

import numpy as np

from kvforge.coordinator.core.deadlines import NEVER
from kvforge.coordinator.core.limits import microseconds
from kvforge.coordinator.core.machine import Machine
from tools.simulation.workers import Violation


def check_due(machine: Machine, due_us: int | None) -> None:
    """Check after a turn that the next one is due at the first deadline.

    Timers of requests may be early: one for the first token stays after the token, and one of a lease after an attach.
    The time to live of sequences is a lower bound. Late timers show in the ledger's `Dues`.

    Args:
        machine: The machine.
        due_us: When it asks for a turn, None for never.

    Raises:
        Violation: The time is too late, or earlier than any deadline.
    """
    last_us = min(_deadlines(machine), default=None)
    if last_us is not None and (due_us is None or due_us > last_us):
        raise Violation(f"the first deadline is at {last_us} us, but the next turn is due at {due_us} us")
    heap = machine._clock.deadlines.heap
    early = (last_us, heap[0][0] if heap else None, machine.cache.sequences.expiry_us, machine.streams.due_us)
    first_us = min((us for us in early if us is not None), default=None)
    if due_us is not None and (first_us is None or due_us < first_us):
        raise Violation(f"the first deadline is at {first_us} us, but a turn is due at {due_us} us already")


def _deadlines(machine: Machine) -> list[int]:
    """Return all deadlines."""
    bounds, schedule = machine.limits.bounds, machine.limits.schedule
    requests, reports, s = machine.requests, machine._reports, machine.cache.sequences
    found = [request.deadline_us for request in requests.live.values()]
    found += [request.ended_us + microseconds(bounds.finished_ttl_s) for request in requests.finished.values()]
    found += [away.until_us for away in machine.sessions.away.values()]
    if requests.live and machine._request_commands.drain_deadline_us:
        found.append(machine._request_commands.drain_deadline_us)
    for worker in reports.workers.values():
        group = worker.group
        if group is not None and group.away:
            found.append(worker.away_until_us)
        elif group is not None and group.sent:
            since_us = max(group.sent[0].sent_us, group.result_us)
            found.append(since_us + microseconds(schedule.step_timeout_s) + 1)
    if (send_us := machine.scheduler.pass_time()) < NEVER:
        found.append(send_us)
    limited = np.flatnonzero(s.owned & (s.idle_ttl_us > 0) & (s.request == 0))
    found += (s.accessed_us[limited] + s.idle_ttl_us[limited]).tolist()
    found += s.return_us[s.return_us > 0].tolist()
    return found
