"""A monotonic clock that leaves out the time in which this process itself stood still.

A process that is stopped (SIGSTOP), paused with its virtual machine or starved of its core observes nothing. When it
runs again, the plain monotonic clock reports that all its peers have been silent for that long, and every lease,
deadline and timeout is over at once. This clock does not advance meanwhile, so a peer is judged by the time in which
it was observed.

The clock detects a standstill as a gap between two of its readings. Each loop that compares times therefore reads it
at least every `WAIT_S_MAX` while it waits. A longer gap counts as `COUNTED_S`, so that time always advances.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S_MAX = 1.0
STANDSTILL_S, COUNTED_S = 1.5, 0.1


class SteadyClock:
    """A clock with readings that never decrease, even across threads."""

    def __init__(self, read_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Start the clock.

        Args:
            read_ns: The underlying monotonic clock, in nanoseconds.
        """
        self._read_ns = read_ns
        # One tuple, replaced as a whole: a race between two threads cannot count a standstill twice.
        self._state = read_ns(), 0  # the last reading of the underlying clock, what was left out so far

    def now_ns(self) -> int:
        """Return the steady time in nanoseconds; the zero point has no meaning."""
        read_ns, left_out_ns = self._state
        now_ns = self._read_ns()
        if (gap_ns := now_ns - read_ns) > STANDSTILL_S * 1e9:
            left_out_ns += gap_ns - int(COUNTED_S * 1e9)
        self._state = now_ns, left_out_ns
        return now_ns - left_out_ns

    def now_s(self) -> float:
        """Return the steady time in seconds, as `time.monotonic` does."""
        return self.now_ns() / 1e9

    def left_out_ns(self) -> int:
        """Return how much time was left out so far, in nanoseconds, after a new reading."""
        self.now_ns()
        return self._state[1]


_PROCESS = SteadyClock()
monotonic_ns = _PROCESS.now_ns
monotonic = _PROCESS.now_s
left_out_ns = _PROCESS.left_out_ns
