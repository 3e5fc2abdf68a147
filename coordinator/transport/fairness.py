"""Fair reception: what limits how often a connection is served, so that no peer delays the others.

- `FairQueue`: each connection has a share of a turn.
- `Throttled`: a connection that exceeded its message rate waits.
- `AbuseBackoff`: untrusted peers are served at a low rate while limits are broken continually.
"""

from __future__ import annotations

from collections import deque

from .connection import Connection

ALONE_S = 0.1  # a connection is alone if no other was served for this long
TROUBLED_S = 1.0  # the back-off starts after more than TROUBLES_MAX violations within this time
TROUBLES_MAX = 16
PACE_US = 20_000  # between two rounds of the back-off
MESSAGES_MAX = 2  # messages of untrusted peers in each round


class FairQueue:
    """The connections of one side, by their shares. Times in nanoseconds, monotonic.

    Deficit round robin, measured by the time that messages take: a connection with many or costly messages ends its
    share, carries what it used beyond it as a debt, and waits for the next turn while others are served. A connection
    without competition is not held back, because short turns waste time.

    Attributes:
        share_ns: The share of one connection in each turn with competition.
        ready: Connections that may have a message, in turn.
        spent: Connections that may have a message, but have used their share of this turn.
        serving: The connection with the message handed out last, which has not been charged yet.
    """

    def __init__(self, share_us: int) -> None:
        self.share_ns = share_us * 1000
        self.ready: deque[Connection] = deque()
        self.spent: deque[Connection] = deque()
        self.serving: Connection | None = None
        self._turn, self._handed_out = 0, False
        self._last: Connection | None = None  # the connection served last; _changed_ns: since when it is the same
        self._served_ns = self._changed_ns = 0

    def begin_turn(self) -> None:
        """Give every connection another share."""
        self._turn += 1
        self._handed_out = False
        if self.spent:
            self._return_spent()

    def has_share(self, connection: Connection) -> bool:
        """Return whether the connection has time left. Otherwise it waits for the next turn."""
        if turns := self._turn - connection.share_turn:
            connection.share_turn = self._turn
            connection.share_ns = min(self.share_ns, connection.share_ns + turns * self.share_ns)
        if connection.share_ns > 0:
            return True
        self.spent.append(connection)
        return False

    def serve(self, connection: Connection, now_ns: int) -> None:
        """Record that a message of the connection was handed out."""
        self.serving, self._served_ns, self._handed_out = connection, now_ns, True
        if connection is not self._last:
            self._last, self._changed_ns = connection, now_ns

    def charge(self, now_ns: int) -> None:
        """Charge the connection that is being served for the elapsed time."""
        if self.serving is not None:
            self.serving.share_ns -= now_ns - self._served_ns
            self.serving = None

    def forgive(self, now_ns: int) -> None:
        """Serve connections without a share after all, if no other was served in this turn, or for a while."""
        if not self._handed_out or now_ns - self._changed_ns > ALONE_S * 1e9:
            for connection in self.spent:
                connection.share_ns = self.share_ns
            self._return_spent()

    def _return_spent(self) -> None:
        self.ready += self.spent
        self.spent.clear()


class Throttled:
    """The connections of one side that exceeded their message rate. Times in nanoseconds, monotonic.

    Their sockets are not polled meanwhile, because these would report pending input all the time.

    Attributes:
        connections: Those that wait.
    """

    def __init__(self) -> None:
        self.connections: list[Connection] = []

    def add(self, connection: Connection) -> None:
        """Add a connection with a message that must wait."""
        connection.slowed = True
        self.connections.append(connection)

    def pop_due(self, now_ns: int) -> list[Connection]:
        """Remove and return the connections that may be served again.

        They count as heard now, because their input was not observed meanwhile.
        """
        slowed, self.connections = self.connections, []
        due: list[Connection] = []
        for connection in slowed:
            if connection.rate is not None and now_ns < connection.rate.ready_ns:
                self.connections.append(connection)
                continue
            connection.slowed, connection.heard_ns = False, now_ns
            due.append(connection)
        return due

    def ready_ns(self) -> list[int]:
        """Return when each connection may be served again."""
        return [connection.rate.ready_ns for connection in self.connections if connection.rate is not None]


class AbuseBackoff:
    """The back-off of one side against abuse. Times in nanoseconds, monotonic.

    A crowd that breaks limits, is disconnected and reconnects would otherwise keep a core busy on both sides, and
    honest peers would compete for the processor. With the back-off, it waits with full sockets and costs a few per
    cent. A peer is trusted once it was admitted or has proved a key, until it sends something invalid; trusted peers
    are not affected. Occasional violations do not trigger the back-off, so that a single faulty peer does not delay
    newcomers. Each round accepts many connections and processes all available input, so a newcomer with a key waits for
    a few rounds rather than for a queue of silent connections.

    Attributes:
        active: Untrusted peers are held back now; `receiver.InputReader` updates it after each round.
        held_back: Untrusted connections that may have a message, while the back-off is active.
        again_ns: When the next round begins; 0 without back-off.
        troubled: Limits are broken continually.
    """

    def __init__(self) -> None:
        self.active = self.troubled = False
        self.held_back: deque[Connection] = deque()
        self.again_ns = 0
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

    def begin_round(self, now_ns: int) -> bool:
        """Return whether untrusted peers may be served now."""
        if now_ns < self.again_ns:
            return False
        self.troubled = now_ns < self._calm_ns
        self.again_ns = now_ns + PACE_US * 1000 if self.troubled else 0
        self._messages_left = MESSAGES_MAX
        return True

    @property
    def may_receive(self) -> bool:
        """Whether another message of untrusted peers may be handed out."""
        return not self.again_ns or self._messages_left > 0

    def count_message(self) -> None:
        """Count a message of an untrusted peer that was handed out."""
        self._messages_left -= 1
