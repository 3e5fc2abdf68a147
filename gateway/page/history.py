"""The last minutes as points of time, for the page's lines."""

from __future__ import annotations

from collections import deque

import msgspec

POINTS_MAX = 300
EVERY_S = 2.0


class Point(msgspec.Struct, frozen=True, array_like=True):
    """at_ms: of the wall clock. Rates are of the time since the point before; None where there is no telling.

    first_ms, between_ms: median and 99th percentile of the time to the first token and of that between tokens, of the
    requests that ended in the last minute; None where none did.
    """

    at_ms: int
    tokens_per_s: float | None
    steps_per_s: float | None
    running: int | None
    waiting: int | None
    held: float | None
    cached: float | None
    first_ms: tuple[float, float] | None
    between_ms: tuple[float, float] | None


class History:
    """The newest points, numbered from 1 on. A gap in time is a time in which nobody looked."""

    def __init__(self) -> None:
        self.number = 0
        self._points: deque[Point] = deque(maxlen=POINTS_MAX)

    def add(self, point: Point) -> None:
        """One more; the oldest goes where there are too many."""
        self._points.append(point)
        self.number += 1

    def since(self, number: int) -> list[Point]:
        """Those after the one of that number, as many as are kept."""
        missing = min(self.number - number, len(self._points))
        return [self._points[at] for at in range(len(self._points) - missing, len(self._points))]
