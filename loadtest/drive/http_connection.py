"""One connection to a server that speaks HTTP/1.1: a request, its streamed answer, then the next request.

Kept here: what follows an answer that is over is never taken for the answer to the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol, cast

from .http_answer import Answer
from .http_wire import httptools

# Headers, chunk sizes and trailers between two pieces of a body: more is no HTTP.
UNREAD_BYTES_MAX = 1 << 20
# A server has said all, and does not end its answer: so long, then another connection is cheaper.
REST_S = 1.0


class Asked(Protocol):
    """A request under way, as its connection knows it. request: all bytes of it."""

    request: bytes
    answer: Answer
    connection: Connection | None

    def end(self, now: float) -> None:
        """Its answer has ended."""
        ...

    def again(self) -> bool:
        """Sends it once more, on a new connection; False if that was done already."""
        ...


class Connection(asyncio.Protocol):
    """idle: called whenever it can take a request. gone: called when it cannot any more, once or twice.

    old: it lay idle before its request, or has answered another one, so that the server may have closed it meanwhile.
    """

    def __init__(self, idle: Callable[[Connection], None], gone: Callable[[Connection], None]) -> None:
        http = httptools()
        self._broken = (http.HttpParserError, http.HttpParserUpgrade)
        self._parser: Any = http.HttpResponseParser(self)
        self._idle, self._gone = idle, gone
        self._transport: asyncio.Transport | None = None
        self._exchange: Asked | None = None
        self._answer: Answer | None = None
        self._over: asyncio.TimerHandle | None = None
        self._complete = self._keep = False
        self._now = 0.0
        self._unread = 0
        self._answered = False
        self.old = False

    # What the pool calls.

    def ask(self, exchange: Asked) -> None:
        """Sends a request; the connection is idle."""
        assert self._transport is not None and self._answer is None
        self._exchange, self._answer = exchange, exchange.answer
        self._complete = self._answered = False
        exchange.connection = self
        self._transport.write(exchange.request)

    def drop(self) -> None:
        """Closes at once, whatever comes: the server sees that its answer is not wanted any more."""
        self._exchange = self._answer = None
        if self._transport is not None:
            self._transport.abort()
            self._gone(self)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._idle(self)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody asked
            self.drop()
            return
        self._now = monotonic()
        self._answered = True
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except self._broken as error:
            self._keep = False
            if not self._complete:
                answer.lost(f"the server does not speak HTTP/1.1 ({error})", self._now)
        if self._unread > UNREAD_BYTES_MAX:
            answer.lost(f"more than {UNREAD_BYTES_MAX} bytes of headers", self._now)
        if answer.end is not None:
            self._ended(answer)

    def connection_lost(self, error: Exception | None) -> None:
        exchange, answer = self._exchange, self._answer
        self._transport = self._exchange = self._answer = self._parser = None
        if self._over is not None:
            self._over.cancel()
        self._gone(self)
        if exchange is None or answer is None:
            return
        if self.old and not self._answered and exchange.again():
            return  # the server closed the connection while the request was on its way
        now = monotonic()
        answer.lost(f"the server closed the connection{f' ({error})' if error else ''}", now)
        exchange.end(now)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False  # a second answer to one request

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        if not self._complete and (status := self._parser.get_status_code()) >= 200:
            self._answer.head(status, self._now)

    def on_body(self, data: bytes) -> None:
        assert self._answer is not None
        self._unread = 0
        if not self._complete:
            self._answer.body(data, self._now)

    def on_message_complete(self) -> None:
        assert self._answer is not None
        if not self._complete and self._parser.get_status_code() >= 200:
            self._complete, self._keep = True, self._parser.should_keep_alive()
            self._answer.complete(self._now)

    def _ended(self, answer: Answer) -> None:
        exchange, self._exchange = self._exchange, None
        if self._complete and self._keep:
            self._answer, self._unread = None, 0
            if self._over is not None:
                self._over.cancel()
                self._over = None
            self.old = True
            self._idle(self)
        elif self._complete or not answer.done:
            self.drop()
        elif self._over is None:
            self._over = asyncio.get_running_loop().call_later(REST_S, self.drop)
        if exchange is not None:
            exchange.end(self._now)
