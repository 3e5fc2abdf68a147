"""The two routes. The document is the same for every installation of a version, so they need no key."""

from __future__ import annotations

from functools import cache

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .document import document
from .page import page

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes() -> list[Route]:
    """Return `/openapi.json` and `/docs`, which are generated on first use."""

    async def described(request: Request) -> Response:  # noqa: ARG001
        return Response(_json(), media_type="application/json", headers=HEADERS)

    async def docs(request: Request) -> Response:  # noqa: ARG001
        return Response(_html(), media_type="text/html", headers=HEADERS)

    return [
        Route("/openapi.json", described, methods=["GET"], include_in_schema=False),
        Route("/docs", docs, methods=["GET"], include_in_schema=False),
    ]


@cache
def _json() -> bytes:
    return msgspec.json.encode(document())


@cache
def _html() -> bytes:
    return page(document()).encode()
