"""Streaming responses: server-sent events that stop when the client disconnects."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvforge.protocol.errors import Draining, KvforgeError
from kvforge.protocol.steady_timeout import steady_timeout

T = TypeVar("T")
CUT = "the gateway is shutting down (drain_s is over): the answer was cut off"
# Time limit for the last event of a stream that is cut off.
LAST_S = 1.0
COMMENT = b": ping\n\n"
SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientDisconnected(Exception):
    """The client has disconnected."""


class EventSource(Protocol):
    """A source of events."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""

    def pop_events(self) -> bytes:
        """Return the events since the last call, or b""."""


class ErrorEventSource:
    """A source that turns an error after the response has begun into its last event.

    Args:
        source: The source.
        more: Returns when there may be new events.
        shape: Encodes an error as an event.
    """

    def __init__(
        self, source: EventSource, more: Callable[[], Awaitable[None]], shape: Callable[[KvforgeError], bytes]
    ) -> None:
        self._source, self.more, self._shape = source, more, shape
        self._failed = False

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._failed or self._source.over

    def cut(self) -> bytes:
        """Return the last event of a stream that the server cuts off; b"" if it has ended."""
        if self.over:
            return b""
        self._failed = True
        return self._shape(Draining(CUT))

    def pop_events(self) -> bytes:
        """Return the events since the last call."""
        try:
            return self._source.pop_events()
        except KvforgeError as error:
            self._failed = True
            return self._shape(error)


class Pings:
    """Keep-alive events: proxies and clients drop connections that stay silent.

    Args:
        every_s: The longest silence.
        event: The bytes to send then: a comment, or an event of the API.
        wake: Wakes the stream.
    """

    def __init__(self, every_s: float, event: bytes, wake: Callable[[], None]) -> None:
        self._every_s, self._event, self._wake = every_s, event, wake
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._due = False

    def start(self) -> None:
        """Start the timer."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        if self._every_s == math.inf:
            return
        self._timer = loop.call_later(self._every_s, self._look)

    def note_sent(self) -> None:
        """Note that something was sent."""
        self._due = False
        self._sent_at = asyncio.get_running_loop().time()

    def due_event(self) -> bytes:
        """Return the event if it is due, or b""."""
        return self._event if self._due else b""

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._sent_at + self._every_s - loop.time()
        if left <= 0:
            self._due, left = True, self._every_s
            self._wake()
        self._timer = loop.call_later(left, self._look)


class EventStream(Response):
    """A response of server-sent events, one write for events that arrive together.

    Args:
        source: The events.
        held: Closed when the events end or the client disconnects.
        headers: The headers of the response.
        pings: Keep-alive events; None if the source is never silent for long.
    """

    def __init__(
        self,
        source: ErrorEventSource,
        held: AsyncExitStack,
        headers: dict[str, str] | None = None,
        pings: Pings | None = None,
    ) -> None:
        self.status_code, self.background = 200, None
        self._source, self._held = source, held
        self._pings = pings or Pings(math.inf, b"", lambda: None)
        self.raw_headers = [*SSE, *((k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Write all events, unless the client disconnects."""
        source, pings = self._source, self._pings

        async def write() -> None:
            while True:
                if piece := source.pop_events() or pings.due_event():
                    pings.note_sent()
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                if source.over:
                    break
                await source.more()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with self._held:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pings.start()
            try:
                await while_wanted(receive, write())
            except asyncio.CancelledError:
                # The drain is over. A slow consumer gets LAST_S, no more.
                with suppress(TimeoutError):
                    async with steady_timeout(LAST_S):
                        await send({"type": "http.response.body", "body": source.cut(), "more_body": True})
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                pings.stop()


async def wanted(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects first.

    Raises:
        Gone: The client disconnected.
    """
    given: list[T] = []

    async def give() -> None:
        given.append(await work)

    if not await while_wanted(request.receive, give()):
        raise ClientDisconnected
    return given[0]


async def while_wanted(receive: Receive, work: Awaitable[None]) -> bool:
    """Run `work` and cancel it if the client disconnects. Return whether it finished."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        doing.result()
        return True
    finally:
        for task in (doing, watching):
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
