"""What stands before every path: who asks is known and may, and what goes wrong has the API's own shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gateway.access import Access, Caller
from kvforge.protocol.errors import InternalError, KvforgeError, Unavailable

from .errors import headers_of, status_of
from .notes import notes_of
from .stream import Gone

Handler = Callable[[Request, Caller], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]
Shape = Callable[[KvforgeError], dict[str, Any]]
# As nginx has it: nobody reads this status any more, but whoever counts requests does.
CLIENT_GONE = 499
ENDING = "the gateway ends, and drain_s is over: ask again, with the same Idempotency-Key if there was one"
log = logging.getLogger(__name__)


class Guard:
    """Makes of a handler what starlette calls."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def __call__(self, handler: Handler, shape: Shape, right: str = "generate") -> Endpoint:
        """shape: of an error's body. right: what the caller must have."""

        async def guarded(request: Request) -> Response:
            notes = notes_of(request.scope)
            response = await answered(request)
            notes.mark(response.headers)
            return response

        async def answered(request: Request) -> Response:
            try:
                caller = self._access.caller(request.headers, right)
                return await handler(request, caller)
            except KvforgeError as error:
                return JSONResponse(shape(error), status_of(error), headers_of(error))
            except (ClientDisconnect, Gone):
                return Response(status_code=CLIENT_GONE)
            except asyncio.CancelledError:  # by the server alone, which would say 500, and nothing in JSON
                ending = Unavailable(ENDING)
                return JSONResponse(shape(ending), status_of(ending), headers_of(ending))
            except Exception:
                log.exception("a fault of our own in %s", request.url.path)
                return JSONResponse(shape(InternalError("a fault of the gateway's own; its log has it")), 500)

        return guarded
