"""Back-off against abuse: untrusted peers are served at a low rate while limits are broken continually.

A crowd that breaks limits, is disconnected and reconnects would otherwise keep a core busy on both sides, and honest
peers would compete for the processor. With the back-off, it waits with full sockets and costs a few per cent. A peer is
trusted once it was admitted or has proved a key, until it sends something invalid; trusted peers are not affected.
Occasional violations do not trigger the back-off, so that a single faulty peer does not delay newcomers. Each round
accepts many connections and processes all available input, so a newcomer with a key waits for a few rounds rather than
for a queue of silent connections.
"""

from __future__ import annotations

TROUBLED_S = 1.0  # the back-off starts after more than TROUBLES_MAX violations within this time
TROUBLES_MAX = 16
PACE_US = 20_000
ACCEPTS_A_LOOK, LOOK_US = 32, 2_000  # accepts on each endpoint, and total time, in each round
MESSAGES_MAX = 2  # messages of untrusted peers in each round


class AbuseBackoff:
    """The back-off of one socket. Times in nanoseconds, monotonic.

    Attributes:
        again_ns: When untrusted peers are served again; 0 without back-off.
        troubled: Limits are broken continually.
    """

    def __init__(self) -> None:
        self.again_ns, self.troubled = 0, False
        self._calm_ns = 0
        self._troubles, self._troubles_end_ns = 0, 0
        self._messages_left = 0

    def note_trouble(self, now_ns: int) -> None:
        """Count a violation."""
        if now_ns >= self._troubles_end_ns:
            self._troubles, self._troubles_end_ns = 0, now_ns + int(TROUBLED_S * 1e9)
        self._troubles += 1
        if self._troubles > TROUBLES_MAX:
            self._calm_ns, self.troubled = now_ns + int(TROUBLED_S * 1e9), True

    def begins(self, now_ns: int) -> bool:
        """Return whether untrusted peers may be served now."""
        if now_ns < self.again_ns:
            return False
        self.troubled = now_ns < self._calm_ns
        self.again_ns = now_ns + PACE_US * 1000 if self.troubled else 0
        self._messages_left = MESSAGES_MAX
        return True

    @property
    def hears(self) -> bool:
        """Whether another message of untrusted peers may be handed out."""
        return not self.again_ns or self._messages_left > 0

    def heard(self) -> None:
        """Count a message that was handed out."""
        self._messages_left -= 1
