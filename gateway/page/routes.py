"""The page's routes: static files, the event stream, queries and actions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvforge import AsyncClient
from kvforge.gateway.http.errors import headers_of, openai_error, status_of
from kvforge.gateway.http.stream import ErrorEventSource, EventStream
from kvforge.gateway.storage import Storage
from kvforge.protocol.errors import KvforgeError, NotAllowed

from . import actions, files
from .document_store import event
from .sampler import Sampler

SEE, ADMIN = "see", "admin"
Allowed = Callable[[Request, str], object]
Handler = Callable[[Request], Awaitable[Response]]


def routes(
    client: Callable[[], AsyncClient],
    *,
    allowed: Allowed,
    ending: Callable[[], bool] = lambda: False,
    storage: Storage | None = None,
) -> list[Route]:
    """Return the routes of the page at `/`.

    The static files are public, because a browser cannot send a key with them; they contain no data.

    Args:
        client: Returns the client of the displayed coordinator. It needs access to all tenants and must stay open as
            long as the routes are served.
        allowed: `allowed(request, right)` raises NotAllowed if the sender may not SEE the state or act as ADMIN.
        ending: Whether this process shuts down, which ends every stream.
        storage: The storage, if there is one.
    """
    sampler, explaining = Sampler(client, ending, storage), actions.ExplainLimiter(client)

    async def events(request: Request) -> Response:
        allowed(request, SEE)
        held = AsyncExitStack()
        viewer = held.enter_context(sampler.watching({"admin": _may(allowed, request)}))
        return EventStream(ErrorEventSource(viewer, viewer.more, _failed), held, files.HEADERS)

    async def explain(request: Request) -> Response:
        allowed(request, SEE)
        explanation = await explaining.explain(request)
        return _json({"subject": explanation.subject, "sentences": explanation.sentences, "facts": explanation.facts})

    async def cancel(request: Request) -> Response:
        allowed(request, ADMIN)
        await actions.cancel(client(), request)
        return _json({})

    async def drain(request: Request) -> Response:
        allowed(request, ADMIN)
        await actions.drain(client(), request)
        return _json({})

    return [
        *_file_routes(),
        Route("/page/events", _answering(events), methods=["GET"]),
        Route("/page/explain", _answering(explain), methods=["GET"]),
        Route("/page/cancel", _answering(cancel), methods=["POST"]),
        Route("/page/drain", _answering(drain), methods=["POST"]),
    ]


def _file_routes() -> list[Route]:
    found = files.load()

    def serving(file: files.File) -> Handler:
        async def serve(request: Request) -> Response:
            return file.response(request)

        return serve

    paths = {name: "/" if name == files.INDEX else f"/page/{name}" for name in found}
    return [Route(paths[name], serving(file), methods=["GET"], include_in_schema=False) for name, file in found.items()]


def _may(allowed: Allowed, request: Request) -> bool:
    try:
        allowed(request, ADMIN)
    except NotAllowed:
        return False
    return True


def _answering(handler: Handler) -> Handler:
    """Wrap a handler to return errors in OpenAI's format."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except KvforgeError as error:
            return _json(openai_error(error), status_of(error), headers_of(error))

    return answer


def _failed(error: KvforgeError) -> bytes:
    return event("failed", msgspec.json.encode(openai_error(error)))


def _json(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    held = {**files.HEADERS, "Cache-Control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(document), status, held, "application/json")
