"""The page's queries and actions: explain a state, cancel a request, drain.

Actions are accepted from the page alone, to prevent cross-site request forgery: each call needs a custom header and a
content type that no HTML form can send, and must come from the page's own origin.
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


class CancelBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /page/cancel: the request to cancel."""

    request: Annotated[int, msgspec.Meta(ge=0)]


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /page/drain. `deadline_s` is that of `AsyncClient.drain`."""

    deadline_s: float | None = None


_CANCEL, _DRAIN = Reader(CancelBody), Reader(DrainBody)


class ExplainLimiter:
    """Explain queries of all viewers, rate-limited: a pointer that moves over the map asks about every block."""

    def __init__(self, client: Callable[[], AsyncClient]) -> None:
        self._client = client
        self._asked: deque[float] = deque(maxlen=EXPLAINED_PER_S)

    async def explain(self, request: Request) -> Explanation:
        """Answer `?block=`, `?request=` or `?tenant=`.

        Raises:
            InvalidRequest: Names the field.
            QueueFull: There are too many queries.
            KvforgeError: As `AsyncClient.explain`.
        """
        given = [name for name in SUBJECTS if name in request.query_params]
        if len(given) != 1:
            raise InvalidRequest("subject", f"name exactly one of {', '.join(SUBJECTS)}")
        name = given[0]
        value = request.query_params[name]
        if name != "tenant" and not (value.isascii() and value.isdigit() and len(value) <= DIGITS_MAX):
            raise InvalidRequest(name, "must be a whole number")
        now = monotonic()
        if len(self._asked) == EXPLAINED_PER_S and (left_s := self._asked[0] + 1 - now) > 0:
            raise QueueFull(EXPLAINED_PER_S, round(1000 * left_s) + 1, "explain queries of the live page")
        self._asked.append(now)
        if name == "block":
            return await self._client().explain(block=int(value))
        if name == "request":
            return await self._client().explain(request=int(value))
        return await self._client().explain(tenant=value)


async def cancel(client: AsyncClient, request: Request) -> None:
    """Cancel a request.

    Raises:
        NotAllowed: The call did not come from the page.
        InvalidRequest: The body is malformed.
        KvforgeError: As `AsyncClient.cancel`.
    """
    check_sender(request)
    wanted = decoded(_CANCEL, await read(request, BODY_BYTES_MAX), Ignored(strict=True))
    await client.cancel(wanted.request)


async def drain(client: AsyncClient, request: Request) -> None:
    """Stop admission.

    Raises:
        NotAllowed: The call did not come from the page.
        InvalidRequest: The body is malformed.
        KvforgeError: As `AsyncClient.drain`.
    """
    check_sender(request)
    wanted = decoded(_DRAIN, await read(request, BODY_BYTES_MAX), Ignored(strict=True))
    await client.drain(wanted.deadline_s)


def check_sender(request: Request) -> None:
    """Check that the page of this very origin sent the request.

    Raises:
        NotAllowed: Another page or program did.
    """
    headers = request.headers
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if headers.get(HEADER) != "1" or media_type != "application/json":
        raise NotAllowed("admin", f"send application/json with the header {HEADER}: 1, as the live page does")
    if urlsplit(headers.get("origin", "")).netloc.lower() != headers.get("host", "").lower() or not headers.get("host"):
        raise NotAllowed(
            "admin", "only the live page of this address may send this (the Origin and Host headers differ)"
        )
