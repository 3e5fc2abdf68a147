"""How long requests wait in a coordinator's queue, from what it counts."""

from __future__ import annotations

from collections import deque

from kvforge.protocol.meters import QUEUE
from kvforge.protocol.numbers import Numbers

WINDOW_S = 10.0


class QueueTime:
    """The mean of those that began within the last WINDOW_S; or, where it is longer, how long nobody has begun while
    some wait: so long the oldest of them has waited at least.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, int]] = deque()  # when; how many had begun; how long they had waited, us
        self._waiting_since: float | None = None

    def look(self, now_s: float, begun: int, waited_us: int, pending: int) -> float:
        """Seconds. begun, waited_us: of all requests so far, which a coordinator that starts anew may count from 0."""
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


def begun_and_waited(numbers: Numbers) -> tuple[int, int]:
    """Of all tenants: how many requests have begun, and how long they had waited in all, in microseconds."""
    rows = numbers.tenants
    return int(rows[:, QUEUE.start : QUEUE.total].sum()), int(rows[:, QUEUE.total].sum())
