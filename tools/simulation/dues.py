"""What is due when: deadlines, leases and the end of a drain. Never early, and never later than the turn after."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvforge.coordinator.core.requests.lifecycle import Request
from kvforge.protocol.messages import Submit
from tools.simulation.settings import Settings
from tools.simulation.telling import BookedRequest
from tools.simulation.workers import Violation

DEADLINE, FIRST_TOKEN, LEASE = "deadline", "first token", "lease"


class Dues:
    """Times by request. live: those that have not ended, by id; known: what the core knows of a request."""

    def __init__(
        self, settings: Settings, live: dict[int, BookedRequest], known: Callable[[int], Request | None]
    ) -> None:
        self._settings, self._live, self._known = settings, live, known
        self._heap: list[tuple[int, int, str]] = []
        self.draining = False
        self._drain_us = 0
        self._rose_us = -1  # when the process that is there now began

    def accepted(self, request_id: int, booked: BookedRequest, command: Submit, now_us: int) -> None:
        """A request came."""
        booked.deadline_us = now_us + (command.deadline_ms * 1000 or self._settings.deadline_max_us)
        heapq.heappush(self._heap, (booked.deadline_us, request_id, DEADLINE))
        if command.first_token_ms:
            booked.first_token_us = now_us + command.first_token_ms * 1000
            heapq.heappush(self._heap, (booked.first_token_us, request_id, FIRST_TOKEN))

    def orphaned(self, request_id: int, booked: BookedRequest, now_us: int) -> None:
        """Its connection is gone, and its lease begins."""
        booked.reader, booked.paused = 0, False
        if not booked.detached:
            booked.orphan_us = now_us
            heapq.heappush(self._heap, (now_us + self._settings.lease_us, request_id, LEASE))

    def drain(self, deadline_ms: int, now_us: int) -> None:
        """A Drain was answered."""
        self.draining = True
        if deadline_ms:
            self._drain_us = now_us + deadline_ms * 1000

    def drained(self, now_us: int) -> bool:
        """Whether what is left may be handed back."""
        return 0 < self._drain_us <= now_us

    def lease_over(self, booked: BookedRequest, now_us: int) -> bool:
        """Whether nobody has kept the request for so long."""
        return 0 <= booked.orphan_us <= now_us - self._settings.lease_us

    def expired(self, request: Request, booked: BookedRequest, now_us: int) -> None:
        """It did: rightly?"""
        no_token = 0 < booked.first_token_us <= now_us and not booked.seen and not request.tokens.size
        if now_us < booked.deadline_us and not no_token:
            raise Violation(f"request {request.id} expired {booked.deadline_us - now_us} us early")

    def turn(self, now_us: int) -> None:
        """A turn was taken: nothing that was due is left, and this was not more than a turn too late."""
        while self._heap and self._heap[0][0] <= now_us:
            due_us, request_id, kind = heapq.heappop(self._heap)
            booked = self._live.get(request_id)
            if booked is None or not self._still(request_id, booked, kind, now_us):
                continue
            raise Violation(f"the {kind} of request {request_id} was due {now_us - due_us} us ago")
        if self.drained(now_us) and self._live:
            raise Violation(f"requests {list(self._live)} were not handed back when the drain's time was over")

    def _still(self, request_id: int, booked: BookedRequest, kind: str, now_us: int) -> bool:
        if kind == FIRST_TOKEN:
            request = self._known(request_id)
            return request is None or request.first_token_us < 0
        return kind == DEADLINE or self.lease_over(booked, now_us)

    def late(self, now_us: int) -> None:
        """A turn begins: was it time for one before? Not where nobody was there to take it."""
        latest_us = now_us - self._settings.turn_us
        if latest_us <= self._rose_us:
            return
        while self._heap and not self._relevant():
            heapq.heappop(self._heap)
        if self._heap and self._heap[0][0] < latest_us:
            raise Violation(f"what was due at {self._heap[0][0]} us waited for the turn at {now_us} us")
        if self._live and 0 < self._drain_us < latest_us:
            raise Violation("the end of the drain was slept through")

    def rises(self, now_us: int) -> None:
        """Another process begins."""
        self._rose_us = now_us

    def _relevant(self) -> bool:
        due_us, request_id, kind = self._heap[0]
        booked = self._live.get(request_id)
        return booked is not None and self._still(request_id, booked, kind, due_us)
