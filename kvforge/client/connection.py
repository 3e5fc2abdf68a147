"""The connection of a client: made by its first call, made again after it was lost, used by one thread.

Written once for both clients, as coroutines that wait only in `_until`. The asyncio client awaits them; the blocking
client supplies an `_until` that blocks, and runs each coroutine to its end at once. So both behave the same, and
neither uses a thread.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import Any, TypeVar

from kvforge.protocol import transport
from kvforge.protocol.errors import (
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    KvforgeError,
    ProtocolError,
)
from kvforge.protocol.messages import Hello, Message, Submit, Welcome

from .exchanges import Exchange
from .link import Link
from .session import Pending, Session, Watched
from .values import number, shown

M = TypeVar("M", bound=Message)
T = TypeVar("T")

RETRY_PAUSE_S = 0.05


class Connection(ABC):
    """The connection of one client, and how a message is sent over it and answered."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        stream_timeout_s: float,
    ) -> None:
        self.endpoint = os.fspath(endpoint) if endpoint is not None else transport.default_client_endpoint()
        self.timeout_s = seconds(timeout_s)
        self.stream_timeout_s = seconds(stream_timeout_s, "stream_timeout_s")
        self._connect_timeout_s = seconds(connect_timeout_s, "connect_timeout_s")
        self._pid = os.getpid()
        self._owner: dict[str, threading.Thread] = {}
        self._waiting = False
        self._closed = False
        self.session = Session(self.endpoint)
        self.link = Link(self.session, self._link_opened)

    @abstractmethod
    async def _until(
        self, ready: Callable[[], bool], watch: Sequence[Watched], deadline: float, *, for_room: bool = False
    ) -> bool:
        """Takes in messages until `ready()`; False if `deadline` (time.monotonic) passes first.

        `ready` can become true only when one of `watch` is woken or, with `for_room`, when the link gets writable.
        """

    @abstractmethod
    def _gate(self) -> AbstractAsyncContextManager[Any]:
        """Held while connecting, so that concurrent callers share one connection."""

    def _link_opened(self) -> None:
        """The link has new sockets."""
        return

    async def call(self, exchange: Exchange[T], timeout_s: float | None = None) -> T:
        """Sends one message; returns what its caller gets of the answer. Raises what it was refused with."""
        pending = await self._ask(exchange.build, exchange.reply, timeout_s)
        return exchange.result(pending.answer(exchange.reply))

    def close(self) -> None:
        if self._closed:
            return
        if os.getpid() == self._pid:  # else the sockets belong to the process that made them
            self._check_closable()
            self._closed = True
            self.link.goodbye()
            self.session.lost(Conflict("this client was closed while the request ran"))
        self._closed = True

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
        """Raises Conflict where another thread is in the middle of a call."""
        if self._waiting and (owner := self._other_thread()) is not None:
            raise Conflict(f"this client waits in thread {owner.name!r}: close it there, or when that has ended")

    def _other_thread(self) -> threading.Thread | None:
        """The thread that this client belongs to, where it is another one: that which used it first, and still runs."""
        here = threading.current_thread()
        owner = self._owner.setdefault("", here)  # atomic: of two threads that come at once, one is the first
        if owner is not here and not owner.is_alive():
            owner = self._owner[""] = here
        return None if owner is here else owner

    async def _connect(self, deadline: float) -> None:
        self._check_usable()
        # A connection that ended while nobody looked is noticed here, before anything is sent.
        self.link.pump()
        if self.session.welcome is not None:
            return
        # The limit counts from now, not from our turn at the gate: callers in a row do not wait one after the other.
        limit = min(deadline, monotonic() + self._connect_timeout_s)
        async with self._gate():
            while self.session.welcome is None:
                if await self._greet(limit):
                    return
                if not await self._pause(RETRY_PAUSE_S, limit):
                    raise self._nobody("hung up at once")

    async def _greet(self, deadline: float) -> bool:
        """One attempt at a connection. False if it is worth another."""
        link, session = self.link, self.session
        if not link.is_open:
            link.open()
        if not await self._until(lambda: link.writable() or not link.is_open, (link,), deadline, for_room=True):
            link.close()
            raise self._nobody("does not answer")
        if not link.is_open:
            return False
        rid = session.new_rid()
        pending = session.expect(rid, Welcome, "Hello")
        try:
            link.send(Hello(rid=rid, boot=session.boot))
            if not await self._until(lambda: pending.done, (pending,), deadline):
                raise self._nobody("took the connection and does not answer")
            pending.answer(Welcome)
        except CoordinatorUnavailable:
            if not pending.done:
                raise
            return False
        except ProtocolError:
            raise
        except KvforgeError:
            # The coordinator restarted and lost what we knew of it. Our requests have failed already: start anew.
            if not session.boot:
                raise
            session.boot = ""
            return False
        finally:
            session.forget(pending)
            if session.welcome is None:
                link.close()
        return True

    def _nobody(self, what: str) -> CoordinatorUnavailable:
        return CoordinatorUnavailable(
            f"the coordinator at {self.endpoint} {what}: is it running? Start it with `kvforge up`, "
            "or name another with --endpoint or KVFORGE_ENDPOINT"
        )

    async def _ask(self, build: Callable[[int], Message], expects: type[M], timeout_s: float | None) -> Pending:
        wait_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        deadline = monotonic() + wait_s
        await self._connect(deadline)
        link, session = self.link, self.session
        rid = session.new_rid()
        message = build(rid)
        what = type(message).__name__
        pending = session.expect(rid, expects, what, message.count if isinstance(message, Submit) else 1)
        try:
            sent = False

            def room() -> bool:
                return link.writable() or pending.done

            while not pending.done and not (sent := link.send(message)):
                if not await self._until(room, (link, pending), deadline, for_room=True):
                    break
            if not sent and not pending.done:
                raise DeadlineExceeded(f"the coordinator at {self.endpoint} is too busy to take {what} ({wait_s:g} s)")
            pending.keyed = isinstance(message, Submit) and bool(message.key)
            if not await self._until(lambda: pending.done, (pending,), deadline):
                raise DeadlineExceeded(f"the coordinator at {self.endpoint} did not answer {what} within {wait_s:g} s")
        except BaseException:
            # Whatever ended the wait (a deadline, Ctrl-C, a cancelled task), no request may run for nobody. A detached
            # one neither, since nobody has its id; one with a key may, since whoever sends the key again gets it.
            for reply in session.forget(pending):
                link.send(reply)
            raise
        return pending

    async def _move(
        self, ready: Callable[[], bool], watch: Sequence[Watched], what: str, deadline: float | None = None
    ) -> None:
        self._check_usable()
        wait_s = self.stream_timeout_s if deadline is None else deadline - monotonic()
        if not await self._until(ready, watch, monotonic() + wait_s):
            raise DeadlineExceeded(f"no token of {what} came within {wait_s:.3g} s")

    async def _pause(self, pause_s: float, deadline: float) -> bool:
        """Takes in messages for a moment; False if the deadline has passed."""
        end = min(deadline, monotonic() + pause_s)
        await self._until(lambda: False, (), end)
        return monotonic() < deadline


def seconds(value: float, field: str = "timeout_s") -> float:
    """How long to wait. Raises InvalidRequest naming `field`, for no time at all too."""
    try:
        seconds = number(field, value, 0, math.inf)
    except InvalidRequest:
        seconds = 0.0
    if not seconds:
        problem = f"is {shown(value)}; it must be a number of seconds above 0 (every wait has an end)"
        raise InvalidRequest(field, problem)
    return seconds
