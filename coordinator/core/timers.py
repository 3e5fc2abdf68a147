"""What must happen to requests at a known time: they expire, or their lease ends."""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping

DEADLINE, FIRST_TOKEN, LEASE = range(3)
SLACK = 64


class Timers:
    """Times by request. Those of requests that have ended are ignored, and swept out now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []

    def set(self, due_us: int, request_id: int, kind: int) -> None:
        """`due` will name the request once `due_us` has come."""
        heapq.heappush(self._heap, (due_us, request_id, kind))

    def due(self, now_us: int) -> list[tuple[int, int]]:
        """(request, kind) of the timers that have come, earliest first. They are gone then."""
        found = []
        while self._heap and self._heap[0][0] <= now_us:
            _, request_id, kind = heapq.heappop(self._heap)
            found.append((request_id, kind))
        return found

    def next_us(self, live: Container[int]) -> int | None:
        """When the first timer of a live request comes; None where there is none."""
        while self._heap and self._heap[0][1] not in live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def sweep(self, live: Mapping[int, object]) -> None:
        """Keeps memory bounded by the number of live requests."""
        if len(self._heap) > SLACK + 6 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
