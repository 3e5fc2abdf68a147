"""The time in the core: that of the event being applied."""

from __future__ import annotations

from .deadlines import Deadlines


class Clock:
    """The clock of the whole core. `Machine.apply` sets it, so one event has one time.

    Attributes:
        now_us: Microseconds, monotonic.
        deadlines: When time alone makes work necessary.
    """

    def __init__(self, now_us: int = 0) -> None:
        self.now_us = now_us
        self.deadlines = Deadlines()
