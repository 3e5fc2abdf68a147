"""The routes of stored responses: create in the background, read, stream again, cancel, delete, list the input."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge.gateway.access import Caller
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import WakeUp
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.http.stream import COMMENT, ErrorEventSource, EventStream, Pings
from kvforge.protocol.errors import Conflict, InvalidRequest, KeyReused

from .background import Background
from .background_run import Run
from .kept import forget
from .paging import Page, whole_number
from .response_streams import EndedEvents, OthersEvents, OwnEvents
from .responses import Responses, response_failed
from .stored import Stored, StoredResponse, input_items

AFTER_MAX = 10**9 - 1
CANCEL_TRIES = 5


class StoredResponses:
    """The routes over one storage.

    Args:
        stored: The stored objects.
        background: The background responses.
        settings: The gateway's settings.
    """

    def __init__(self, stored: Stored, background: Background, settings: Settings) -> None:
        self._stored, self._background, self._settings = stored, background, settings

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        path = "/v1/responses/{response_id}"
        return [
            Route(path, guard(self._get), methods=["GET"]),
            Route(path, guard(self._delete), methods=["DELETE"]),
            Route(f"{path}/cancel", guard(self._cancel), methods=["POST"]),
            Route(f"{path}/input_items", guard(self._input_items), methods=["GET"]),
        ]

    async def create(self, work: Responses) -> Response:
        """Start a response in the background.

        Raises:
            KvforgeError: It was refused, and nothing is stored.
        """
        try:
            run = await self._background.start(work)
        except Conflict as error:
            if type(error) is not Conflict:
                raise
            return await self._repeated(work)
        if work.asked.stream:
            return self._own_stream(run, -1)
        return JSONResponse(_now(run))

    async def _repeated(self, work: Responses) -> Response:
        """Answer a request that was made before with the same idempotency key."""
        tenant, key = work.call.caller.tenant, work.call.key.name
        _, stored = await self._stored.response(tenant, work.id)
        if stored.input != input_items(work.asked.input, work.base):
            raise KeyReused(key, 0)
        return await self._shown(tenant, work.id, -1 if work.asked.stream else None)

    async def _get(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        after = None
        if _flag(query, "stream"):
            after = whole_number(query, "starting_after", -1, 0, AFTER_MAX)
        elif "starting_after" in query:
            raise InvalidRequest("starting_after", "needs stream=true")
        return await self._shown(caller.tenant, request.path_params["response_id"], after)

    async def _shown(self, tenant: str, name: str, after: int | None) -> Response:
        """Return a response, or its events behind a sequence number."""
        run = self._background.find(tenant, name)
        if run is not None and run.final is None:
            return JSONResponse(_now(run)) if after is None else self._own_stream(run, after)
        document, stored = await self._stored.response(tenant, name)
        if after is None:
            return JSONResponse(stored.response)
        bell = WakeUp()
        if not document.state:
            return self._stream(EndedEvents(stored, after), bell, AsyncExitStack())
        work = await self._background.restored(document, stored)
        stack = AsyncExitStack()
        events = OthersEvents(self._background, document, work, after, bell.ring)
        stack.callback(events.close)
        return self._stream(events, bell, stack)

    async def _delete(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["response_id"]
        stored = await self._cancelled(caller.tenant, name)
        await self._stored.delete_response(caller.tenant, name)
        if stored.kept is not None:
            await forget(self._background.service, stored.kept)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _cancel(self, request: Request, caller: Caller) -> Response:
        stored = await self._cancelled(caller.tenant, request.path_params["response_id"])
        if not stored.response["background"]:
            problem = "is not a background response: close its connection to cancel it"
            raise InvalidRequest("response_id", problem)
        return JSONResponse(stored.response)

    async def _cancelled(self, tenant: str, name: str) -> StoredResponse:
        """Cancel a response if it is in progress, and return it."""
        for left in reversed(range(CANCEL_TRIES)):
            document, stored = await self._stored.response(tenant, name)
            if not document.state:
                return stored
            try:
                return await self._background.cancel(tenant, document, stored)
            except Conflict:  # it ended at this moment
                if not left:
                    raise
        raise AssertionError("returned or raised")

    async def _input_items(self, request: Request, caller: Caller) -> Response:
        page = Page.of(request.query_params)
        _, stored = await self._stored.response(caller.tenant, request.path_params["response_id"])
        return JSONResponse(page.of_items(stored.input))

    def _own_stream(self, run: Run, after: int) -> Response:
        bell, stack = WakeUp(), AsyncExitStack()
        events = OwnEvents(run, after, bell)
        stack.callback(events.close)
        return self._stream(events, bell, stack)

    def _stream(self, events: EndedEvents | OwnEvents | OthersEvents, bell: WakeUp, stack: AsyncExitStack) -> Response:
        source = ErrorEventSource(events, bell.rung, response_failed)
        return EventStream(source, stack, None, Pings(self._settings.ping_s, COMMENT, bell.ring))


def _now(run: Run) -> dict[str, object]:
    """Return a response that this process follows."""
    return run.final.response if run.final is not None else run.work.body(None, [], status=run.status)


def _flag(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(name, f"is {text[:40]!r}; it must be true or false")
    return text in ("true", "1")
