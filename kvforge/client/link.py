"""The socket under a session. Nothing here waits: the two clients differ only in how they wait.

Each connection has its own ZeroMQ socket. When the monitor reports that the coordinator is gone, the socket is closed,
and the next connection opens another one. A command can therefore never slip onto a new connection ahead of its
`Hello`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvforge.protocol import network, trust
from kvforge.protocol.codec import encode
from kvforge.protocol.errors import CoordinatorUnavailable, InvalidConfiguration, ProtocolError
from kvforge.protocol.messages import Goodbye, Hello, Message

from .pending import Watched
from .reconnector import Reconnector
from .session import ClientSession
from .sockets import Sockets

# Limits of one pump, so that other tasks get their turn.
MESSAGES_PER_PUMP_MAX = 256
PUMP_S_MAX = 0.0005
GOODBYE_LINGER_MS = 200


def _nothing() -> None: ...


class CoordinatorLink(Watched):
    """The connections of a session, one after the other.

    Callers that watch the link itself are woken whenever it opens, makes progress or closes.
    """

    def __init__(
        self,
        session: ClientSession,
        reconnect_s: float,
        opened: Callable[[], None] = _nothing,
        proof: network.CurveCredentials | None = None,
    ) -> None:
        """Create a closed link.

        Args:
            session: The session that the connections serve.
            reconnect_s: How long to retry a lost connection, in seconds.
            opened: Called whenever there are new sockets.
            proof: The keys of this client, for a coordinator on a network.
        """
        super().__init__()
        self._session, self._proof = session, proof
        self._sockets = Sockets()
        self._opened = opened
        self._ended = False
        # A signal handler interrupted receiving or sending a message: this connection is unusable.
        self._torn = False
        # Messages of the session itself that await room.
        self._outbox: deque[Message] = deque()
        self.reconnector = Reconnector(session, self, reconnect_s)
        self.closing: Callable[[], None] = _nothing
        self._trusted: frozenset[int] | None = None  # allowed users at the other end; None: keys decide
        self.came_at = 0.0  # when the current message was received, on time.monotonic
        self.socket: zmq.Socket[bytes] | None = None
        self.is_up = False  # a coordinator has taken the connection
        self.monitor: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether there are sockets."""
        return self.socket is not None

    def open(self) -> None:
        """Start connecting. If the endpoint's path belongs to an untrusted user, the reconnector gives up instead.

        Raises:
            InvalidConfiguration: The endpoint is invalid.
        """
        assert self.socket is None, "a link is opened once per connection"
        self.is_up = False
        try:
            self._trusted = trust.check_endpoint(self._session.endpoint)
        except InvalidConfiguration as error:
            self.reconnector.turned_away(error)
            return
        try:
            self.socket = self._sockets.dealer(self._proof)
            self.monitor = self._sockets.monitor(self.socket)
            self.socket.connect(self._session.endpoint)
        except zmq.ZMQError as error:
            self.close()
            problem = f"cannot connect to {self._session.endpoint!r}: {error.strerror}"
            raise InvalidConfiguration("endpoint", problem) from None
        except BaseException:  # a signal handler raised: drop the partial connection
            self.close()
            raise
        self.reconnector.opened()
        self._opened()

    def writable(self) -> bool:
        """Return whether a coordinator has accepted the connection and there is room for one more message."""
        return self.socket is not None and self.is_up and bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, message: Message) -> bool:
        """Send a command; return False if that is not possible now."""
        return self._session.welcome is not None and self._flush() and self._put(message)

    def greet(self, hello: Hello) -> None:
        """Send the first message of a connection, which is writable."""
        self._put(hello)

    def send_soon(self, messages: Iterable[Message]) -> None:
        """Send messages of the session as soon as possible, before any later command.

        Without a connection they are dropped: on the next one, the session repeats all commands without a reply.
        """
        if self._session.welcome is not None:
            self._outbox.extend(messages)
            self._flush()

    def pump(self) -> bool:
        """Receive arrived messages, and connect if needed.

        Returns:
            Whether there may be more messages.
        """
        if self._ended:
            return False
        try:
            if self._torn:
                self.fail(CoordinatorUnavailable(f"a message from or to {self._session.endpoint} was interrupted"))
            more = self._pump()
        except InvalidConfiguration:
            raise
        except BaseException:
            self._torn |= self.reconnector.resumes  # the next connection resumes the streams
            raise
        return more

    def _pump(self) -> bool:
        if self._drain():
            return True
        events = self._events()
        if zmq.Event.DISCONNECTED in events:
            # Process the messages that arrived before the end.
            while self._drain():
                pass
            self.fail(
                CoordinatorUnavailable(
                    f"the coordinator at {self._session.endpoint} is gone: the connection closed. "
                    "See its log; `kvforge up` starts it again"
                )
            )
        elif zmq.Event.CLOSED in events:
            self.close()
            self.reconnector.unanswered()
        self.reconnector.step()
        self._flush()
        self.wake()
        return self._readable()

    def fail(self, error: CoordinatorUnavailable | ProtocolError) -> None:
        """End a connection that is unusable."""
        self._torn = True  # in case a signal handler interrupts this
        self.close()
        self.reconnector.lost(error)
        self._torn = False

    def goodbye(self) -> None:
        """Send Goodbye if that is possible at once, then free everything."""
        self._ended = True
        if self.socket is not None and self.send(Goodbye()):
            # A linger of zero would discard the message before ZeroMQ's I/O thread has written it.
            self.socket.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)
        self.close()
        self._sockets.end()

    def close(self) -> None:
        """Close the sockets of this connection, if any."""
        if self.socket is None:
            return
        self.closing()
        self.closing = _nothing
        self._outbox.clear()
        self.socket = self.monitor = None
        self._sockets.close()
        self.wake()

    def _readable(self) -> bool:
        """Return whether a message has arrived, also where sending has taken the signal of its arrival."""
        return self.socket is not None and bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _put(self, message: Message) -> bool:
        if self.socket is None or self._torn:
            return False
        frames = encode(message)
        try:
            self.socket.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        except BaseException:  # a signal handler raised: the message may be half sent
            self._torn = True
            raise
        return True

    def _flush(self) -> bool:
        """Send the messages of the session itself; return whether all are sent."""
        while self._outbox:
            if not self._put(self._outbox[0]):
                return False
            self._outbox.popleft()
        return True

    def _events(self) -> set[int]:
        """Return the events of the connection: established, ended, or not accepted."""
        found: set[int] = set()
        while self.monitor is not None and (event := _receive(self.monitor)) is not None:
            details = parse_monitor_message(event)
            kind = details["event"]
            if kind == zmq.Event.CONNECTED and not self._trusts(details["value"]):
                return set()
            if kind == network.REFUSED and self._proof is not None:
                self.reconnector.turned_away(network.refusal(self._session.endpoint, self._proof))
            self.is_up |= kind == zmq.Event.HANDSHAKE_SUCCEEDED
            found.add(kind)
        return found

    def _trusts(self, descriptor: int) -> bool:
        """Return whether the process at the other end is trusted. The connection to another one ends."""
        if self._trusted is None:
            return True
        try:
            trust.check_peer(descriptor, self._trusted, self._session.endpoint)
        except InvalidConfiguration as error:
            self.reconnector.turned_away(error)
            return False
        return True

    def _drain(self) -> bool:
        self.came_at = monotonic()
        end = self.came_at + PUMP_S_MAX
        for _ in range(MESSAGES_PER_PUMP_MAX):
            if self.socket is None or (frames := _receive(self.socket)) is None:
                return False
            try:
                replies = self._session.receive(frames)
            except ProtocolError as error:
                problem = f"invalid message from {self._session.endpoint}: {error}"
                self.fail(ProtocolError(f"{problem} (is it a kvforge of another version?)"))
                return False
            self.send_soon(replies)
            if (now := monotonic()) >= end:
                break
            self.came_at = now
        return True


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(flags=zmq.DONTWAIT)
    except zmq.Again:
        return None
