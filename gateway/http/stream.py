"""Responses that come piece by piece, as server-sent events, and end with the client that wanted them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvforge.protocol.errors import KvforgeError

T = TypeVar("T")
SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Gone(Exception):
    """The client has hung up."""


class Taken(Protocol):
    """What is to be written. take: what has come since the last time, or b"". over: nothing more will."""

    @property
    def over(self) -> bool: ...
    def take(self) -> bytes: ...


class Failing:
    """The same, where an error that comes after the response has begun is the last event. more: returns when there may
    be something to take. shape: of the event."""

    def __init__(
        self, taken: Taken, more: Callable[[], Awaitable[None]], shape: Callable[[KvforgeError], bytes]
    ) -> None:
        self._taken, self.more, self._shape = taken, more, shape
        self._failed = False

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self._failed or self._taken.over

    def take(self) -> bytes:
        """What has come since the last time."""
        try:
            return self._taken.take()
        except KvforgeError as error:
            self._failed = True
            return self._shape(error)


class EventStream(Response):
    """Server-sent events: one write for what came together. held: is left at their end, or the client's."""

    def __init__(self, source: Failing, held: AsyncExitStack, headers: dict[str, str] | None = None) -> None:
        self.status_code, self.background = 200, None
        self._source, self._held = source, held
        self.raw_headers = [*SSE, *((k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Writes them all, unless the client hangs up."""

        async def write() -> None:
            source = self._source
            while True:
                if piece := source.take():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                if source.over:
                    break
                await source.more()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with self._held:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_wanted(receive, write())


async def wanted(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled where the client hangs up first. Raises Gone."""
    given: list[T] = []

    async def give() -> None:
        given.append(await work)

    if not await while_wanted(request.receive, give()):
        raise Gone
    return given[0]


async def while_wanted(receive: Receive, work: Awaitable[None]) -> bool:
    """Runs `work` to its end, or until the client hangs up: then it is cancelled. Whether it came to its end."""
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
