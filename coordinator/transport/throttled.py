"""Connections that have exceeded their message rate and must wait.

Their sockets are not polled meanwhile, because these would report pending input all the time.
"""

from __future__ import annotations

from .connection import Connection


class Throttled:
    """The rate-limited connections of one side. Times in nanoseconds, monotonic.

    Attributes:
        connections: The connections that wait.
    """

    def __init__(self) -> None:
        self.connections: list[Connection] = []

    def add(self, connection: Connection) -> None:
        """Add a connection with a message that must wait."""
        connection.slowed = True
        self.connections.append(connection)

    def take_due(self, now_ns: int) -> list[Connection]:
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
