"""The connection of a client: made by its first call, made again after a loss, used by one thread.

The code serves both clients as coroutines that wait only in `_until`. The asyncio client awaits them; the blocking
client supplies an `_until` that blocks, and runs each coroutine to its end at once. Both therefore behave the same, and
neither uses a thread.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvforge.protocol import network, platforms, transport
from kvforge.protocol.errors import (
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    KvforgeError,
)
from kvforge.protocol.messages import Message, Submit
from kvforge.protocol.steady_clock import monotonic

from .exchanges import Exchange
from .link import CoordinatorLink
from .pending import PendingCommand, Watched, again
from .session import ClientSession
from .values import number, shown

M = TypeVar("M", bound=Message)
T = TypeVar("T")

RECONNECT_S_MAX = 24 * 3600.0


class Connection(ABC):
    """The connection of one client: sends messages and waits for their replies."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        stream_timeout_s: float,
        reconnect_s: float,
        server_key: str | None,
        key_file: str | os.PathLike[str] | None,
    ) -> None:
        self.endpoint = os.fspath(endpoint) if endpoint is not None else transport.default_client_endpoint()
        platforms.check_endpoint(self.endpoint)
        self.timeout_s = seconds(timeout_s)
        self.stream_timeout_s = seconds(stream_timeout_s, "stream_timeout_s")
        self._connect_timeout_s = seconds(connect_timeout_s, "connect_timeout_s")
        self._pid = os.getpid()
        self._owner: dict[str, threading.Thread] = {}
        self._waiting = False
        self._closed = self._ended = False
        self.session = ClientSession(self.endpoint)
        again_s = number("reconnect_s", reconnect_s, 0, RECONNECT_S_MAX, "0 (not at all)")
        proof = network.credentials_for(self.endpoint, server_key, key_file)
        self.link = CoordinatorLink(self.session, again_s, self._link_opened, proof)

    @abstractmethod
    async def _until(
        self, ready: Callable[[], bool], watch: Sequence[Watched], deadline: float, *, for_room: bool = False
    ) -> bool:
        """Receive messages until `ready()`; return False if `deadline` (steady_clock.monotonic) passes first.

        `ready` can become true only when one of `watch` is woken or, with `for_room`, when the link becomes writable.
        """

    def _link_opened(self) -> None:
        """Handle new sockets of the link."""
        return

    async def call(self, exchange: Exchange[T], timeout_s: float | None = None) -> T:
        """Send one message and return its result.

        Args:
            exchange: The message and its reply.
            timeout_s: The time limit, by default the client's.

        Raises:
            KvforgeError: The error with which the coordinator refused the message.
        """
        pending = await self._ask(exchange.build, exchange.reply, timeout_s)
        return exchange.result(pending.answer(exchange.reply))

    def close(self) -> None:
        """Leave the coordinator and close the sockets. May be called again."""
        if self._ended:
            return
        if os.getpid() == self._pid:  # after a fork, the sockets belong to the parent
            self._check_closable()
            self._closed = True
            self.link.goodbye()
            self.session.lost(Conflict("this client was closed while the request ran"))
        self._closed = self._ended = True  # last: after a Ctrl-C above, the next close() completes the work

    # -------------------------------------------------------------------------------------------------- connection

    def _check_usable(self) -> None:
        if self._closed:
            raise Conflict("this client is closed; make a new one")
        if os.getpid() != self._pid:
            problem = f"this client belongs to process {self._pid}, and this is process {os.getpid()}"
            raise Conflict(f"{problem}: a client does not survive fork(); make a new one in the child")
        if (owner := self._other_thread()) is not None:
            problem = f"this client belongs to thread {owner.name!r}, and this is {threading.current_thread().name!r}"
            raise Conflict(f"{problem}: a client is for one thread; make one for each")

    def _check_closable(self) -> None:
        """Raise Conflict if another thread is in the middle of a call."""
        if self._waiting and (owner := self._other_thread()) is not None:
            raise Conflict(f"this client waits in thread {owner.name!r}: close it there, or when that has ended")

    def _other_thread(self) -> threading.Thread | None:
        """Return the thread that owns this client, if it is another one.

        The first thread that uses the client owns it as long as it runs.
        """
        here = threading.current_thread()
        owner = self._owner.setdefault("", here)  # atomic: one of two racing threads wins
        if owner is not here and not owner.is_alive():
            owner = self._owner[""] = here
        return None if owner is here else owner

    async def _connect(self, deadline: float) -> None:
        self._check_usable()
        session, reconnector = self.session, self.link.reconnector
        # Notice here that the connection ended between two calls, before anything is sent.
        self.link.pump()
        if session.welcome is not None:
            return

        def over() -> bool:
            return session.welcome is not None or reconnector.refused is not None or self._closed

        limit = min(deadline, monotonic() + max(self._connect_timeout_s, reconnector.left_s))
        with reconnector.wanting():
            if not await self._until(over, (self.link,), limit):
                raise self._unavailable(reconnector.problem)
            self._check_usable()
            if reconnector.refused is not None:
                raise again(reconnector.refused)

    def _unavailable(self, what: str) -> CoordinatorUnavailable:
        if network.is_network(self.endpoint):
            problem = f"the coordinator at {self.endpoint} {what}: is it running there, and is the server key its own?"
            return CoordinatorUnavailable(problem)
        return CoordinatorUnavailable(
            f"the coordinator at {self.endpoint} {what}: is it running? Start it with `kvforge up`, "
            "or name another with --endpoint or KVFORGE_ENDPOINT"
        )

    async def _ask(self, build: Callable[[int], Message], expects: type[M], timeout_s: float | None) -> PendingCommand:
        wait_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        deadline = monotonic() + wait_s
        await self._connect(deadline)
        link, session = self.link, self.session
        rid = session.new_rid()
        message = build(rid)
        what = type(message).__name__
        pending = session.expect(rid, expects, what, message.count if isinstance(message, Submit) else 1)
        try:

            def room() -> bool:
                return (session.welcome is not None and session.has_room(rid) and link.writable()) or pending.done

            while not pending.done and not (session.has_room(rid) and link.send(message)):
                if not await self._until(room, (link, pending), deadline, for_room=True):
                    raise self._late(f"is too busy to take {what} ({wait_s:g} s)", wait_s)
            pending.sent = message
            pending.keyed = isinstance(message, Submit) and bool(message.key)
            if not await self._until(lambda: pending.done, (pending,), deadline):
                raise self._late(f"did not answer {what} within {wait_s:g} s", wait_s)
        except BaseException:
            # Whatever ended the wait (a deadline, Ctrl-C, a cancelled task), the request must not run on without a
            # reader. That holds for a detached one too: its id is unknown. A key allows it: the key finds it again.
            link.send_soon(session.forget(pending))
            raise
        return pending

    def _late(self, what: str, wait_s: float) -> KvforgeError:
        """Return the error for a command without a reply in time."""
        if self.session.interrupted:
            problem = f"the connection to the coordinator at {self.endpoint} was lost during the call"
            return CoordinatorUnavailable(f"{problem} and could not be restored within {wait_s:g} s")
        return DeadlineExceeded(f"the coordinator at {self.endpoint} {what}")

    async def _move(
        self, ready: Callable[[], bool], watch: Sequence[Watched], what: str, deadline: float | None = None
    ) -> None:
        self._check_usable()
        wait_s = self.stream_timeout_s if deadline is None else deadline - monotonic()
        if not await self._until(ready, watch, monotonic() + wait_s):
            raise DeadlineExceeded(f"no token of {what} came within {wait_s:.3g} s")

    async def _pause(self, pause_s: float, deadline: float) -> bool:
        """Receive messages for a moment; return False if the deadline has passed."""
        end = min(deadline, monotonic() + pause_s)
        await self._until(lambda: False, (), end)
        return monotonic() < deadline


def seconds(value: float, field: str = "timeout_s") -> float:
    """Check a time limit in seconds, which must be above 0.

    Raises:
        InvalidRequest: Names `field`.
    """
    try:
        seconds = number(field, value, 0, math.inf)
    except InvalidRequest:
        seconds = 0.0
    if not seconds:
        problem = f"is {shown(value)}; it must be a number of seconds above 0 (every wait has an end)"
        raise InvalidRequest(field, problem)
    return seconds
