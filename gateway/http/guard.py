"""The wrapper of every path: it authenticates the caller and answers errors in the shape of the API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kvforge.gateway.access import Access, Caller
from kvforge.protocol.errors import InternalError, KvforgeError, Unavailable

from .errors import Api, api_of, headers_of, status_of
from .notes import Notes, notes_of
from .stream import Gone

Handler = Callable[[Request, Caller], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]
# nginx's status of a request that its client gave up; the metrics have it.
CLIENT_GONE = 499
FAULT = "a fault of the gateway's own; its log has it"
ENDING = "the gateway ends, and drain_s is over: ask again, with the same Idempotency-Key if there was one"
log = logging.getLogger(__name__)


class Guard:
    """Makes of a handler what starlette calls."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def __call__(self, handler: Handler, right: str = "generate") -> Endpoint:
        """right: what the caller must have."""

        async def guarded(request: Request) -> Response:
            notes, api = notes_of(request.scope), api_of(request.url.path, request.headers.raw)
            try:
                response = await handler(request, self._access.caller(request.headers, right))
            except (ClientDisconnect, Gone):
                return Response(status_code=CLIENT_GONE)
            except KvforgeError as error:
                response = refused(error, api, notes)
            except asyncio.CancelledError:  # by the server alone, which would say 500, and nothing in JSON
                response = refused(Unavailable(ENDING), api, notes)
            except Exception:
                log.exception("a fault of our own in %s, request %s", request.url.path, notes.request_id)
                response = refused(InternalError(FAULT), api, notes)
            notes.mark(response.headers, api.request_id)
            return response

        return guarded


def refused(error: KvforgeError, api: Api, notes: Notes) -> Response:
    """The answer to a request that is refused, with its id."""
    headers = {**headers_of(error), api.request_id: notes.request_id}
    return JSONResponse(api.error(error, notes.request_id), status_of(error), headers)
