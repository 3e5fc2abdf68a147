"""What a viewer asks for or does: why something is as it is, the end of a request, a drain.

What changes something is taken from the page itself alone. A browser sends what other sites make it send, so each such
call must carry a header and a type that no form can send, and come from the origin that it goes to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request

from kvforge import AsyncClient
from kvforge.gateway.http.body import decoded, read
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import Ignored
from kvforge.protocol.errors import InvalidRequest, NotAllowed, QueueFull
from kvforge.protocol.messages import Explanation

HEADER = "x-kvforge-page"
BODY_BYTES_MAX = 1024
EXPLAINED_PER_S = 20
SUBJECTS = ("block", "request", "tenant")
DIGITS_MAX = 18


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request to be ended."""

    request: Annotated[int, msgspec.Meta(ge=0)]


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """deadline_s: as `AsyncClient.drain` has it."""

    deadline_s: float | None = None


_CANCEL, _DRAIN = Reader(Cancel), Reader(Drain)


class Explaining:
    """Questions of all viewers, so many a second at most: a pointer that wanders over the map asks about each block."""

    def __init__(self, client: Callable[[], AsyncClient]) -> None:
        self._client = client
        self._asked: deque[float] = deque(maxlen=EXPLAINED_PER_S)

    async def explain(self, request: Request) -> Explanation:
        """Answers `?block=`, `?request=` or `?tenant=`. Raises InvalidRequest naming the field, QueueFull where too
        much is asked, and what the client does."""
        given = [name for name in SUBJECTS if name in request.query_params]
        if len(given) != 1:
            raise InvalidRequest("subject", f"name exactly one of {', '.join(SUBJECTS)}")
        name = given[0]
        value = request.query_params[name]
        if name != "tenant" and not (value.isascii() and value.isdigit() and len(value) <= DIGITS_MAX):
            raise InvalidRequest(name, "must be a whole number")
        now = monotonic()
        if len(self._asked) == EXPLAINED_PER_S and (left_s := self._asked[0] + 1 - now) > 0:
            raise QueueFull(EXPLAINED_PER_S, round(1000 * left_s) + 1, "this page, for a second,")
        self._asked.append(now)
        if name == "block":
            return await self._client().explain(block=int(value))
        if name == "request":
            return await self._client().explain(request=int(value))
        return await self._client().explain(tenant=value)


async def cancel(client: AsyncClient, request: Request) -> None:
    """Ends a request. Raises NotAllowed where the page did not send this, InvalidRequest, and what the client does."""
    check_sender(request)
    wanted = decoded(_CANCEL, await read(request, BODY_BYTES_MAX), Ignored(strict=True))
    await client.cancel(wanted.request)


async def drain(client: AsyncClient, request: Request) -> None:
    """Stops admission. Raises as `cancel`."""
    check_sender(request)
    wanted = decoded(_DRAIN, await read(request, BODY_BYTES_MAX), Ignored(strict=True))
    await client.drain(wanted.deadline_s)


def check_sender(request: Request) -> None:
    """Raises NotAllowed unless the page of this very origin sent the request."""
    headers = request.headers
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if headers.get(HEADER) != "1" or media_type != "application/json":
        raise NotAllowed("admin", f"this takes application/json with the header {HEADER}: 1, as the page sends it")
    if urlsplit(headers.get("origin", "")).netloc.lower() != headers.get("host", "").lower() or not headers.get("host"):
        raise NotAllowed("admin", "this is taken from the page of this very address alone")
