"""The connections of one client, and its requests: each has a connection to itself until its answer is over."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from time import monotonic

from kvforge.protocol.errors import DeadlineExceeded, Unavailable

from .http_answer import Answer
from .http_connection import Connection
from .http_wire import Address
from .outcome import FAILED, INTERRUPTED, RUNNING, TIMED_OUT, Outcome

CONNECT_S = 10.0


class Exchange:
    """One request under way; it ends once. request: all bytes of it."""

    __slots__ = ("_again", "_ended", "_pool", "_start", "_timer", "answer", "connection", "outcome", "request")

    def __init__(
        self,
        pool: Pool,
        request: bytes,
        answer: Answer,
        outcome: Outcome,
        start: float,
        ended: Callable[[Outcome], None],
    ) -> None:
        self._pool, self.request, self.answer = pool, request, answer
        self.outcome, self._start, self._ended = outcome, start, ended
        self.connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._again = False

    def until(self, moment: float) -> None:
        """At this moment of CLOCK_MONOTONIC it is given up."""
        self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - monotonic()), self._out_of_time)

    def end(self, now: float) -> None:
        """Ends as its answer did."""
        assert self.answer.end is not None
        self.close(*self.answer.end, now)

    def end_soon(self) -> None:
        """The same, when its sender has heard of it."""
        asyncio.get_running_loop().call_soon(lambda: self.end(monotonic()))

    def close(self, state: str, code: str, message: str, now: float) -> None:
        """Ends, unless it has; what the server would still say is not waited for."""
        outcome = self.outcome
        if outcome.state != RUNNING:
            return
        outcome.state, outcome.code, outcome.message, outcome.ended_s = state, code, message, now - self._start
        if self._timer is not None:
            self._timer.cancel()
        self._pool.under_way.discard(self)
        self._ended(outcome)

    def give_up(self) -> None:
        """Cancels it: nobody wants the answer."""
        self._cancel(INTERRUPTED, "", "given up by the driver")

    def again(self) -> bool:
        """Sends it once more, on another connection; False if that was done already."""
        if self._again:
            return False
        self._again = True
        self.connection = None
        self._pool.wait(self)
        return True

    def _out_of_time(self) -> None:
        self._cancel(TIMED_OUT, DeadlineExceeded.code, "no whole answer in time")

    def _cancel(self, state: str, code: str, message: str) -> None:
        if self.outcome.state == RUNNING:
            if self.connection is not None:
                self.connection.drop()
            self.close(state, code, message, monotonic())


class Pool:
    """Connections of one client, made when they are needed and kept while the server keeps them.

    The one used last is used next: those that too many streams at once have needed fall idle, and the server closes
    them.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        self._address, self._tls = address, tls
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._waiting: deque[Exchange] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self.under_way: set[Exchange] = set()

    async def open(self, count: int) -> None:
        """Makes so many connections. Raises Unavailable."""
        for made in await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True):
            if isinstance(made, OSError):
                raise Unavailable(self._problem(made)) from made
            if made is not None:
                raise made

    async def close(self) -> None:
        """Gives up what is under way, and closes everything."""
        for exchange in list(self.under_way):
            exchange.give_up()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._all):
            connection.drop()

    def send(self, exchange: Exchange) -> None:
        """Sends it now, or as soon as there is a connection."""
        self.under_way.add(exchange)
        if self._idle:
            self._idle.pop().ask(exchange)
        else:
            self.wait(exchange)

    def wait(self, exchange: Exchange) -> None:
        """Sends it on the next connection that is made or becomes idle."""
        self._waiting.append(exchange)
        task = asyncio.get_running_loop().create_task(self._one_more())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _one_more(self) -> None:
        try:
            await self._connect()
        except OSError as error:
            if (exchange := self._next()) is not None:
                exchange.close(FAILED, Unavailable.code, self._problem(error), monotonic())

    async def _connect(self) -> None:
        def made() -> Connection:
            return Connection(self._freed, self._gone)

        where = self._address
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_connection(made, where.host, where.port, ssl=self._tls)

    def _problem(self, error: OSError) -> str:
        return f"{self._address} does not answer: {error or f'no connection within {CONNECT_S:.0f} s'}"

    def _freed(self, connection: Connection) -> None:
        self._all.add(connection)
        exchange = self._next()
        connection.waited = exchange is None
        if exchange is None:
            self._idle.append(connection)
        else:
            connection.ask(exchange)

    def _gone(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _next(self) -> Exchange | None:
        while self._waiting:
            exchange = self._waiting.popleft()
            if exchange.outcome.state == RUNNING:
                return exchange
        return None
