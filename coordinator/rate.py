"""So many messages a second: who sends more is read later, and so waits. Nothing is refused, and nothing is lost.

It is kept at the door, not in the core: whatever enters the core is written to the journal, a refusal too, and would
cost more than the message that it is meant to save. What waits in a socket costs nobody anything.
"""

from __future__ import annotations

BURST_S = 1.0  # what was not used in so long may be used at once


class Rate:
    """Of one entry of [access], all its connections together. Times in nanoseconds, monotonic."""

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._each_ns = max(1, round(1e9 / per_s))
        # A message more than `per_s` allows: at least one is always allowed.
        self._burst_ns = max(0, round(BURST_S * 1e9) - self._each_ns)
        self._paid_ns = 0  # up to then the messages that were taken have used what is allowed

    @property
    def ready_ns(self) -> int:
        """When the next message may be taken."""
        return self._paid_ns - self._burst_ns

    def take(self, now_ns: int) -> bool:
        """Counts a message. False where it has to wait: then it was not counted."""
        if now_ns < self.ready_ns:
            return False
        self._paid_ns = max(self._paid_ns, now_ns) + self._each_ns
        return True
