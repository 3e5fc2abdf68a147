"""The wrapper of every handler: it authenticates the caller and returns errors in the API's format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kvforge.gateway.access import Access, Caller
from kvforge.protocol.errors import InternalError, KvforgeError, Unavailable

from .errors import Api, api_of, headers_of, status_of
from .notes import RequestNotes, notes_of
from .stream import ClientDisconnected

Handler = Callable[[Request, Caller], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]
# nginx's status for a client that disconnected; it appears in the metrics.
CLIENT_GONE = 499
FAULT = "internal error of the gateway; see its log"
ENDING = "the gateway is shutting down (drain_s is over): retry, with the same Idempotency-Key if there was one"
log = logging.getLogger(__name__)


class Guard:
    """Turns a handler into an endpoint of Starlette."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def __call__(self, handler: Handler, right: str = "generate") -> Endpoint:
        """Wrap a handler. `right` is what the caller needs."""

        async def guarded(request: Request) -> Response:
            notes, api = notes_of(request.scope), api_of(request.url.path, request.headers.raw)
            try:
                response = await handler(request, self._access.caller(request.headers, right))
            except (ClientDisconnect, ClientDisconnected):
                return Response(status_code=CLIENT_GONE)
            except KvforgeError as error:
                response = refused(error, api, notes)
            except asyncio.CancelledError:  # by uvicorn's shutdown, which would answer 500 without JSON
                response = refused(Unavailable(ENDING), api, notes)
            except Exception:
                log.exception("internal error in %s, request %s", request.url.path, notes.request_id)
                response = refused(InternalError(FAULT), api, notes)
            notes.mark(response.headers, api.request_id)
            return response

        return guarded


def refused(error: KvforgeError, api: Api, notes: RequestNotes) -> Response:
    """Return the error response to a request, with its id."""
    headers = {**headers_of(error), api.request_id: notes.request_id}
    return JSONResponse(api.error(error, notes.request_id), status_of(error), headers)
