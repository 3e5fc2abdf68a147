"""Idle sequences from the end of a request to the next one: when each may come back from the host tier.

`Returning` acts at the time in `Sequences.return_us`. It is set when an idle sequence loses its blocks, so that nothing
is scanned meanwhile.
"""

from __future__ import annotations

from ..clock import Clock
from ..deadlines import RETURNS
from .groups import Group
from .idle_times import IdleTimes
from .sequences import NO_POOL, Sequences

RETRY_US = 5_000
RETRIES = 16  # a try is repeated when the sequence has been idle for 1 / RETRIES longer
UNKNOWN_US = 1_000_000  # the first try while idle times are unknown


class IdleTracker:
    """Notes when sequences become idle, are continued, lose their blocks and are removed.

    Attributes:
        times: The idle times that were learned.
    """

    def __init__(self, clock: Clock, sequences: Sequences, groups: dict[int, Group]) -> None:
        self._clock, self._sequences, self._groups = clock, sequences, groups
        self.times = IdleTimes()

    def began(self, slot: int) -> None:
        """Note that a request on a sequence has ended."""
        s = self._sequences
        s.idle_since_us[slot], s.returned_after_us[slot] = max(1, self._clock.now_us), 0
        if s.pool[slot] == NO_POOL:
            self.try_again(slot)

    def continued(self, slot: int) -> None:
        """Note that a request continues a sequence."""
        s = self._sequences
        since_us = int(s.idle_since_us[slot])
        if since_us:
            self.times.returned(int(s.tenant[slot]), self._clock.now_us - since_us)
        group = self._groups.get(int(s.pool[slot]))
        if s.returned[slot] and group is not None and group.host is not None:
            group.host.tier.returns_used_total += 1
        s.returned[slot] = False
        s.idle_since_us[slot] = s.return_us[slot] = s.returned_after_us[slot] = 0

    def removed(self, slot: int) -> None:
        """Note that a sequence is about to be removed."""
        s = self._sequences
        since_us = int(s.idle_since_us[slot])
        if since_us:
            self.times.removed(int(s.tenant[slot]), self._clock.now_us - since_us)
        s.idle_since_us[slot] = s.return_us[slot] = 0
        s.pinned[slot] = False

    def moved_down(self, slot: int, group: Group) -> None:
        """Note that a sequence gives up its blocks in a group."""
        s = self._sequences
        if s.returned[slot]:
            s.returned[slot] = False
            if group.host is not None:
                group.host.tier.returns_wasted_total += 1
        if s.idle_since_us[slot] or s.pinned[slot]:
            self.try_again(slot)

    def idle_us(self, slot: int) -> int:
        """Return for how long a sequence has been idle. A pin is idle since its last use."""
        s = self._sequences
        return self._clock.now_us - int(s.idle_since_us[slot] or s.accessed_us[slot])

    def expected(self, slot: int) -> tuple[int, int] | None:
        """Return the idle times in us between which a sequence is expected; None if nothing is known yet."""
        counts = self.times.of(int(self._sequences.tenant[slot]))
        return counts.expected() if counts is not None else None

    def try_again(self, slot: int) -> None:
        """Try again to bring a sequence back when it has been idle a little longer, if it is expected then."""
        self.try_at(slot, self._clock.now_us + max(RETRY_US, self.idle_us(slot) // RETRIES))

    def try_at(self, slot: int, now_us: int) -> None:
        """Set the time of the next try to bring a sequence back, `now_us` or later; none if it is not expected then.

        A sequence that came back and lost its blocks again is tried when it has been idle for twice as long.
        """
        s, tenant = self._sequences, int(self._sequences.tenant[slot])
        since_us = int(s.idle_since_us[slot])
        if s.pinned[slot] or not since_us:
            at_us = max(now_us, int(s.accessed_us[slot]) + 2 * int(s.returned_after_us[slot]))
        elif (counts := self.times.of(tenant)) is None:
            at_us = max(since_us + UNKNOWN_US, now_us + (now_us - since_us))
        elif (expected := counts.expected()) is None:
            s.return_us[slot] = 0
            return
        else:
            early_us, late_us = expected
            at_us = max(now_us, since_us + early_us, since_us + 2 * int(s.returned_after_us[slot]))
            if at_us >= since_us + late_us or not counts.is_likely(at_us - since_us, late_us):
                s.return_us[slot] = 0
                return
        s.return_us[slot] = max(1, at_us)
        self._clock.deadlines.arm(RETURNS, max(1, at_us))

    def came_back(self, slot: int, late_us: int) -> None:
        """Note that a sequence comes back before its next request.

        Args:
            slot: Its slot.
            late_us: It gives its blocks up if it is idle for so long; 0: it does not.
        """
        s = self._sequences
        s.returned[slot], s.returned_after_us[slot] = True, max(1, self.idle_us(slot))
        s.return_us[slot] = int(s.idle_since_us[slot]) + late_us if late_us else 0
        if late_us:
            self._clock.deadlines.arm(RETURNS, int(s.return_us[slot]))
