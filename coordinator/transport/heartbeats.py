"""Heartbeats to all peers, and the time limits of their connections, which are checked at the same time."""

from __future__ import annotations

from collections.abc import Callable

from kvforge.protocol import transport

from . import zmtp
from .connections import ConnectionTable
from .sender import Sender


class Heartbeats:
    """The heartbeats of one side. Times in nanoseconds, monotonic.

    Attributes:
        interval_ns: The time between two heartbeats.
        sent_ns: When the last ones were sent.
    """

    def __init__(
        self,
        table: ConnectionTable,
        sender: Sender,
        idle_timeout_ms: int,
        on_silent: Callable[[int], None],
        now_ns: int,
    ) -> None:
        """Set the limits.

        Args:
            table: The connections.
            sender: Writes the heartbeats.
            idle_timeout_ms: A peer that sends nothing for this long, not even heartbeats, counts as gone.
            on_silent: Called with the number of an admitted connection that is about to be dropped for silence.
            now_ns: The time; the first heartbeats are due one interval later.
        """
        # At least four heartbeats, which the peer answers, fall within the timeout.
        self.interval_ns = min(transport.HEARTBEAT_INTERVAL_MS * 1_000_000, idle_timeout_ms * 1_000_000 // 4)
        self.sent_ns = now_ns
        self._table, self._sender, self._on_silent = table, sender, on_silent
        self._idle_timeout_ns = idle_timeout_ms * 1_000_000
        self._ping = zmtp.ping(transport.HEARTBEAT_TIMEOUT_MS)

    def beat(self, now_ns: int) -> None:
        """Send heartbeats, and end connections that exceed a time limit. Time without checks does not count."""
        late_ns = now_ns - self.sent_ns - 2 * self.interval_ns
        self.sent_ns = now_ns
        for connection in list(self._table.by_identity.values()):
            if late_ns > 0:
                connection.put_off(late_ns)
            problem, silent = connection.problem(now_ns, self._idle_timeout_ns)
            if problem:
                if silent and connection.number:
                    self._on_silent(connection.number)
                self._table.drop(connection, problem)
            elif connection.reader.ready and not connection.queued_bytes:
                connection.command(connection.reader.sealed(self._ping), now_ns)
                self._sender.write(connection)
