"""Events of requests at a known time: they expire, their lease ends, or they are tried again."""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping

DEADLINE, FIRST_TOKEN, LEASE, TRIAL = range(4)
SLACK = 64


class Deadlines:
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
        """When the first timer of a live request comes; None where there is none. Asking changes nothing."""
        heap = self._heap
        if not heap or heap[0][1] in live:
            return heap[0][0] if heap else None
        return min((due_us for due_us, request_id, _ in heap if request_id in live), default=None)

    def drop_ended(self, live: Container[int]) -> None:
        """So that what comes first is of a live request, and whoever asks for it does not search."""
        while self._heap and self._heap[0][1] not in live:
            heapq.heappop(self._heap)

    def sweep(self, live: Mapping[int, object]) -> None:
        """Keeps memory bounded by the number of live requests."""
        if len(self._heap) > SLACK + 6 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
