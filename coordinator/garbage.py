"""The garbage collector, kept out of the way: what is there at the start is frozen, the rest waits for idle turns.

The core makes next to no reference cycles (errors with tracebacks are the exception), so there is little to collect;
what a collection costs is the walk over everything that lives. Automatic collections are off; one runs when the loop
has nothing else to do, and at the latest after so many turns. Their pauses are counted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

TURNS_MAX = 4000
TURNS_MIN = 200


class GarbageCollector:
    """Collections of one process. clock: nanoseconds, monotonic. Not more than one at a time."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._turns = 0
        self.collections = 0
        self.longest_us = 0.0
        self.total_us = 0.0

    def start(self) -> None:
        """What lives now is never looked at again, and nothing is collected unless asked for.

        Nor is it looked through now: a few hundred objects that imports have left are not worth 20 ms of a recovery.
        """
        gc.freeze()
        gc.disable()

    def stop(self) -> None:
        """The collector is as it was."""
        gc.enable()
        gc.unfreeze()

    def turn(self, *, idle: bool) -> None:
        """A turn of the loop has ended. idle: nothing waits to be done."""
        self._turns += 1
        if self._turns >= TURNS_MAX or (idle and self._turns >= TURNS_MIN):
            self._turns = 0
            self._collect()

    def _collect(self) -> None:
        started = self._clock_ns()
        gc.collect()
        pause_us = (self._clock_ns() - started) / 1e3
        self.collections += 1
        self.total_us += pause_us
        self.longest_us = max(self.longest_us, pause_us)
