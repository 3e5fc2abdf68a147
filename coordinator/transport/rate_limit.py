"""Message rate limiting: a peer that exceeds its rate is read later. Nothing is refused or lost.

The limit applies at the socket rather than in the core, because every event of the core is journalled, even a refusal,
which would cost more than the limit saves. Data that waits in a socket is free.
"""

from __future__ import annotations

BURST_S = 1.0  # unused time that may be saved up


class Rate:
    """The rate limiter of one [access] entry, for all its connections. Times in nanoseconds, monotonic."""

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._each_ns = max(1, round(1e9 / per_s))
        # One message less than the burst allows, because one message is always allowed.
        self._burst_ns = max(0, round(BURST_S * 1e9) - self._each_ns)
        self._paid_ns = 0  # the allowance is used up to this time

    @property
    def ready_ns(self) -> int:
        """When the next message may be received."""
        return self._paid_ns - self._burst_ns

    def consume(self, now_ns: int) -> bool:
        """Count a message. Return False, without counting it, if it must wait."""
        if now_ns < self.ready_ns:
            return False
        self._paid_ns = max(self._paid_ns, now_ns) + self._each_ns
        return True
