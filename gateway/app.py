"""The ASGI application: routes, middleware and the lifespan of the connection to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge import __version__
from kvforge.client.aio import AsyncClient
from kvforge.gateway.access import Access
from kvforge.gateway.anthropic.routes import Anthropic
from kvforge.gateway.batches import Batches
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.config import SEE, Settings
from kvforge.gateway.generate.loading import prompts_of
from kvforge.gateway.generate.service import Service
from kvforge.gateway.http.entry import PathMiddleware
from kvforge.gateway.http.errors import NoSuchMethod, NoSuchPath, api_of
from kvforge.gateway.http.guard import FAULT, Guard, refused
from kvforge.gateway.http.ignored import HEADER as IGNORED_HEADER
from kvforge.gateway.http.notes import notes_of
from kvforge.gateway.metrics.counting import Counting
from kvforge.gateway.metrics.routes import Source
from kvforge.gateway.metrics.routes import routes as metrics
from kvforge.gateway.metrics.shared import Counts
from kvforge.gateway.openai.background import Background
from kvforge.gateway.openai.routes import OpenAI
from kvforge.gateway.openai.stored import Stored
from kvforge.gateway.openapi.routes import routes as described
from kvforge.gateway.page.routes import routes as page
from kvforge.gateway.parse import Format
from kvforge.gateway.replicas.replica_set import ReplicaSet
from kvforge.gateway.storage.remote import RemoteStorage
from kvforge.protocol.errors import InternalError, InvalidConfiguration
from kvforge.protocol.messages import ModelInfo

PATH_SHOWN_MAX = 200


def make_app(
    settings: Settings,
    access: Access,
    counted: Path | None = None,
    settled: Callable[[], None] = lambda: None,
    patience_s: float = 0.0,
) -> Starlette:
    """Build the application of one gateway process.

    The connection to the coordinator is opened at startup and closed at shutdown. Two attributes of `app.state` control
    the application: `ending` (set it to end streams that would otherwise never end) and `use(settings)` (replace the
    replicas; it raises InvalidConfiguration if the new settings switch between one coordinator and several replicas).

    Args:
        settings: The gateway's settings.
        access: API keys and rate limits.
        counted: File in which all processes of this port count requests; None for a single process.
        settled: Called when a model and its tokenizer are loaded.
        patience_s: How long startup waits for a model before the port accepts connections.
    """

    async def prompts(info: ModelInfo) -> tuple[Prompts, Format]:
        return await prompts_of(info, settings)

    served: ReplicaSet | AsyncClient
    if settings.replicas:
        served = ReplicaSet(settings.replicas, answer_s=settings.answer_s, lost_s=settings.failover_s)
    else:
        served = AsyncClient(
            settings.coordinator, server_key=settings.server_key or None, key_file=settings.key_file or None
        )
    fleet = served if isinstance(served, ReplicaSet) else None
    service = Service(served, prompts, settings.names, settled)
    guard = Guard(access)
    storage = _storage(settings)
    background = Background(service, Stored(storage, settings.storage), settings) if storage is not None else None
    batches = Batches(service, storage, settings) if storage is not None else None

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001
        looking = asyncio.ensure_future(service.serving())
        keeping = asyncio.ensure_future(background.keep()) if background is not None else None
        batching = asyncio.ensure_future(batches.runner.keep()) if batches is not None else None
        try:
            if patience_s:
                with suppress(TimeoutError):
                    await asyncio.wait_for(service.ready(), patience_s)
            yield
        finally:
            if background is not None and keeping is not None:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping
                await background.close()
            if batches is not None and batching is not None:
                batching.cancel()
                with suppress(asyncio.CancelledError):
                    await batching
                await batches.runner.close()
            if storage is not None:
                await storage.close()
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            await service.close()
            if isinstance(served, AsyncClient):
                await served.close()  # a fleet closes its own clients

    def shown() -> AsyncClient:
        return served.replicas[0].client if isinstance(served, ReplicaSet) else served

    def use(new: Settings) -> None:
        if bool(new.replicas) != (fleet is not None):
            raise InvalidConfiguration("replicas", "cannot be added or removed by a reload: restart the gateway")
        if fleet is not None:
            fleet.use(new.replicas)

    async def live(request: Request) -> Response:  # noqa: ARG001
        """Answer whether this process is alive, regardless of the coordinator."""
        return JSONResponse({"live": True})

    async def health(request: Request) -> Response:  # noqa: ARG001
        reason = "this gateway is stopping" if ending() else service.reason
        ready = not reason
        answer: dict[str, object] = {"ready": ready, "reason": reason}
        if storage is not None:
            answer["storage"] = {"ready": not storage.reason, "reason": storage.reason}
        if fleet is not None:
            answer["replicas"] = fleet.states()
        return JSONResponse(answer, 200 if ready else 503)

    async def version(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse({"version": __version__})

    async def fault(request: Request, error: Exception) -> Response:  # noqa: ARG001 - starlette logs it
        api = api_of(request.url.path, request.headers.raw)
        return refused(InternalError(FAULT), api, notes_of(request.scope))

    def ending() -> bool:
        return bool(app.state.ending)

    routes = [
        *page(
            shown, allowed=lambda request, right: access.caller(request.headers, right), ending=ending, storage=storage
        ),
        *(Route(path, health, methods=["GET"]) for path in ("/health", "/readyz")),
        Route("/livez", live, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        *OpenAI(service, settings, background).routes(guard),
        *Anthropic(service, settings).routes(guard),
        *(batches.routes(guard) if batches is not None else ()),
        *described(),
    ]
    counts = Counts([route.path for route in routes if "{" not in route.path], counted)
    if batches is not None:
        batches.runner.count = lambda answered: counts.line(answered=answered)
        batches.runner.share = counts.lines_running
    source = None if settings.endpoint or settings.replicas else Source(settings.folder)
    routes += metrics(
        source, counts, may_see_tenants=lambda request: bool(access.caller(request.headers, SEE)), storage=storage
    )
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={404: unknown, 405: unknown, Exception: fault},
        middleware=[Middleware(PathMiddleware), Middleware(Counting, counts=counts), *_cors(settings)],
    )
    app.state.ending, app.state.use = False, use
    return app


async def unknown(request: Request, error: Exception) -> Response:
    """Answer a request for no path of the gateway, or with a method that its path does not take."""
    shown = f"{request.method} {request.url.path[:PATH_SHOWN_MAX]} not found"
    api, notes = api_of(request.url.path, request.headers.raw), notes_of(request.scope)
    if getattr(error, "status_code", 404) == 404:
        return refused(NoSuchPath(f"{shown} (see /docs for the paths)"), api, notes)
    response = refused(NoSuchMethod("method", shown), api, notes)
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _storage(settings: Settings) -> RemoteStorage | None:
    """Return the storage, whose process starts with its first call; None if nothing is stored."""
    if not (url := settings.storage_url):
        return None
    section = settings.storage
    return RemoteStorage(url, tenant_bytes_max=section.tenant_bytes_max, answer_s=section.answer_s)


def _cors(settings: Settings) -> list[Middleware]:
    """Return the CORS middleware, or nothing without `cors_origins`."""
    if not settings.cors_origins:
        return []
    origins, exposed = list(settings.cors_origins), ["x-request-id", "request-id", "retry-after", IGNORED_HEADER]
    methods, headers = ["GET", "POST", "DELETE"], ["*"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=headers,
            expose_headers=exposed,
        )
    ]
