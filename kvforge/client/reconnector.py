"""Opens the connection that calls need, and reconnects after a loss while a call waits.

Nothing here waits: `step` does what can be done now, and `due` returns when to call it next even if nothing arrives. A
client works only inside its calls, so the time limit for reconnecting counts only while a call waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic as plain_monotonic
from typing import Protocol

from kvforge.protocol.errors import CoordinatorUnavailable, KvforgeError, ProtocolError, StateLost
from kvforge.protocol.messages import Hello, Welcome
from kvforge.protocol.steady_clock import monotonic

from .pending import PendingCommand
from .session import ClientSession

# Each pause is a tenth longer than the one before: a coordinator that returns after t seconds is noticed a fraction of
# t later.
RETRY_PAUSE_S = 0.05
RETRY_PAUSE_GROWTH = 1.1
RETRY_PAUSE_S_MAX = 0.5
ROOM_POLL_S = 0.02
# A connection that ends sooner counts as a failed attempt, so that a peer that keeps hanging up is not retried at once.
LASTED_S = 1.0


class LinkProtocol(Protocol):
    """The sockets of a connection; `link.Link` implements it."""

    @property
    def is_open(self) -> bool:
        """Return whether there are sockets."""

    def open(self) -> None:
        """Start connecting."""

    def close(self) -> None:
        """End the connection, if there is one."""

    def writable(self) -> bool:
        """Return whether a coordinator has accepted the connection."""

    def greet(self, hello: Hello) -> None:
        """Send the first message."""

    def wake(self) -> None:
        """Wake the callers that wait for this link."""


class Reconnector:
    """Decides when a session's link is opened, and sends Hello on it.

    Attributes:
        refused: Why the coordinator refused the last connection, if retrying is useless.
        problem: How far the last attempt came, for error texts.
    """

    def __init__(self, session: ClientSession, link: LinkProtocol, reconnect_s: float) -> None:
        self._session, self._link, self._reconnect_s = session, link, reconnect_s
        self.refused: KvforgeError | None = None
        self.problem = ""
        self._hello: PendingCommand | None = None
        self._wanting = 0
        self._waiting = 0
        self._since = 0.0
        self._left_s = reconnect_s
        self._pause_s = RETRY_PAUSE_S
        self._retry_at = 0.0
        self._up_at = 0.0
        self._up = False
        self._lost: KvforgeError | None = None

    @property
    def resumes(self) -> bool:
        """Return whether a lost connection is retried."""
        return self._reconnect_s > 0

    @property
    def left_s(self) -> float:
        """Return how long a lost connection will still be retried, in seconds; 0 if none was lost."""
        if not self._session.interrupted:
            return 0.0
        return max(0.0, self._left_s - (monotonic() - self._since if self._waiting else 0.0))

    @property
    def wants_room(self) -> bool:
        """Return whether to send Hello as soon as the link is writable."""
        return self._link.is_open and self._hello is None

    @contextmanager
    def wanting(self) -> Iterator[None]:
        """Keep trying to connect while a call that needs a connection is in this context."""
        if not self._wanting:
            self.refused = None
        self._wanting += 1
        try:
            yield
        finally:
            self._wanting -= 1
            if not self._wanting and self._session.welcome is None and not self._session.interrupted:
                self._hang_up()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a call as waiting while it is in this context."""
        if not self._waiting:
            self._since = monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and self._session.interrupted:
                self._left_s -= monotonic() - self._since

    def opened(self) -> None:
        """Note that the link has new sockets, on which nothing was sent yet."""
        self._hello = None
        self.problem = "does not answer"

    def due(self) -> float | None:
        """Return when `step` must be called, on steady_clock.monotonic; None if it has nothing to do by itself."""
        if self._session.welcome is not None or not self._waiting:
            return None
        times = [self._since + self._left_s] if self._session.interrupted else []
        if self.wants_room:  # asking for room may swallow the event that signals it
            times.append(monotonic() + ROOM_POLL_S)
        elif not self._link.is_open and self._tries:
            times.append(self._retry_at)
        return min(times, default=None)

    def step(self) -> None:
        """Proceed as far as possible.

        Raises:
            InvalidConfiguration: The endpoint is invalid.
        """
        if self._session.welcome is not None:
            if not self._up:
                self._up, self._up_at = True, plain_monotonic()
                if self._lost is not None and self._waiting:
                    self._left_s -= monotonic() - self._since
            return
        if self._hello is not None and self._hello.error is not None:
            self.turned_away(self._hello.error)
        if self._session.interrupted and self._waiting and monotonic() >= self._since + self._left_s:
            self._give_up()
        if self._link.is_open:
            if self._hello is None and self._link.writable():
                self._greet()
        elif self._tries and monotonic() >= self._retry_at:
            self._link.open()

    def lost(self, error: CoordinatorUnavailable | ProtocolError) -> None:
        """Handle the end of the connection."""
        if self._hello is not None and self._hello.error is not None:  # Hello was refused first
            self.turned_away(self._hello.error)
            return
        greeted, self._hello = self._session.welcome is not None, None
        now = monotonic()
        # The plain clock: between two calls the client does not read the steady one, but the connection lasts.
        lasted, self._up = self._up and plain_monotonic() - self._up_at >= LASTED_S, False
        if lasted:
            self._left_s, self._pause_s, self._retry_at = self._reconnect_s, RETRY_PAUSE_S, now
        else:
            self._try_later()
        if isinstance(error, CoordinatorUnavailable) and (self._session.interrupted or (greeted and self.resumes)):
            if not self._session.interrupted:
                self._lost, self._since = error, now
            self._session.interrupt()
        else:
            self._lose(error)
            if isinstance(error, ProtocolError):
                self.refused = error
        if not greeted:
            self.problem = "hung up at once"

    def unanswered(self) -> None:
        """Handle an attempt that reached no coordinator."""
        self._try_later()

    def turned_away(self, error: KvforgeError) -> None:
        """Handle the refusal of Hello or of the handshake before it."""
        self._hang_up()
        if isinstance(error, StateLost):
            # The coordinator restarted without its state: earlier requests have failed, new ones are possible.
            self._session.boot = ""
            self._lose(CoordinatorUnavailable(f"the coordinator at {self._session.endpoint} is gone: {error}"))
        else:
            self._lose(error)
            self.refused = error
        self._link.wake()

    @property
    def _tries(self) -> bool:
        """Return whether to attempt a connection."""
        return self.refused is None and bool(self._wanting or (self._session.interrupted and self._waiting))

    def _try_later(self) -> None:
        self._retry_at = monotonic() + self._pause_s
        self._pause_s = min(RETRY_PAUSE_GROWTH * self._pause_s, RETRY_PAUSE_S_MAX)

    def _greet(self) -> None:
        session = self._session
        rid = session.new_rid()
        hello = Hello(rid=rid, boot=session.boot, session=session.name if self.resumes else "")
        self._hello = session.expect(rid, Welcome, "Hello")
        self.problem = "accepted the connection but does not answer"
        self._link.greet(hello)

    def _give_up(self) -> None:
        assert self._lost is not None, "an interruption has a cause"
        problem = f"{self._lost.message}; tried again for {self._reconnect_s:g} s (reconnect_s)"
        self._hang_up()
        self._lose(CoordinatorUnavailable(problem))
        self._link.wake()

    def _lose(self, error: KvforgeError) -> None:
        """Fail all that waits. The next connection starts without a history."""
        self._lost, self._left_s = None, self._reconnect_s
        self._session.lost(error)

    def _hang_up(self) -> None:
        """End an attempt."""
        hello, self._hello = self._hello, None
        if hello is not None:
            self._session.forget(hello)
        self._link.close()
