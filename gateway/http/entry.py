"""The outermost middleware: normalises request paths and adds request ids to responses."""

from __future__ import annotations

import re

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import api_of
from .notes import notes_of

_SLASHES = re.compile(r"/{2,}")


class PathMiddleware:
    """Middleware that normalises paths and adds a request id to responses without one.

    Duplicate and trailing slashes are removed, since clients join base URLs and paths in different ways.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain(scope["path"])
        notes, api = notes_of(scope), api_of(scope["path"], scope["headers"])

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                notes.mark(MutableHeaders(raw=message["headers"]), api.request_id)
            await send(message)

        await self._app(scope, receive, marked)


def plain(path: str) -> str:
    """Return a path with single slashes and no trailing one."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"
