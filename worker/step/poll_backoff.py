"""How long the loop may sleep while a step runs, without missing the step's end and without burning a core.

A sleep on the socket ends at a message or after whole milliseconds; a step ends at any time. The loop therefore sleeps
while the step's end is further away than the longest sleep, then polls for the end without sleeping. If the step takes
much longer than the last ones did, the loop sleeps again.
"""

from __future__ import annotations

import time

SLEEP_MS = 1
SLEEP_NS = 2_500_000  # worst case of a sleep of SLEEP_MS, which polls shared memory for as long first
SPIN_NS_MAX = 20_000_000


class PollBackoff:
    """Predicts the end of the running step from the duration of earlier steps."""

    def __init__(self) -> None:
        self._usual_ns = 0
        self._began_ns = 0

    def begin(self, under_way: int) -> None:
        """Record that a step was queued. under_way: steps in flight, this one included."""
        if under_way == 1:
            self._began_ns = time.monotonic_ns()

    def end(self, under_way: int) -> None:
        """Record that a step has ended. under_way: steps still in flight; the first runs now."""
        now_ns = time.monotonic_ns()
        took_ns = now_ns - self._began_ns
        # A prompt's long step does not predict the decode after it, so a shorter duration takes effect at once.
        self._usual_ns = took_ns if took_ns < self._usual_ns else (3 * self._usual_ns + took_ns) // 4
        if under_way:
            self._began_ns = now_ns

    def wait_ms(self) -> int:
        """Return how long to sleep on the socket now: 0 or SLEEP_MS milliseconds."""
        elapsed_ns = time.monotonic_ns() - self._began_ns
        left_ns = self._usual_ns - elapsed_ns
        return SLEEP_MS if left_ns > SLEEP_NS or left_ns < -SPIN_NS_MAX else 0
