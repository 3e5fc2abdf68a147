"""The socket under a session. Nothing here waits: the two clients differ only in how they wait.

One ZeroMQ socket serves one connection: when the monitor reports that the coordinator is gone, the socket is closed,
and another one is opened for the next. So a command can never slip onto a new connection ahead of its `Hello`.
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

from .awaited import Watched
from .dialler import Dialler
from .session import Session
from .sockets import Sockets

# What is taken in at once, before others get their turn.
MESSAGES_PER_PUMP_MAX = 256
PUMP_S_MAX = 0.0005
GOODBYE_LINGER_MS = 200


def _nothing() -> None: ...


class Link(Watched):
    """The connections of a session, one after the other. Waiters on the link itself are woken whenever it opens, moves
    or closes."""

    def __init__(
        self,
        session: Session,
        reconnect_s: float,
        opened: Callable[[], None] = _nothing,
        proof: network.Proof | None = None,
    ) -> None:
        """proof: of who we are, for a coordinator that is reached over a network."""
        super().__init__()
        self._session, self._proof = session, proof
        self._sockets = Sockets()
        self._opened = opened
        self._ended = False
        # A signal's handler broke off taking in a message, or sending one: this connection is of no use any more.
        self._torn = False
        # What the session itself has to say and found no room for.
        self._outbox: deque[Message] = deque()
        self.dialler = Dialler(session, self, reconnect_s)
        self.closing: Callable[[], None] = _nothing
        self._trusted: frozenset[int] | None = None  # who may be at the other end; None: it proves itself by a key
        self.came_at = 0.0  # when the message that is taken in was received, on time.monotonic
        self.socket: zmq.Socket[bytes] | None = None
        self.is_up = False  # a coordinator has taken the connection
        self.monitor: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self.socket is not None

    def open(self) -> None:
        """Starts connecting, unless the endpoint's path is of a user who is not trusted: then the dialler gives up.

        Raises InvalidConfiguration if the endpoint is not one.
        """
        assert self.socket is None, "a link is opened once per connection"
        self.is_up = False
        try:
            self._trusted = trust.check_endpoint(self._session.endpoint)
        except InvalidConfiguration as error:
            self.dialler.turned_away(error)
            return
        try:
            self.socket = self._sockets.dealer(self._proof)
            self.monitor = self._sockets.monitor(self.socket)
            self.socket.connect(self._session.endpoint)
        except zmq.ZMQError as error:
            self.close()
            problem = f"cannot connect to {self._session.endpoint!r}: {error.strerror}"
            raise InvalidConfiguration("endpoint", problem) from None
        except BaseException:  # a signal's handler raised: half a connection is none
            self.close()
            raise
        self.dialler.opened()
        self._opened()

    def writable(self) -> bool:
        """True once a coordinator has taken the connection and there is room for one more message."""
        return self.socket is not None and self.is_up and bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, message: Message) -> bool:
        """Sends a command, or returns False if that is not possible now."""
        return self._session.welcome is not None and self._flush() and self._put(message)

    def greet(self, hello: Hello) -> None:
        """Sends the first message of a connection, which is writable."""
        self._put(hello)

    def tell(self, messages: Iterable[Message]) -> None:
        """Sends what the session has to say as soon as that is possible, before any later command.

        Without a connection it is said on the next one: the session knows what has no answer.
        """
        if self._session.welcome is not None:
            self._outbox.extend(messages)
            self._flush()

    def pump(self) -> bool:
        """Takes in what has arrived, and connects where that is wanted; returns True if there may be more."""
        if self._ended:
            return False
        try:
            if self._torn:
                self.fail(CoordinatorUnavailable(f"a message from or to {self._session.endpoint} was broken off"))
            more = self._pump()
        except InvalidConfiguration:
            raise
        except BaseException:
            self._torn |= self.dialler.resumes  # the next connection makes up for it
            raise
        return more

    def _pump(self) -> bool:
        if self._drain():
            return True
        events = self._events()
        if zmq.Event.DISCONNECTED in events:
            # What arrived before the end still counts.
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
            self.dialler.unanswered()
        self.dialler.step()
        self._flush()
        self.wake()
        return False

    def fail(self, error: CoordinatorUnavailable | ProtocolError) -> None:
        """Ends the connection, which is of no use any more."""
        self._torn = True  # until all of it is done
        self.close()
        self.dialler.lost(error)
        self._torn = False

    def goodbye(self) -> None:
        """Tells the coordinator, if it can be told at once, that this client leaves; then frees everything."""
        self._ended = True
        if self.socket is not None and self.send(Goodbye()):
            # A linger of zero would throw the message away before ZeroMQ's I/O thread has written it.
            self.socket.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)
        self.close()
        self._sockets.end()

    def close(self) -> None:
        """Closes the sockets of this connection, if any."""
        if self.socket is None:
            return
        self.closing()
        self.closing = _nothing
        self._outbox.clear()
        self.socket = self.monitor = None
        self._sockets.close()
        self.wake()

    def _put(self, message: Message) -> bool:
        if self.socket is None or self._torn:
            return False
        frames = encode(message)
        try:
            self.socket.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        except BaseException:  # a signal's handler raised: half of the message may lie there, and wait for its end
            self._torn = True
            raise
        return True

    def _flush(self) -> bool:
        """Whether all that the session itself has to say is sent."""
        while self._outbox:
            if not self._put(self._outbox[0]):
                return False
            self._outbox.popleft()
        return True

    def _events(self) -> set[int]:
        """What has become of the connection: whether it began or ended, or nobody was there to take it."""
        found: set[int] = set()
        while self.monitor is not None and (event := _receive(self.monitor)) is not None:
            told = parse_monitor_message(event)
            kind = told["event"]
            if kind == zmq.Event.CONNECTED and not self._trusts(told["value"]):
                return set()
            if kind == network.REFUSED and self._proof is not None:
                self.dialler.turned_away(network.refusal(self._session.endpoint, self._proof))
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
            self.dialler.turned_away(error)
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
                where = f"what came from {self._session.endpoint} is not a coordinator's message"
                self.fail(ProtocolError(f"{where} ({error}); is it a kvforge of another version?"))
                return False
            self.tell(replies)
            if (now := monotonic()) >= end:
                break
            self.came_at = now
        return True


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(flags=zmq.DONTWAIT)
    except zmq.Again:
        return None
