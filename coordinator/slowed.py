"""Who has sent more messages than its rate allows: its next one is for later.

Until then its socket is not looked at: it would say all the time that more has come.
"""

from __future__ import annotations

from .connection import Connection


class Slowed:
    """Of one side. Times in nanoseconds, monotonic."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        """It has a message, for which it is too soon."""
        connection.slowed = True
        self._connections.append(connection)

    def take_due(self, now_ns: int) -> list[Connection]:
        """Those whose time has come: they are served as all others are. What they sent meanwhile was not seen, so they
        were not silent."""
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
        """When the time of each comes."""
        return [connection.rate.ready_ns for connection in self._connections if connection.rate is not None]
