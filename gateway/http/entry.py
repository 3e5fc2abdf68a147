"""The outermost layer: normalises the paths of requests and adds request ids to answers."""

from __future__ import annotations

import re

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import api_of
from .notes import notes_of

_SLASHES = re.compile(r"/{2,}")


class Entry:
    """Around the application. A slash at the end of a path, or two for one, lead where one slash fewer does: clients
    put base addresses and paths together in their own ways. An answer without a request id gets one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
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
    """A path with single slashes, and none at its end."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"
