"""Timers of requests: deadlines, ends of leases, and retries."""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping

DEADLINE, FIRST_TOKEN, LEASE, TRIAL = range(4)
SLACK = 64


class Deadlines:
    """Timers by time. Timers of ended requests are ignored, and removed from time to time.

    Attributes:
        heap: (time, request, kind) of each timer.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, int]] = []

    def set(self, due_us: int, request_id: int, kind: int) -> None:
        """Add a timer; `due` returns it once `due_us` has come."""
        heapq.heappush(self.heap, (due_us, request_id, kind))

    def due(self, now_us: int) -> list[tuple[int, int]]:
        """Remove and return the (request, kind) pairs of the timers that are due, earliest first."""
        found = []
        while self.heap and self.heap[0][0] <= now_us:
            _, request_id, kind = heapq.heappop(self.heap)
            found.append((request_id, kind))
        return found

    def next_us(self, live: Container[int]) -> int | None:
        """Return the time of the first timer of a live request, or None."""
        heap = self.heap
        if not heap or heap[0][1] in live:
            return heap[0][0] if heap else None
        return min((due_us for due_us, request_id, _ in heap if request_id in live), default=None)

    def drop_ended(self, live: Container[int]) -> None:
        """Remove leading timers of ended requests, so that `next_us` need not search."""
        while self.heap and self.heap[0][1] not in live:
            heapq.heappop(self.heap)

    def sweep(self, live: Mapping[int, object]) -> None:
        """Keep memory bounded by the number of live requests."""
        if len(self.heap) > SLACK + 6 * len(live):
            self.heap = [entry for entry in self.heap if entry[1] in live]
            heapq.heapify(self.heap)
