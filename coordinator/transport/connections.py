"""The connections of one side: their table, and their ends.

A disconnected peer still gets what was sent before: its socket closes `LINGER_S` later, because a ZeroMQ peer discards
undelivered input when the connection ends.
"""

from __future__ import annotations

import logging
from collections import deque

from .connection import Connection
from .fairness import AbuseBackoff
from .poll_set import PollSet

LINGER_S = 0.5
LINGERING_MAX = 8
log = logging.getLogger("coordinator")


class ConnectionTable:
    """The connections of one side. A connection has a number once it is admitted.

    Attributes:
        kind: The kind of the peers, for the log.
        by_identity: All connections.
        by_number: The admitted ones.
        by_descriptor: All connections, by the descriptors of their sockets.
        pending: Those with a pending handshake, oldest first.
        partial_bytes: Bytes of all incomplete messages.
        over: Connections that have ended, with their last message handed out; `end_over` removes them.
        gone: The numbers of admitted connections that ended, until they are reported.
        lingering: Removed connections with a socket that is still open, oldest first.
        now_ns: The time of the last look at the sockets, which is exact enough for time limits.
    """

    def __init__(self, kind: str, poll_set: PollSet, backoff: AbuseBackoff, now_ns: int) -> None:
        self.kind, self._poll_set, self._backoff = kind, poll_set, backoff
        self.by_identity: dict[bytes, Connection] = {}
        self.by_number: dict[int, Connection] = {}
        self.by_descriptor: dict[int, Connection] = {}
        self.pending: dict[bytes, Connection] = {}
        self.partial_bytes, self.now_ns = 0, now_ns
        self.over: list[Connection] = []
        self.gone: list[int] = []
        self.lingering: deque[Connection] = deque()

    def add(self, connection: Connection) -> None:
        """Add a connection with a pending handshake."""
        self.by_identity[connection.identity] = self.pending[connection.identity] = connection
        self.by_descriptor[connection.descriptor] = connection

    def admit(self, connection: Connection, number: int) -> None:
        """Give a connection its number."""
        connection.number = number
        self.by_number[number] = self.pending.pop(connection.identity)

    def drop(self, connection: Connection, why: str) -> None:
        """Disconnect a peer that broke a limit, with a line in the log."""
        peer = f"connection {connection.number}" if connection.number else "connection that is not admitted"
        log.warning("%s %s dropped: %s", self.kind, peer, why, extra={"peer": connection.number})
        self._backoff.note_trouble(self.now_ns)
        self.end(connection)

    def end(self, connection: Connection) -> None:
        """End a connection, to be reported in `gone`. Idempotent."""
        if not connection.removed:
            if connection.number:
                self.gone.append(connection.number)
            self._close(connection)

    def end_over(self) -> None:
        """End the connections that are over."""
        over, self.over = self.over, []
        for connection in over:
            self.end(connection)

    def linger(self, connection: Connection) -> None:
        """Disconnect a peer without reporting it. Earlier messages still reach it if it reads."""
        connection.flush(self.now_ns)
        self._remove(connection)
        connection.moved_ns = self.now_ns
        self.lingering.append(connection)
        if len(self.lingering) > LINGERING_MAX:
            self.lingering.popleft().socket.close()

    def close_lingering(self) -> None:
        """Close the sockets that have lingered for long enough."""
        while self.lingering and self.now_ns - self.lingering[0].moved_ns > LINGER_S * 1e9:
            self.lingering.popleft().socket.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for connection in list(self.by_identity.values()):
            self._close(connection)
        while self.lingering:
            self.lingering.popleft().socket.close()

    def _close(self, connection: Connection) -> None:
        self._remove(connection)
        connection.socket.close()

    def _remove(self, connection: Connection) -> None:
        """Remove all references to a connection; its socket stays open."""
        identity = connection.identity
        del self.by_identity[identity], self.by_descriptor[connection.descriptor]
        self.pending.pop(identity, None)
        self.by_number.pop(connection.number, None)
        self.partial_bytes -= connection.counted
        connection.removed = True
        self._poll_set.update(connection)
        connection.head = None
        connection.discard()
