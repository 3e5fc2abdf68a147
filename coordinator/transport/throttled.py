"""Connections that have exceeded their message rate and must wait.

Their sockets are not polled meanwhile, because these would report pending input all the time.
"""

from __future__ import annotations

from .connection import Connection


class Throttled:
    """The rate-limited connections of one side. Times in nanoseconds, monotonic."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        """Add a connection with a message that must wait."""
        connection.slowed = True
        self._connections.append(connection)

    def take_due(self, now_ns: int) -> list[Connection]:
        """Remove and return the connections that may be served again.

        They count as heard now, because their input was not observed meanwhile.
        """
        slowed, self._connections = self._connections, []
        due: list[Connection] = []
        for connection in slowed:
            if connection.rate is not None and now_ns < connection.rate.ready_ns:
                self._connections.append(connection)
                continue
            connection.slowed, connection.heard_ns = False, now_ns
            due.append(connection)
        return due

    def ready_ns(self) -> list[int]:
        """Return when each connection may be served again."""
        return [connection.rate.ready_ns for connection in self._connections if connection.rate is not None]
