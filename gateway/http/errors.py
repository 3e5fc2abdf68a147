"""Errors as HTTP has them: a status for each wire code, and the two shapes that clients read."""

from __future__ import annotations

import math
from typing import Any

from gateway.access.errors import Unauthenticated
from kvforge.protocol.errors import (
    CapacityExceeded,
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvforgeError,
    NotAllowed,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Unavailable,
    WorkerError,
)

# Seconds after which whoever was told that nobody serves may look again, where no hint came with the error.
RETRY_S = 1
UNKNOWN, FORBIDDEN, TOO_SLOW, TOO_LARGE = 401, 403, 408, 413

# The first that an error is an instance of. `type` is what OpenAI's clients call it, then Anthropic's.
_STATUS: tuple[tuple[type[KvforgeError], int, str, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error", "invalid_request_error"),
    (NotAllowed, FORBIDDEN, "permission_error", "permission_error"),
    (NotFound, 404, "not_found_error", "not_found_error"),
    (Conflict, 409, "conflict_error", "invalid_request_error"),
    (QueueFull, 429, "rate_limit_error", "rate_limit_error"),
    (QuotaExceeded, 429, "rate_limit_error", "rate_limit_error"),
    (CapacityExceeded, 400, "invalid_request_error", "invalid_request_error"),
    (DeadlineExceeded, 504, "timeout_error", "timeout_error"),
    (Unavailable, 503, "service_unavailable_error", "overloaded_error"),
    (WorkerError, 500, "server_error", "api_error"),
    (KvforgeError, 500, "server_error", "api_error"),
)


class TooSlow(InvalidRequest):
    """It takes too long to come."""


class TooLarge(InvalidRequest):
    """More bytes than are taken."""


def status_of(error: KvforgeError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, Unauthenticated):
        return UNKNOWN
    if isinstance(error, TooLarge):
        return TOO_LARGE
    if isinstance(error, TooSlow):
        return TOO_SLOW
    return _row(error)[1]


def headers_of(error: KvforgeError) -> dict[str, str]:
    """What goes with it: when to try again, in whole seconds and in milliseconds."""
    wait_ms = error.fields.get("retry_after_ms")
    if isinstance(error, QueueFull) and isinstance(wait_ms, int | float):
        return {"Retry-After": str(max(1, math.ceil(wait_ms / 1000))), "Retry-After-Ms": str(math.ceil(wait_ms))}
    if isinstance(error, CoordinatorUnavailable | Draining | Unavailable | QuotaExceeded):
        return {"Retry-After": str(RETRY_S)}
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def openai_error(error: KvforgeError) -> dict[str, Any]:
    """The body that OpenAI's clients read."""
    kind = "authentication_error" if isinstance(error, Unauthenticated) else _row(error)[2]
    return {"error": {"message": error.message, "type": kind, "param": error.fields.get("field"), "code": error.code}}


def anthropic_error(error: KvforgeError, request_id: str = "") -> dict[str, Any]:
    """The body that Anthropic's clients read."""
    kind = "authentication_error" if isinstance(error, Unauthenticated) else _row(error)[3]
    kind = "request_too_large" if isinstance(error, TooLarge) else kind
    said: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}}
    return said | ({"request_id": request_id} if request_id else {})


def _row(error: KvforgeError) -> tuple[type[KvforgeError], int, str, str]:
    return next(row for row in _STATUS if isinstance(error, row[0]))
