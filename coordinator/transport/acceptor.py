"""Admission of newcomers: accepting connections, and a limit on pending handshakes."""

from __future__ import annotations

import logging
import socket as sockets
from collections.abc import Sequence

from .connection import Connection, ConnectionLimits
from .connections import ConnectionTable
from .fairness import AbuseBackoff
from .listener import ACCEPTS_MAX, Endpoint, Listener
from .poll_set import PollSet

SPEAK_S = 0.1  # a new connection does not count as silent before
BACKOFF_ACCEPTS_MAX = 32  # accepts on each endpoint in each round of the back-off
log = logging.getLogger("coordinator")


class Acceptor:
    """The endpoints of one side, and the connections that are accepted there.

    Attributes:
        pending_max: Connections with a pending handshake; one is evicted if there are more.
        paused: An endpoint cannot accept now; `resume` tries again.
        accepted: Connections accepted so far.
    """

    def __init__(
        self,
        table: ConnectionTable,
        poll_set: PollSet,
        backoff: AbuseBackoff,
        limits: ConnectionLimits,
        pending_max: int,
    ) -> None:
        self._table, self._poll_set, self._backoff = table, poll_set, backoff
        self._limits, self.pending_max = limits, pending_max
        self._listeners: dict[int, Listener] = {}
        self.paused, self.accepted = False, 0

    def listen(self, endpoints: Sequence[Endpoint]) -> None:
        """Bind each endpoint.

        Raises:
            InvalidConfiguration: An endpoint cannot be used.
            CoordinatorInUse: Another process listens there.
        """
        for endpoint in endpoints:
            listener = Listener(endpoint, self._poll_set.inner)
            self._listeners[listener.fileno()] = listener

    @property
    def endpoints(self) -> list[str]:
        """The addresses of the endpoints."""
        return [listener.address for listener in self._listeners.values()]

    def accept(self, descriptor: int) -> bool:
        """Accept waiting connections. Return whether the descriptor is that of an endpoint."""
        listener = self._listeners.get(descriptor)
        if listener is None:
            return False
        for socket in listener.accept(self._table.now_ns, BACKOFF_ACCEPTS_MAX if self._backoff.active else ACCEPTS_MAX):
            self._welcome(socket, listener.endpoint)
        self.paused = self.paused or listener.again_ns > 0
        return True

    def resume(self) -> None:
        """Resume accepting where it had failed, if it is time."""
        for listener in self._listeners.values():
            if listener.again_ns:
                listener.look_again(self._table.now_ns)
        self.paused = any(listener.again_ns for listener in self._listeners.values())

    def close(self) -> None:
        """Stop listening, and remove the socket files. Idempotent."""
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.close()

    def _welcome(self, socket: sockets.socket, endpoint: Endpoint) -> None:
        """Add a connection, as untrusted until it is admitted."""
        table = self._table
        if endpoint.users is not None and (problem := endpoint.users.problem(socket)):
            log.warning("%s connection refused: %s", table.kind, problem)
            self._backoff.note_trouble(table.now_ns)
            socket.close()
            return
        if len(table.pending) >= self.pending_max:
            table.drop(self._least_promising(), "evicted: too many pending handshakes")
        socket.setblocking(False)
        self.accepted += 1
        connection = Connection(socket, b"%d" % self.accepted, endpoint, self._limits, table.now_ns)
        table.add(connection)
        connection.command(connection.reader.greeting, table.now_ns)
        if connection.ended:
            table.over.append(connection)
        self._poll_set.update(connection)

    def _least_promising(self) -> Connection:
        """Return the pending connection to evict: the oldest silent, else the oldest without a key, else the oldest."""
        oldest = None
        for connection in self._table.pending.values():
            if self._table.now_ns - connection.opened_ns < SPEAK_S * 1e9:
                break
            if not connection.reader.greeted:
                return connection
        for connection in self._table.pending.values():
            if not connection.reader.key:
                return connection
            oldest = oldest or connection
        assert oldest is not None, "a handshake is pending"
        return oldest
