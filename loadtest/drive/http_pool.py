"""The connections of one client. Each request has a connection to itself until its answer has ended."""

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
    """A request in flight. It ends exactly once."""

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
        """Cancel the request at this moment (CLOCK_MONOTONIC)."""
        self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - monotonic()), self._out_of_time)

    def end(self, now: float) -> None:
        """End with the state of its answer."""
        assert self.answer.end is not None
        self.close(*self.answer.end, now)

    def end_soon(self) -> None:
        """End with the state of its answer, after the sender has returned."""
        asyncio.get_running_loop().call_soon(lambda: self.end(monotonic()))

    def close(self, state: str, code: str, message: str, now: float) -> None:
        """End with this state unless it has ended. The rest of the answer is not read."""
        outcome = self.outcome
        if outcome.state != RUNNING:
            return
        outcome.state, outcome.code, outcome.message, outcome.ended_s = state, code, message, now - self._start
        if self._timer is not None:
            self._timer.cancel()
        self._pool.under_way.discard(self)
        self._ended(outcome)

    def give_up(self) -> None:
        """Cancel the request."""
        self._cancel(INTERRUPTED, "", "cancelled by the driver")

    def again(self) -> bool:
        """Send the request again on a new connection. Return False if that was done already."""
        if self._again:
            return False
        self._again = True
        self.connection = None
        self._pool.again(self)
        return True

    def _out_of_time(self) -> None:
        self._cancel(TIMED_OUT, DeadlineExceeded.code, "the request exceeded the driver's time limit")

    def _cancel(self, state: str, code: str, message: str) -> None:
        if self.outcome.state == RUNNING:
            if self.connection is not None:
                self.connection.drop()
            self.close(state, code, message, monotonic())


class Pool:
    """The connections of one client.

    The most recently used idle connection is used next, so that surplus ones stay idle until the server closes them.

    Args:
        address: The server.
        tls: The TLS context; None for plain HTTP.
        spare: How many connections to keep open ahead of the next requests.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None, spare: int) -> None:
        self._address, self._tls, self._spare = address, tls, spare
        self._host = address.host
        self._idle: dict[Connection, None] = {}
        self._all: set[Connection] = set()
        self._waiting: deque[Exchange] = deque()
        self._again: deque[Exchange] = deque()  # for new connections only: an idle one may be closed as well
        self._coming: set[Connection] = set()  # being established by:
        self._connecting: set[asyncio.Task[None]] = set()
        self.under_way: set[Exchange] = set()

    async def open(self) -> None:
        """Open the spare connections. Raises Unavailable."""
        try:
            await self._connect(self._new())
            rest = (self._connect(self._new()) for _ in range(self._spare - 1))
            found = [made for made in await asyncio.gather(*rest, return_exceptions=True) if made is not None]
            if found:
                raise found[0]
        except OSError as error:
            raise Unavailable(self._problem(error)) from error

    async def close(self) -> None:
        """Cancel what is in flight and close all connections."""
        self._spare = 0
        for exchange in list(self.under_way):
            exchange.give_up()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._all):
            connection.drop()

    def send(self, exchange: Exchange) -> None:
        """Send a request now, or as soon as a connection is available."""
        self.under_way.add(exchange)
        if self._idle:
            self._idle.popitem()[0].ask(exchange)
        else:
            self._waiting.append(exchange)
        self._connect_ahead()

    def again(self, exchange: Exchange) -> None:
        """Send a request on the next new connection."""
        self._again.append(exchange)
        self._connect_ahead()

    def _connect_ahead(self) -> None:
        coming = len(self._coming)
        missing = len(self.under_way) + self._spare - len(self._all) - coming
        # Waiting requests must not depend on the end of other answers.
        missing = max(missing, len(self._waiting) + len(self._again) - coming)
        for _ in range(missing):
            task = asyncio.get_running_loop().create_task(self._one_more(self._new()))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _new(self) -> Connection:
        connection = Connection(self._freed, self._gone)
        self._coming.add(connection)
        return connection

    async def _one_more(self, connection: Connection) -> None:
        try:
            await self._connect(connection)
        except OSError as error:
            if (exchange := self._next(self._again, self._waiting)) is not None:
                exchange.close(FAILED, Unavailable.code, self._problem(error), monotonic())

    async def _connect(self, connection: Connection) -> None:
        where, name = self._address, self._address.host if self._tls is not None else None
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: connection, self._host, where.port, ssl=self._tls, server_hostname=name
                )
        finally:
            self._coming.discard(connection)
        # Reuse the address, so that no request waits for name resolution.
        if (peer := transport.get_extra_info("peername")) is not None:
            self._host = peer[0]

    def _problem(self, error: OSError) -> str:
        return f"cannot connect to {self._address}: {str(error) or f'no connection within {CONNECT_S:.0f} s'}"

    def _freed(self, connection: Connection) -> None:
        new = connection in self._coming
        self._coming.discard(connection)
        self._all.add(connection)
        exchange = self._next(self._again, self._waiting) if new else self._next(self._waiting)
        if exchange is None:
            connection.old = True
            self._idle[connection] = None
        else:
            connection.ask(exchange)

    def _gone(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def _next(self, *queues: deque[Exchange]) -> Exchange | None:
        for queue in queues:
            while queue:
                exchange = queue.popleft()
                if exchange.outcome.state == RUNNING:
                    return exchange
        return None
