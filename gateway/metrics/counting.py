"""ASGI middleware that counts requests: path, status, duration, bytes."""

from __future__ import annotations

from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvforge.gateway.http.notes import notes_of

from .shared import Counts

GONE = 499  # nginx's status for a client that disconnected


class Counting:
    """Middleware that counts each request. One that ends without a status counts as a disconnected client."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, received, sent = monotonic(), GONE, 0, 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        self._counts.began()
        try:
            await self._app(scope, counted_receive, counted_send)
        except Exception:
            status = 500 if status == GONE else status
            raise
        finally:
            self._counts.ended(scope["path"], status, monotonic() - began, received, sent)
            self._counts.ignored(scope["path"], notes_of(scope).ignored.count)
            self._counts.pinned(notes_of(scope).pins)
