"""Control of the garbage collector: objects alive at startup are frozen, and collections wait for idle turns.

The core creates almost no reference cycles (errors with tracebacks are the exception), so there is little to collect,
while each collection walks all live objects. Automatic collection is disabled. A collection runs when the loop is
idle, and at the latest after `TURNS_MAX` turns. Pauses are measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

TURNS_MAX = 4000
TURNS_MIN = 200


class GarbageCollector:
    """Manual collections in one process. `clock_ns` is monotonic. At most one instance may be active."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._turns = 0
        self._thaws = False
        self.collections = 0
        self.longest_us = 0.0
        self.total_us = 0.0

    def start(self) -> None:
        """Freeze all live objects and disable automatic collection.

        There is no collection first: the few hundred garbage objects left by imports are not worth 20 ms of a recovery.
        """
        self._thaws = not gc.get_freeze_count()
        gc.freeze()
        gc.disable()

    def stop(self) -> None:
        """Restore the behaviour of the collector from before. A process that had frozen objects stays frozen."""
        gc.enable()
        if self._thaws:
            gc.unfreeze()

    def turn(self, *, idle: bool) -> None:
        """Count a turn of the loop, and collect if it is time. `idle` means that no work waits."""
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
