"""The socket under a session. Nothing here waits: the two clients differ only in how they wait.

One ZeroMQ socket serves one connection: when the monitor reports that the coordinator is gone, the socket is closed
and the next command opens a new one. So a command can never slip onto a new connection ahead of its `Hello`.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvforge.protocol import transport
from kvforge.protocol.codec import encode
from kvforge.protocol.errors import CoordinatorUnavailable, InvalidConfiguration, ProtocolError
from kvforge.protocol.messages import Goodbye, Message

from .session import Session, Watched

MESSAGES_PER_PUMP_MAX = 256
GOODBYE_LINGER_MS = 200


def _nothing() -> None: ...


class Link(Watched):
    """One connection of a session. Waiters on the link itself are woken whenever it opens, moves or closes."""

    def __init__(self, session: Session, opened: Callable[[], None] = _nothing) -> None:
        super().__init__()
        self._session = session
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._opened = opened
        self.closing: Callable[[], None] = _nothing
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self.socket is not None

    def open(self) -> None:
        """Starts connecting. Raises InvalidConfiguration if the endpoint is not one."""
        assert self.socket is None, "a link is opened once per connection"
        if self._context is None:
            self._context = zmq.Context()
        self.socket = transport.dealer(self._context)
        self.monitor = self.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        try:
            self.socket.connect(self._session.endpoint)
        except zmq.ZMQError as error:
            self.close()
            problem = f"cannot connect to {self._session.endpoint!r}: {error.strerror}"
            raise InvalidConfiguration("endpoint", problem) from None
        self._opened()

    def writable(self) -> bool:
        """True once a coordinator has taken the connection and there is room for one more message."""
        return self.socket is not None and bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, message: Message) -> bool:
        """Sends, or returns False if that is not possible now."""
        if self.socket is None:
            return False
        try:
            self.socket.send_multipart(encode(message), flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def pump(self) -> bool:
        """Takes in what has arrived; returns True if there may be more."""
        more = self._drain()
        if self.monitor is None or more:
            return more
        disconnected = False
        while (event := _receive(self.monitor)) is not None:
            disconnected |= parse_monitor_message(event)["event"] == zmq.Event.DISCONNECTED
        if disconnected:
            # What arrived before the end still counts.
            while self._drain():
                pass
            self.fail(
                CoordinatorUnavailable(
                    f"the coordinator at {self._session.endpoint} is gone: the connection closed. "
                    "See its log; `kvforge up` starts it again"
                )
            )
        self.wake()
        return False

    def fail(self, error: CoordinatorUnavailable | ProtocolError) -> None:
        """Ends the connection: whatever waits on it fails with `error`."""
        self.close()
        self._session.lost(error)

    def goodbye(self) -> None:
        """Tells the coordinator, if it can be told at once, that this client leaves; then frees everything."""
        if self.socket is not None and self._session.welcome is not None and self.send(Goodbye()):
            # A linger of zero would throw the message away before ZeroMQ's I/O thread has written it.
            self.socket.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)
        self.close()
        if self._context is not None:
            self._context.term()
            self._context = None

    def close(self) -> None:
        """Closes the sockets of this connection, if any."""
        if self.socket is None or self.monitor is None:
            return
        self.closing()
        self.closing = _nothing
        socket, monitor = self.socket, self.monitor
        self.socket = self.monitor = None
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close()
        self.wake()

    def _drain(self) -> bool:
        for _ in range(MESSAGES_PER_PUMP_MAX):
            if self.socket is None or (frames := _receive(self.socket)) is None:
                return False
            try:
                replies = self._session.receive(frames)
            except ProtocolError as error:
                where = f"what came from {self._session.endpoint} is not a coordinator's message"
                self.fail(ProtocolError(f"{where} ({error}); is it a kvforge of another version?"))
                return False
            for reply in replies:
                self.send(reply)
        return True


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(flags=zmq.DONTWAIT)
    except zmq.Again:
        return None
