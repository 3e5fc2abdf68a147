"""One HTTP/1.1 connection: a request, its streamed answer, then the next request.

Invariant: data after the end of an answer is never taken for the answer to the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol, cast

from .http_answer import Answer
from .http_wire import httptools

# The limit of headers, chunk sizes and trailers between two pieces of a body.
UNREAD_BYTES_MAX = 1 << 20
# How long to wait for the end of the body after the end marker, before the connection is dropped.
REST_S = 1.0


class InFlightRequest(Protocol):
    """A request in flight, as its connection sees it. `request` holds all its bytes."""

    request: bytes
    answer: Answer
    connection: Connection | None

    def end(self, now: float) -> None:
        """Handle the end of the answer."""
        ...

    def again(self) -> bool:
        """Send the request again on a new connection. Return False if that was done already."""
        ...


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        idle: Called whenever it can take a request.
        gone: Called when it cannot any more, once or twice.

    Attributes:
        old: It was idle before or has answered a request, so the server may have closed it in the meantime.
    """

    def __init__(self, idle: Callable[[Connection], None], gone: Callable[[Connection], None]) -> None:
        http = httptools()
        self._broken = (http.HttpParserError, http.HttpParserUpgrade)
        self._parser: Any = http.HttpResponseParser(self)
        self._idle, self._gone = idle, gone
        self._transport: asyncio.Transport | None = None
        self._exchange: InFlightRequest | None = None
        self._answer: Answer | None = None
        self._over: asyncio.TimerHandle | None = None
        self._complete = self._keep = False
        self._now = 0.0
        self._unread = 0
        self._answered = False
        self.old = False

    # Called by the pool.

    def ask(self, exchange: InFlightRequest) -> None:
        """Send a request on the idle connection."""
        assert self._transport is not None and self._answer is None
        self._exchange, self._answer = exchange, exchange.answer
        self._complete = self._answered = False
        exchange.connection = self
        self._transport.write(exchange.request)

    def drop(self) -> None:
        """Close at once, so that the server sees that its answer is not needed any more."""
        self._exchange = self._answer = None
        if self._transport is not None:
            self._transport.abort()
            self._gone(self)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Offer the connection to the pool."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._idle(self)

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the response."""
        answer = self._answer
        if answer is None:  # unsolicited data
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
            answer.lost(f"the headers exceed {UNREAD_BYTES_MAX} bytes", self._now)
        if answer.end is not None:
            self._ended(answer)

    def connection_lost(self, error: Exception | None) -> None:
        """Repeat the request on a new connection, or fail it."""
        exchange, answer = self._exchange, self._answer
        self._transport = self._exchange = self._answer = self._parser = None
        if self._over is not None:
            self._over.cancel()
        self._gone(self)
        if exchange is None or answer is None:
            return
        if self.old and not self._answered and exchange.again():
            return  # the server closed the idle connection as the request was sent
        now = monotonic()
        answer.lost(f"the server closed the connection{f' ({error})' if error else ''}", now)
        exchange.end(now)

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Detect a second response to one request."""
        if self._complete:
            self._keep = False  # a second answer to one request

    def on_headers_complete(self) -> None:
        """Pass the status on."""
        assert self._answer is not None
        if not self._complete and (status := self._parser.get_status_code()) >= 200:
            self._answer.head(status, self._now)

    def on_body(self, data: bytes) -> None:
        """Pass a piece of the body on."""
        assert self._answer is not None
        self._unread = 0
        if not self._complete:
            self._answer.body(data, self._now)

    def on_message_complete(self) -> None:
        """Pass the end of the response on."""
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
