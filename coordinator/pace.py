"""How often those without standing are looked at: always, but while bounds are broken all the time only now and then.

A crowd that breaks bounds, is disconnected and comes back is served as fast as it sends, and so keeps a core busy, and
its own one too: honest peers then wait for the processor, not for their turn. Paced, it waits with full sockets, and
costs a few per cent. A peer that was admitted or has proved a key, and has sent nothing wrong since, has standing, and
is not paced; nor is any while bounds are broken now and then only: a neighbour with a fault must not cost newcomers
their time. Each paced look accepts many at once and has time for all that have come, so a newcomer that is about to
prove its key waits for a few looks, and not for a queue of silent connections.
"""

from __future__ import annotations

TROUBLED_S = 1.0  # bounds are broken all the time where it is more than TROUBLES_MAX times in such a time
TROUBLES_MAX = 16
PACE_US = 20_000
ACCEPTS_A_LOOK, LOOK_US = 32, 2_000  # of each door, and in all, of every PACE_US
MESSAGES_MAX = 2  # that are taken of them in such a time


class Pace:
    """Of one socket. Times in nanoseconds, monotonic.

    again_ns: when those without standing are looked at again; 0: always. troubled: bounds are broken all the time.
    """

    def __init__(self) -> None:
        self.again_ns, self.troubled = 0, False
        self._calm_ns = 0
        self._troubles, self._troubles_end_ns = 0, 0
        self._messages_left = 0

    def note_trouble(self, now_ns: int) -> None:
        """Somebody broke a bound."""
        if now_ns >= self._troubles_end_ns:
            self._troubles, self._troubles_end_ns = 0, now_ns + int(TROUBLED_S * 1e9)
        self._troubles += 1
        if self._troubles > TROUBLES_MAX:
            self._calm_ns, self.troubled = now_ns + int(TROUBLED_S * 1e9), True

    def begins(self, now_ns: int) -> bool:
        """Whether those without standing are to be looked at, now."""
        if now_ns < self.again_ns:
            return False
        self.troubled = now_ns < self._calm_ns
        self.again_ns = now_ns + PACE_US * 1000 if self.troubled else 0
        self._messages_left = MESSAGES_MAX
        return True

    @property
    def hears(self) -> bool:
        """Whether another message of theirs may be handed out."""
        return not self.again_ns or self._messages_left > 0

    def heard(self) -> None:
        """One was."""
        self._messages_left -= 1
