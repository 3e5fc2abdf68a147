"""The read side: sockets are read, some from each connection, and messages are handed out in turns.

`InputReader` reads available input and parses it. `Receiver` hands out one message of each connection in turn, for a
limited time in a turn.
"""

from __future__ import annotations

import select
from collections import deque

from kvforge.protocol.steady_clock import monotonic_ns

from . import zmtp
from .acceptor import Acceptor
from .connection import Connection
from .connections import ConnectionTable
from .poll_set import PollSet
from .receive_queue import ReceiveQueue
from .sender import Sender

READ_US = 100  # time for reading input at once
BACKOFF_READ_US = 2_000  # the same in each round of the back-off, of untrusted peers
READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR


class InputReader:
    """Reads from the sockets of one side.

    Attributes:
        partial_bytes_max: Memory for incomplete messages, of all connections together.
        watched: The loop's epoll reports input, by `note_input`; otherwise the sockets are polled all the time.
        due: Input may be available that was not read.
    """

    def __init__(
        self,
        table: ConnectionTable,
        poll_set: PollSet,
        queue: ReceiveQueue,
        sender: Sender,
        acceptor: Acceptor,
        partial_bytes_max: int,
    ) -> None:
        self._table, self._poll_set, self._queue = table, poll_set, queue
        self._sender, self._acceptor = sender, acceptor
        self.partial_bytes_max = partial_bytes_max
        self.watched, self.due = False, True
        self._inner_due = False

    def note_input(self) -> None:
        """Note that input has arrived."""
        self.due = True

    def read_available(self, now_ns: int) -> None:
        """Read available input, some from each connection, within a time limit."""
        self._table.now_ns = now_ns
        self.due = self._inner_due = False
        if self._acceptor.paused:
            self._acceptor.resume()
        poll_set, backoff = self._poll_set, self._queue.backoff
        count = len(self._table.by_descriptor) + 1
        if poll_set.serve(poll_set.outer, self._on_event, count, now_ns, READ_US):
            self.due = True
        # If time ran out before the inner epoll was checked, check it too, so that busy peers cannot starve the others.
        if (self._inner_due or self.due or backoff.troubled) and backoff.begin_round(now_ns):
            self._read_untrusted()

    def _read_untrusted(self) -> None:
        """Serve untrusted peers, and accept new connections."""
        poll_set, backoff, due = self._poll_set, self._queue.backoff, self.due
        count, for_us = len(self._table.by_descriptor) + 1, BACKOFF_READ_US if backoff.active else READ_US
        if poll_set.serve(poll_set.inner, self._on_event, count, monotonic_ns(), for_us):
            self.due = True
        if bool(backoff.again_ns) != backoff.active:
            poll_set.set_backoff(not backoff.active)
            self._queue.set_backoff(not backoff.active)
        if backoff.active:
            self.due = due

    def _on_event(self, descriptor: int, events: int) -> None:
        """Handle the events of a descriptor."""
        connection = self._table.by_descriptor.get(descriptor)
        if connection is None:
            if not self._acceptor.accept(descriptor) and descriptor == self._poll_set.inner.fileno():
                self._inner_due = True
            return
        if events & select.EPOLLHUP and connection.full:
            connection.discard()  # the peer has closed, and reads nothing more
            self._sender.resume(connection)
        elif events & select.EPOLLOUT and connection.flush(self._table.now_ns):
            self._sender.resume(connection)
        if connection.ended:
            self._table.over.append(connection)
        elif events & READABLE and not connection.full and not connection.listed:
            self._read(connection)  # a listed connection has earlier input, which is processed first
        self._poll_set.update(connection)

    def _read(self, connection: Connection) -> None:
        """Read from a connection, and parse its next message."""
        if connection.read(self._table.now_ns):
            self.due = True
        connection.head = self.next_message(connection)
        if connection.reader.key and not connection.trusted and not connection.faults and not connection.removed:
            self.set_trusted(connection, True)  # its handshake must not wait among untrusted ones
        if connection.head is not None:
            self._queue.add(connection)
        elif connection.ended:
            self._table.over.append(connection)

    def set_trusted(self, connection: Connection, trusted: bool) -> None:
        """Change whether a connection is trusted."""
        if connection.trusted != trusted:
            self._poll_set.set_trusted(connection, trusted)
            if trusted:
                self._queue.release(connection)

    def next_message(self, connection: Connection) -> list[zmtp.Frame] | None:
        """Return the next message of a connection, or None. A peer that violates the protocol is dropped."""
        table = self._table
        try:
            frames = connection.next(table.now_ns)
        except zmtp.Violation as violation:
            if violation.last:
                connection.command(violation.last, table.now_ns)
            table.drop(connection, str(violation))
            return None
        held = connection.reader.held
        if held != connection.counted:
            table.partial_bytes += held - connection.counted
            connection.counted = held
            if table.partial_bytes > self.partial_bytes_max:
                oldest = min((c for c in table.by_identity.values() if c.counted), key=lambda c: c.begun_ns)
                table.drop(oldest, f"{table.partial_bytes} bytes held for incomplete messages, this one is the oldest")
        return frames


class Receiver:
    """Hands out the messages of one side.

    Attributes:
        turn_us: Time for receiving messages in one turn; one message is always received.
        turn_begun: A message was received, or asked for, in this turn.
    """

    def __init__(
        self,
        table: ConnectionTable,
        poll_set: PollSet,
        queue: ReceiveQueue,
        reader: InputReader,
        acceptor: Acceptor,
        turn_us: int,
    ) -> None:
        self._table, self._poll_set, self._queue = table, poll_set, queue
        self._reader, self._acceptor = reader, acceptor
        self.turn_us = turn_us
        self.turn_begun, self._turn_ends_ns = False, 0

    def receive(self) -> tuple[bytes, int, list[zmtp.Frame]] | None:
        """Return the next message as (identity, descriptor, frames), or None."""
        now_ns = monotonic_ns()
        fair, backoff, reader = self._queue.fair, self._queue.backoff, self._reader
        if fair.serving is not None:
            fair.charge(now_ns)
        if not self.turn_begun:
            self._begin_turn(now_ns)
        elif now_ns >= self._turn_ends_ns:
            return None  # answer what was received before receiving more
        while True:
            queue = fair.ready
            if not queue and (reader.due or not reader.watched or backoff.held_back or fair.spent):
                queue = self._next_queue()
            if not queue:
                return None
            connection = queue.popleft()
            if connection.removed or connection.full:
                connection.listed = False
                continue  # a full connection is listed again when its queue has drained
            if queue is fair.ready and not fair.has_share(connection):
                continue
            if connection.rate is not None and not connection.rate.consume(now_ns):
                self._queue.throttled.add(connection)
                self._poll_set.update(connection)
                continue
            connection.listed = False
            frames = reader.next_message(connection)
            if frames is None:
                if connection.ended:
                    self._table.over.append(connection)
                continue
            if queue is backoff.held_back:
                backoff.count_message()
            if connection.head is not None or connection.reader.left:
                self._queue.add(connection)
            elif connection.ended:
                self._table.over.append(connection)
            fair.serve(connection, monotonic_ns())
            return connection.identity, connection.descriptor, frames

    def _begin_turn(self, now_ns: int) -> None:
        self.turn_begun = True
        self._turn_ends_ns = now_ns + self.turn_us * 1000
        queue, reader = self._queue, self._reader
        if reader.due or not reader.watched or self._acceptor.paused or queue.backoff.troubled:
            reader.read_available(now_ns)  # even if messages are left over: other peers may have input
        queue.fair.begin_turn()
        if queue.throttled.connections:
            for connection in queue.throttled.pop_due(now_ns):
                self._poll_set.update(connection)
                queue.fair.ready.append(connection)

    def _next_queue(self) -> deque[Connection]:
        """Return the queue for the next message when no connection is ready; it may be empty."""
        queue, reader = self._queue, self._reader
        if reader.due or not reader.watched:
            reader.read_available(monotonic_ns())
        if not queue.fair.ready:
            if queue.backoff.held_back and queue.backoff.may_receive:
                return queue.backoff.held_back
            if queue.fair.spent:
                queue.fair.forgive(monotonic_ns())
        return queue.fair.ready
