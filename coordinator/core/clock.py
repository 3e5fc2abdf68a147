"""What time it is in the core: that of the event which is applied."""

from __future__ import annotations


class Clock:
    """One for the whole core. `Machine.apply` sets it and everyone reads it, so one event has one time.

    now_us: microseconds, monotonic.
    """

    def __init__(self, now_us: int = 0) -> None:
        self.now_us = now_us
