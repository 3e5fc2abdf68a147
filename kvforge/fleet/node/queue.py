"""Measures how long requests wait in a coordinator's queue, from its counters."""

from __future__ import annotations

from collections import deque

from kvforge.protocol.meters import QUEUE
from kvforge.protocol.service_metrics import ServiceMetrics

WINDOW_S = 10.0


class QueueTime:
    """The queueing time over the last WINDOW_S.

    It is the mean of the requests that began in the window, or the time without a beginning while requests wait, if
    that is longer: the oldest of these has waited at least as long.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, int]] = deque()  # time; begun requests; their total wait in us
        self._waiting_since: float | None = None

    def look(self, now_s: float, begun: int, waited_us: int, pending: int) -> float:
        """Return the queueing time in seconds.

        Args:
            now_s: The time in seconds.
            begun: How many requests have begun so far. A restarted coordinator may count from 0.
            waited_us: How long these had waited in total, in microseconds.
            pending: How many requests wait now.
        """
        looks = self._looks
        if looks and begun < looks[-1][1]:
            looks.clear()
        if not pending or (looks and begun > looks[-1][1]):
            self._waiting_since = None
        if pending and self._waiting_since is None:
            self._waiting_since = now_s
        looks.append((now_s, begun, waited_us))
        while len(looks) > 1 and looks[1][0] <= now_s - WINDOW_S:
            looks.popleft()
        count, total_us = begun - looks[0][1], waited_us - looks[0][2]
        mean_s = total_us / count / 1e6 if count > 0 else 0.0
        return max(mean_s, now_s - self._waiting_since if self._waiting_since is not None else 0.0)


def begun_and_waited(metrics: ServiceMetrics) -> tuple[int, int]:
    """Return over all tenants how many requests have begun, and their total wait in microseconds."""
    rows = metrics.tenants
    return int(rows[:, QUEUE.start : QUEUE.total].sum()), int(rows[:, QUEUE.total].sum())
