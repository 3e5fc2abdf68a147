"""Responses that come piece by piece, as server-sent events, and end with the client that wanted them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Gone(Exception):
    """The client has hung up."""


class Source(Protocol):
    """What is to be written. take: what has come since the last time, or b"". over: nothing more will. more: returns
    when there may be some."""

    @property
    def over(self) -> bool: ...
    def take(self) -> bytes: ...
    async def more(self) -> None: ...


class EventStream(Response):
    """Server-sent events: one write for what came together. held: is left at their end, or the client's."""

    def __init__(self, source: Source, held: AsyncExitStack, headers: dict[str, str] | None = None) -> None:
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


async def wanted(request: Request, work: Awaitable[Response]) -> Response:
    """The response that `work` makes, given up where the client hangs up first. Raises Gone."""
    made: list[Response] = []

    async def make() -> None:
        made.append(await work)

    if not await while_wanted(request.receive, make()):
        raise Gone
    return made[0]


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
