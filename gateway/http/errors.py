"""Errors over HTTP: a status for each wire code, and the error bodies of both APIs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.gateway.access.errors import Unauthenticated
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

# The default of Retry-After, in seconds.
RETRY_S = 1
UNKNOWN, FORBIDDEN, NO_SUCH_METHOD, TOO_SLOW, TOO_LARGE, WRONG_ENCODING = 401, 403, 405, 408, 413, 415

# The first matching class applies: its status, then the `type` in OpenAI's and in Anthropic's error body.
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


class NoSuchPath(NotFound):
    """The path does not exist."""


class NoSuchMethod(InvalidRequest):
    """The path does not support this method."""


class WrongEncoding(InvalidRequest):
    """The body is compressed."""


class ContextOverflow(InvalidRequest):
    """The prompt, or prompt and max_tokens together, exceed the model's context.

    Agents recognise this error by OpenAI's code and by the wording of OpenAI's and Anthropic's messages, and then
    shorten their conversation.

    Args:
        field: The prompt's field if the prompt alone is too long, else the field of max_tokens.
        prompt_tokens: The length of the prompt.
        max_tokens: The requested length of the answer.
        context_tokens: The limit of both together.
        problem: The coordinator's explanation, if it is more than these numbers.
    """

    code = "context_length_exceeded"

    def __init__(self, field: str, prompt_tokens: int, max_tokens: int, context_tokens: int, problem: str = "") -> None:
        super().__init__(field, "", prompt_tokens=prompt_tokens, max_tokens=max_tokens, context_tokens=context_tokens)
        self.message = (
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the answer). "
            f"Please reduce the length of {field}." + (f" ({problem})" if problem else "")
        )
        self.args = (self.message,)

    @property
    def anthropic_message(self) -> str:
        """The message in Anthropic's words."""
        prompt, most, context = (self.fields[name] for name in ("prompt_tokens", "max_tokens", "context_tokens"))
        assert isinstance(prompt, int) and isinstance(context, int)
        if prompt >= context:
            return f"prompt is too long: {prompt} tokens > {context - 1} maximum"
        over = f"input length and `max_tokens` exceed context limit: {prompt} + {most} > {context}"
        return f"{over}, decrease input length or `max_tokens` and try again"


class ThreadsUnsupported(InvalidRequest):
    """The request asks for a stored conversation.

    Anthropic's SDKs ask for one in their tool loops. These details make them send all messages instead.
    """

    details: ClassVar[dict[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class TooSlow(InvalidRequest):
    """The body takes too long to arrive."""


class TooLarge(InvalidRequest):
    """The body exceeds the limit."""


def status_of(error: KvforgeError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, Unauthenticated):
        return UNKNOWN
    if isinstance(error, TooLarge):
        return TOO_LARGE
    if isinstance(error, NoSuchMethod):
        return NO_SUCH_METHOD
    if isinstance(error, WrongEncoding):
        return WRONG_ENCODING
    if isinstance(error, TooSlow):
        return TOO_SLOW
    return _row(error)[1]


def headers_of(error: KvforgeError) -> dict[str, str]:
    """Return the headers of an error: when to retry, in whole seconds and in milliseconds."""
    wait_ms = error.fields.get("retry_after_ms")
    if isinstance(error, QueueFull) and isinstance(wait_ms, int | float):
        return {"Retry-After": str(max(1, math.ceil(wait_ms / 1000))), "Retry-After-Ms": str(math.ceil(wait_ms))}
    if isinstance(error, CoordinatorUnavailable | Draining | Unavailable | QuotaExceeded):
        return {"Retry-After": str(RETRY_S)}
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def openai_error(error: KvforgeError, request_id: str = "") -> dict[str, Any]:  # noqa: ARG001 - it is in a header
    """Return the error body for OpenAI's clients."""
    kind = "authentication_error" if isinstance(error, Unauthenticated) else _row(error)[2]
    return {"error": {"message": error.message, "type": kind, "param": error.fields.get("field"), "code": error.code}}


def anthropic_error(error: KvforgeError, request_id: str = "") -> dict[str, Any]:
    """Return the error body for Anthropic's clients."""
    kind = "authentication_error" if isinstance(error, Unauthenticated) else _row(error)[3]
    kind = "request_too_large" if isinstance(error, TooLarge) else kind
    message = error.anthropic_message if isinstance(error, ContextOverflow) else error.message
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message, "code": error.code}}
    if isinstance(error, ThreadsUnsupported):
        body["error"]["details"] = error.details
    return body | ({"request_id": request_id} if request_id else {})


@dataclass(frozen=True, slots=True)
class Api:
    """The error conventions of an API.

    Attributes:
        error: Returns the body of an error, given the request's id.
        request_id: The header with that id.
    """

    error: Callable[[KvforgeError, str], dict[str, Any]]
    request_id: str


OPENAI, ANTHROPIC = Api(openai_error, "x-request-id"), Api(anthropic_error, "request-id")
ANTHROPIC_PATHS = ("/v1/messages", "/v1/complete")


def api_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Api:
    """Return the API of a request, by its path or by the version header that all of Anthropic's clients send."""
    if any(path == own or path.startswith(f"{own}/") for own in ANTHROPIC_PATHS):
        return ANTHROPIC
    return ANTHROPIC if any(name == b"anthropic-version" for name, _ in headers) else OPENAI


def _row(error: KvforgeError) -> tuple[type[KvforgeError], int, str, str]:
    return next(row for row in _STATUS if isinstance(error, row[0]))
