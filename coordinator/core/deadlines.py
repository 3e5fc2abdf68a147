"""Deadlines of the core: when time alone makes work necessary.

Requests have any number of timers, which are in a heap. Each other part that waits for time has one deadline: the
earliest of its own, which the part computes. Between two turns only a bound of it is kept, because the deadline of a
worker moves with every result: a part moves its bound when a deadline may be earlier than before (`arm`), and
`next_us` asks a part for the deadline itself when its bound is the earliest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Mapping

DEADLINE, FIRST_TOKEN, LEASE, TRIAL, DISK_WAIT = range(5)  # timers of requests
OLD_REQUESTS, DRAIN, SEQUENCES, WORKERS, SESSIONS, STEPS, RETURNS = range(7)  # parts, in the order in which they act
NEVER = 1 << 62
SLACK = 64
# For each part, the function that does what is due by now, and returns the part's next deadline or NEVER.
Parts = tuple[Callable[[], int], ...]


class Deadlines:
    """The timers of requests by time, and a bound for each other part.

    Attributes:
        heap: (time, request, kind) of each timer. Timers of ended requests are ignored, and removed from time to time.
        bounds_us: For each part, a time at or before its deadline, NEVER without one.
        first_us: A time at or before every deadline; the first itself after `next_us`.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, int]] = []
        self.bounds_us = [NEVER] * (RETURNS + 1)
        self.first_us = NEVER

    def set(self, due_us: int, request_id: int, kind: int) -> None:
        """Add a timer; `due` returns it once `due_us` has come."""
        heapq.heappush(self.heap, (due_us, request_id, kind))
        self.first_us = min(self.first_us, due_us)

    def arm(self, part: int, due_us: int) -> None:
        """Note that a part has a deadline at `due_us` or later, perhaps before its other ones."""
        self.bounds_us[part] = min(self.bounds_us[part], due_us)
        self.first_us = min(self.first_us, due_us)

    def arm_all(self, due_us: int) -> None:
        """Note that any part may have a deadline at `due_us` or later, and a request a timer."""
        self.bounds_us = [due_us] * len(self.bounds_us)
        self.first_us = due_us

    def pass_time(self, parts: Parts) -> None:
        """Do what is due by now, part by part."""
        for part, act in enumerate(parts):
            self.bounds_us[part] = act()

    def due(self, now_us: int) -> list[tuple[int, int]]:
        """Remove and return the (request, kind) pairs of the timers that are due, earliest first."""
        found = []
        while self.heap and self.heap[0][0] <= now_us:
            _, request_id, kind = heapq.heappop(self.heap)
            found.append((request_id, kind))
        return found

    def next_us(self, now_us: int, live: Container[int], parts: Parts) -> int | None:
        """Return the first deadline, or None. Only bounds change, and a second call changes none.

        Args:
            now_us: The time.
            live: The requests with timers that count.
            parts: The parts. What is due now waits for `pass_time`, so these only return their deadlines.
        """
        heap, bounds_us = self.heap, self.bounds_us
        if not heap or heap[0][1] in live:
            timer_us = heap[0][0] if heap else NEVER
        else:
            timer_us = min((timer_us for timer_us, request_id, _ in heap if request_id in live), default=NEVER)
        first_us, asked = min(bounds_us), -1
        while now_us < first_us < timer_us:
            part = bounds_us.index(first_us)
            if part == asked:
                break
            # An earlier part may have the same bound and a later deadline. It is asked now, and not by the next call,
            # which may follow a refused command.
            bounds_us[part], asked = parts[part](), part
            first_us = min(bounds_us)
        self.first_us = first_us = min(timer_us, first_us)
        return first_us if first_us < NEVER else None

    def drop_ended(self, live: Container[int]) -> None:
        """Remove leading timers of ended requests, so that `next_us` need not search."""
        while self.heap and self.heap[0][1] not in live:
            heapq.heappop(self.heap)

    def sweep(self, live: Mapping[int, object]) -> None:
        """Keep memory bounded by the number of live requests."""
        if len(self.heap) > SLACK + 6 * len(live):
            self.heap = [entry for entry in self.heap if entry[1] in live]
            heapq.heapify(self.heap)
