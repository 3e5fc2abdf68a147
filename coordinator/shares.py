"""Who is served next: each connection has a share of a turn, by how long its messages take.

Deficit round robin: one that sends as fast as it can, or what is costly, ends the turn with its share, owes what it
took beyond it, and waits for the next turn while others are served. Who is alone is not held back: short turns cost
time.
"""

from __future__ import annotations

from collections import deque

from .connection import Connection

ALONE_S = 0.1  # who alone has sent anything for so long is alone


class Shares:
    """Of one side. Times in nanoseconds, monotonic.

    ready: those that may have a message, in turn. spent: so may these, but they have had their share of this turn.
    serving: whose message was handed out last, and has not been charged for yet.
    """

    def __init__(self, share_us: int) -> None:
        """share_us: of one connection, in each turn in which others are there."""
        self.share_ns = share_us * 1000
        self.ready: deque[Connection] = deque()
        self.spent: deque[Connection] = deque()
        self.serving: Connection | None = None
        self._turn, self._handed_out = 0, False
        self._last: Connection | None = None  # who was served last, and since when it is always the same one
        self._served_ns = self._changed_ns = 0

    def begin_turn(self) -> None:
        """Everybody gets another share."""
        self._turn += 1
        self._handed_out = False
        if self.spent:
            self._return_spent()

    def has_share(self, connection: Connection) -> bool:
        """Whether some is left of its share of this turn, and of what it owes of those before. Otherwise it waits."""
        if turns := self._turn - connection.share_turn:
            connection.share_turn = self._turn
            connection.share_ns = min(self.share_ns, connection.share_ns + turns * self.share_ns)
        if connection.share_ns > 0:
            return True
        self.spent.append(connection)
        return False

    def serve(self, connection: Connection, now_ns: int) -> None:
        """A message of its was handed out."""
        self.serving, self._served_ns, self._handed_out = connection, now_ns, True
        if connection is not self._last:
            self._last, self._changed_ns = connection, now_ns

    def charge(self, now_ns: int) -> None:
        """Whoever is being served pays for the time that it took."""
        if self.serving is not None:
            self.serving.share_ns -= now_ns - self._served_ns
            self.serving = None

    def forgive(self, now_ns: int) -> None:
        """Nobody else wants anything: those without a share are served, where nobody was in this turn, or for a while
        nobody else in any."""
        if not self._handed_out or now_ns - self._changed_ns > ALONE_S * 1e9:
            for connection in self.spent:
                connection.share_ns = self.share_ns
            self._return_spent()

    def _return_spent(self) -> None:
        self.ready += self.spent
        self.spent.clear()
