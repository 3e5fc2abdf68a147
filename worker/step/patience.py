"""How long the loop may sleep while a step runs: it must not come late to the step's end, nor burn a core for nothing.

A sleep on the socket ends at a message or after whole milliseconds, a step at any time. So the loop sleeps while the
step's end is further away than a sleep is long, then looks for it without sleeping; and where the step takes much
longer than the last ones did, sleeps again.
"""

from __future__ import annotations

import time

SLEEP_MS = 1
SLEEP_NS = 2_500_000  # what a sleep of SLEEP_MS may come to: it begins with a look at shared memory as long
SPIN_NS_MAX = 20_000_000


class Patience:
    """Knows when the step under way began and how long steps take."""

    def __init__(self) -> None:
        self._usual_ns = 0
        self._began_ns = 0

    def begin(self, under_way: int) -> None:
        """A step was queued; `under_way` of them, this one included."""
        if under_way == 1:
            self._began_ns = time.monotonic_ns()

    def end(self, under_way: int) -> None:
        """A step has ended; so many are left, the first of which runs now."""
        now_ns = time.monotonic_ns()
        took_ns = now_ns - self._began_ns
        # A prompt's long step says little about the decode behind it: the shorter one counts at once.
        self._usual_ns = took_ns if took_ns < self._usual_ns else (3 * self._usual_ns + took_ns) // 4
        if under_way:
            self._began_ns = now_ns

    def wait_ms(self) -> int:
        """How long to sleep on the socket now: 0 or SLEEP_MS."""
        elapsed_ns = time.monotonic_ns() - self._began_ns
        left_ns = self._usual_ns - elapsed_ns
        return SLEEP_MS if left_ns > SLEEP_NS or left_ns < -SPIN_NS_MAX else 0
