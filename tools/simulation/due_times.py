"""Deadlines, leases and the end of a drain: handled never early, and no later than one turn after they are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvforge.coordinator.core.requests.request import Request
from kvforge.protocol.messages import Submit
from tools.simulation.settings import Settings
from tools.simulation.stream_checker import BookedRequest
from tools.simulation.workers import Violation

DEADLINE, FIRST_TOKEN, LEASE = "deadline", "first token", "lease"


class DueTimes:
    """Due times by request.

    `live` holds the requests that have not ended, by id; `known` returns the core's request of an id.
    """

    def __init__(
        self, settings: Settings, live: dict[int, BookedRequest], known: Callable[[int], Request | None]
    ) -> None:
        self._settings, self._live, self._known = settings, live, known
        self._heap: list[tuple[int, int, str]] = []
        self.draining = False
        self._drain_us = 0
        self._rose_us = -1  # when the process was started or continued

    def accepted(self, request_id: int, booked: BookedRequest, command: Submit, now_us: int) -> None:
        """Record an accepted request."""
        booked.deadline_us = now_us + (command.deadline_ms * 1000 or self._settings.deadline_max_us)
        heapq.heappush(self._heap, (booked.deadline_us, request_id, DEADLINE))
        if command.first_token_ms:
            booked.first_token_us = now_us + command.first_token_ms * 1000
            heapq.heappush(self._heap, (booked.first_token_us, request_id, FIRST_TOKEN))

    def orphaned(self, request_id: int, booked: BookedRequest, now_us: int) -> None:
        """Record the end of a request's connection, which starts its lease."""
        booked.reader, booked.paused = 0, False
        if not booked.detached:
            booked.orphan_us = now_us
            heapq.heappush(self._heap, (now_us + self._settings.lease_us, request_id, LEASE))

    def drain(self, deadline_ms: int, now_us: int) -> None:
        """Record the answer to a Drain."""
        self.draining = True
        if deadline_ms:
            self._drain_us = now_us + deadline_ms * 1000

    def drained(self, now_us: int) -> bool:
        """Return whether the remaining requests may be handed back."""
        return 0 < self._drain_us <= now_us

    def lease_over(self, booked: BookedRequest, now_us: int) -> bool:
        """Return whether the request's lease has expired."""
        return 0 <= booked.orphan_us <= now_us - self._settings.lease_us

    def expired(self, request: Request, booked: BookedRequest, now_us: int) -> None:
        """Check that an expired request was due."""
        no_token = 0 < booked.first_token_us <= now_us and not booked.seen and not request.tokens.size
        if now_us < booked.deadline_us and not no_token:
            raise Violation(f"request {request.id} expired {booked.deadline_us - now_us} us early")

    def turn(self, now_us: int) -> None:
        """Check after a turn that nothing due is left, and that this turn was at most one turn late."""
        while self._heap and self._heap[0][0] <= now_us:
            due_us, request_id, kind = heapq.heappop(self._heap)
            booked = self._live.get(request_id)
            if booked is None or not self._still(request_id, booked, kind, now_us):
                continue
            raise Violation(f"the {kind} of request {request_id} was due {now_us - due_us} us ago")
        if self.drained(now_us) and self._live:
            raise Violation(f"requests {list(self._live)} were not handed back at the end of the drain")

    def _still(self, request_id: int, booked: BookedRequest, kind: str, now_us: int) -> bool:
        if kind == FIRST_TOKEN:
            request = self._known(request_id)
            return request is None or request.first_token_us < 0
        return kind == DEADLINE or self.lease_over(booked, now_us)

    def late(self, now_us: int) -> None:
        """Check that no turn was due before this one, unless no process ran."""
        latest_us = now_us - self._settings.turn_us
        if latest_us <= self._rose_us:
            return
        while self._heap and not self._relevant():
            heapq.heappop(self._heap)
        if self._heap and self._heap[0][0] < latest_us:
            raise Violation(f"a timer due at {self._heap[0][0]} us waited until the turn at {now_us} us")
        if self._live and 0 < self._drain_us < latest_us:
            raise Violation("no turn came at the end of the drain")

    def rises(self, now_us: int) -> None:
        """Record that a process was started, or continued after a stop."""
        self._rose_us = now_us

    def _relevant(self) -> bool:
        due_us, request_id, kind = self._heap[0]
        booked = self._live.get(request_id)
        return booked is not None and self._still(request_id, booked, kind, due_us)
