"""The last minutes as time series for the page's charts."""

from __future__ import annotations

from collections import deque

import msgspec

POINTS_MAX = 300
EVERY_S = 2.0


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One sample of the charts. A rate covers the time since the previous point and is None where it is unknown.

    Attributes:
        at_ms: The wall clock, in ms since 1970.
        tokens_per_s: Generated tokens.
        steps_per_s: Steps.
        running: Running requests.
        waiting: Queued requests.
        held: The share of blocks that are referenced.
        cached: The share of blocks that are cached.
        first_ms: Median and 99th percentile of the time to the first token, over the requests that ended in the last
            minute; None if there were none.
        between_ms: The same of the time between tokens.
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
    """The newest points, numbered from 1 on. A gap in time is a period without viewers."""

    def __init__(self) -> None:
        self.number = 0
        self._points: deque[Point] = deque(maxlen=POINTS_MAX)

    def add(self, point: Point) -> None:
        """Append a point and drop the oldest if there are too many."""
        self._points.append(point)
        self.number += 1

    def since(self, number: int) -> list[Point]:
        """Return the points after point `number`, as far as they are kept."""
        missing = min(self.number - number, len(self._points))
        return [self._points[at] for at in range(len(self._points) - missing, len(self._points))]
