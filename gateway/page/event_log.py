"""Recent events, recorded while the page has viewers: restarts of processes, failed and preempted requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from kvforge.protocol.messages import LEFT, Health, Stats

from .view import BAD, GOOD, NOTICE

KEPT_MAX = 40
TOGETHER_MS = 60_000  # events of one kind within this time share a line
COUNTED = {
    "failed_total": (BAD, "failed"),
    "expired_total": (NOTICE, "exceeded their deadline"),
    "refused_total": (NOTICE, "refused"),
    "preemptions_total": (NOTICE, "preempted: they lost their blocks to other requests and will be recomputed"),
}


class LogEntry(msgspec.Struct, frozen=True):
    """One line of the log.

    Attributes:
        at_ms: The wall clock, in ms since 1970.
        level: GOOD, NOTICE or BAD.
        text: The line.
    """

    at_ms: int
    level: str
    text: str


@dataclass(slots=True)
class _Counted:
    first: int
    last_ms: int


class EventLog:
    """The newest events."""

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=KEPT_MAX)
        self._stats: Stats | None = None
        self._health: Health | None = None
        self._counted: dict[str, tuple[LogEntry, _Counted]] = {}
        self._pid = self._gone_ms = 0

    def entries(self) -> list[LogEntry]:
        """Return the events, newest first."""
        return list(self._entries)

    def resume(self) -> None:
        """Begin anew after a time without viewers: the times of what happened then are unknown."""
        self._stats = self._health = None
        self._counted.clear()
        self._pid = self._gone_ms = 0

    def process(self, pid: int, now_ms: int) -> None:
        """Record the process id of the coordinator; 0 after it has ended."""
        if pid != self._pid and self._pid and not self._gone_ms:
            self._gone_ms = now_ms
            self._add(now_ms, BAD, "the coordinator is gone")
        self._pid = pid

    def answered(self, stats: Stats, health: Health, now_ms: int) -> None:
        """Record the changes since the coordinator's previous answers."""
        before, stood = self._stats, self._health
        self._stats, self._health = stats, health
        if before is None or stood is None:
            return
        if stats.boot != before.boot:
            self._add(
                now_ms, BAD, f"the coordinator restarted without its journal{self._away(now_ms)}: its state is lost"
            )
            self._counted.clear()
        else:
            if self._gone_ms:
                self._add(now_ms, GOOD, f"the coordinator recovered{self._away(now_ms)} with its state intact")
            self._count(before, stats, now_ms)
        self._gone_ms = 0
        self._workers(stood, health, now_ms)
        if health.draining != stood.draining:
            self._add(now_ms, NOTICE, "draining: no new requests" if health.draining else "the drain was cancelled")
        if health.ready != stood.ready and not health.draining:
            status = (GOOD, "ready to serve") if health.ready else (BAD, f"not ready: {health.reason}")
            self._add(now_ms, *status)

    def _away(self, now_ms: int) -> str:
        return f" after {(now_ms - self._gone_ms) / 1000:.1f} s" if self._gone_ms else ""

    def _workers(self, stood: Health, health: Health, now_ms: int) -> None:
        before = {(worker.name, worker.rank): worker for worker in stood.workers}
        for name, how in health.gone.items():
            if stood.gone.get(name) != how:
                left = how.startswith(LEFT)
                self._add(now_ms, NOTICE if left else BAD, f"{name} {how}" if left else f"{name} is gone: {how}")
        for worker in health.workers:
            known = before.get((worker.name, worker.rank))
            if worker.state == "ready" and (known is None or known.state != "ready" or known.pid != worker.pid):
                self._add(now_ms, GOOD, f"{worker.title} is ready (process {worker.pid})")

    def _count(self, before: Stats, stats: Stats, now_ms: int) -> None:
        for name, (level, what) in COUNTED.items():
            was, now = getattr(before.requests, name), getattr(stats.requests, name)
            if now <= was:
                continue
            entry, counted = self._counted.get(name, (None, _Counted(was, now_ms)))
            if entry is not None and now_ms - counted.last_ms > TOGETHER_MS:
                entry, counted = None, _Counted(was, now_ms)
            if entry is not None and entry in self._entries:
                self._entries.remove(entry)
            number = now - counted.first
            line = f"{number} request{'s' if number > 1 else ''} {what}"
            counted.last_ms = now_ms
            self._counted[name] = self._add(now_ms, level, line), counted

    def _add(self, at_ms: int, level: str, text: str) -> LogEntry:
        entry = LogEntry(at_ms, level, text)
        self._entries.appendleft(entry)
        return entry
