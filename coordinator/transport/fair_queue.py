"""Fair scheduling of connections: each has a share of a turn, measured by the time that its messages take.

Deficit round robin: a connection with many or costly messages ends its share, carries what it used beyond it as a debt,
and waits for the next turn while others are served. A connection without competition is not held back, because short
turns waste time.
"""

from __future__ import annotations

from collections import deque

from .connection import Connection

ALONE_S = 0.1  # a connection is alone if no other was served for this long


class FairQueue:
    """The connections of one side, by their shares. Times in nanoseconds, monotonic.

    Attributes:
        ready: Connections that may have a message, in turn.
        spent: Connections that may have a message, but have used their share of this turn.
        serving: The connection with the message handed out last, which has not been charged yet.
    """

    def __init__(self, share_us: int) -> None:
        """Set the share of one connection in each turn with competition."""
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
