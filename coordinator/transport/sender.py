"""The write side: messages are written at once, or together with others at the end of the turn."""

from __future__ import annotations

import select

from .connection import Connection
from .connections import ConnectionTable
from .outbox import Frames, Sent
from .poll_set import PollSet
from .receive_queue import ReceiveQueue

BATCH_MAX = 8  # messages batched for one peer, which can process the first while the turn writes the next


class Sender:
    """Sends to the connections of one side, and resumes those with a drained send queue.

    Attributes:
        unsent: Connections with batched messages.
        resumed: A full connection was resumed since the end of the last turn; waiting messages can be sent to it.
    """

    def __init__(self, table: ConnectionTable, poll_set: PollSet, queue: ReceiveQueue, batch: bool) -> None:
        """Create the write side; with `batch`, messages wait for `flush`."""
        self._table, self._poll_set, self._queue, self._batch = table, poll_set, queue, batch
        self.unsent: set[Connection] = set()
        self.resumed = False

    def send(self, connection: Connection, frames: Frames) -> Sent:
        """Send without waiting."""
        sent = connection.send(frames, self._table.now_ns)
        if connection.queued_bytes:
            if connection.registered & select.EPOLLOUT:
                pass  # epoll reports when the socket accepts data again
            elif self._batch and connection.queued_messages < BATCH_MAX:
                self.unsent.add(connection)
            else:
                self.write(connection)
        return sent

    def write(self, connection: Connection) -> None:
        """Write queued data as far as the socket accepts it. A connection that has ended is removed."""
        if connection.flush(self._table.now_ns):
            self.resume(connection)
        if connection.ended:
            self._table.end(connection)
        elif connection.queued_bytes or connection.full or connection.registered != select.EPOLLIN:
            self._poll_set.update(connection)

    def resume(self, connection: Connection) -> None:
        """Resume a connection with a drained queue: process its pending input, and let waiting messages be sent."""
        self.resumed = True
        if connection.holds:
            self._queue.add(connection)

    def flush(self) -> None:
        """Write the messages that were batched."""
        unsent, self.unsent = self.unsent, set()
        for connection in unsent:
            if not connection.removed:
                self.write(connection)
