"""Checks of arguments before anything is sent. Each wrong argument raises an InvalidRequest that names its field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvforge.protocol.codec import FRAME_BYTES_MAX
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import TOP_LOGPROBS_MAX, Int32Array

from .sampling import SamplingParams
from .values import INT32_MAX, INT64_MAX, flag, number, shown, whole

STOP_STRINGS_MAX = 16
STOP_LENGTH_MAX = 1024
PRIORITY_MAX = 100
KEY_LENGTH_MAX = 128
SAMPLES_MAX = 256
LIMIT_S_MAX = 30 * 24 * 3600
PROMPT_TOKENS_MAX = FRAME_BYTES_MAX // 4


def prompt_array(prompt: Sequence[int] | np.ndarray[Any, Any], empty: bool = False) -> Int32Array:
    """Convert the token ids of a prompt to [prompt_tokens] int32.

    Args:
        prompt: The token ids.
        empty: Whether no token at all is allowed.

    Raises:
        InvalidRequest: Names `prompt`.
    """
    return token_array("prompt", prompt, empty)


def token_array(field: str, tokens: object, empty: bool = False) -> Int32Array:
    """Convert token ids to [tokens] int32.

    Args:
        field: The argument's name.
        tokens: The token ids.
        empty: Whether no token at all is allowed.

    Raises:
        InvalidRequest: Names `field`.
    """
    if isinstance(tokens, str | bytes):
        raise InvalidRequest(field, "is text; submit() takes token ids, generate() takes text")
    try:
        items = tokens if isinstance(tokens, np.ndarray) else list(tokens)  # type: ignore[call-overload]
        ids = np.asarray(items)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(field, "is not a sequence of token ids") from None
    if ids.ndim != 1:
        raise InvalidRequest(field, f"has {ids.ndim} dimensions; expected one sequence of token ids")
    if not len(ids):
        if empty:
            return np.zeros(0, np.int32)
        raise InvalidRequest(field, "is empty; it needs at least one token id")
    if len(ids) > PROMPT_TOKENS_MAX:
        raise InvalidRequest(field, f"has {len(ids)} token ids; at most {PROMPT_TOKENS_MAX} can be sent")
    # numpy reads True among integers as 1; comparing the set of types finds it cheaply.
    if ids.dtype.kind not in "iu" or (isinstance(items, list) and set(map(type, items)) != {int}):
        _point_at(field, items)
    wrong = np.flatnonzero((ids < 0) | (ids > INT32_MAX))
    if len(wrong):
        _refuse(field, int(wrong[0]), ids[wrong[0]])
    return ids.astype("<i4")


def _point_at(field: str, tokens: Sequence[Any] | np.ndarray[Any, Any]) -> None:
    """Raise for the first item that is not a token id, if there is one."""
    for index, item in enumerate(tokens):
        if isinstance(item, bool | np.bool_) or not isinstance(item, int | np.integer) or not 0 <= item <= INT32_MAX:
            _refuse(field, index, item)


def _refuse(field: str, index: int, item: object) -> None:
    shown = str(item) if len(str(item)) <= 30 else str(item)[:27] + "..."
    kind = "" if isinstance(item, int | np.integer) else f" ({type(item).__name__})"
    raise InvalidRequest(field, f"item {index} is {shown}{kind}; a token id is an integer from 0 to {INT32_MAX}")


def check_submit(max_tokens: object, sampling: object, tenant: object, cache_salt: object) -> int:
    """Check the arguments of a request.

    Returns:
        `max_tokens` as int.

    Raises:
        InvalidRequest: Names `max_tokens`, `tenant`, `cache_salt` or `sampling`.
    """
    if not isinstance(tenant, str) or not tenant:
        raise InvalidRequest("tenant", f"is {tenant!r}; it must be a name")
    if not isinstance(cache_salt, str):
        raise InvalidRequest("cache_salt", f"is {shown(cache_salt)}; it must be a text")
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest("sampling", f"is {type(sampling).__name__}; it must be a kvforge.SamplingParams")
    least = 1 if sampling.prompt_logprobs is None else 0
    return whole("max_tokens", max_tokens, least, INT32_MAX)


def scoring(top_logprobs: object) -> SamplingParams:
    """Return the sampling parameters of a request that scores its prompt and generates nothing.

    Raises:
        InvalidRequest: Names `top_logprobs`.
    """
    width = whole("top_logprobs", top_logprobs, 0, TOP_LOGPROBS_MAX)
    return SamplingParams(temperature=0.0, prompt_logprobs=width)


def stop_strings(stop: object) -> tuple[str, ...]:
    """Return stop strings, given as one or several.

    Raises:
        InvalidRequest: Names `stop`.
    """
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, tuple | list) or not all(isinstance(item, str) for item in stops):
        raise InvalidRequest("stop", "is neither a text nor a sequence of texts")
    if len(stops) > STOP_STRINGS_MAX or not all(0 < len(item) <= STOP_LENGTH_MAX for item in stops):
        problem = f"must hold at most {STOP_STRINGS_MAX} texts of 1 to {STOP_LENGTH_MAX} characters"
        raise InvalidRequest("stop", problem)
    return tuple(stops)


def check_request(priority: object, detached: object, idempotency_key: object) -> tuple[int, bool]:
    """Check further arguments of a request.

    Returns:
        `priority` and `detached` as they are sent.

    Raises:
        InvalidRequest: Names `priority`, `detached` or `idempotency_key`.
    """
    key = idempotency_key
    if not isinstance(key, str) or len(key) > KEY_LENGTH_MAX or not key.isprintable():
        raise InvalidRequest("idempotency_key", f"must be a text of at most {KEY_LENGTH_MAX} printable characters")
    return whole("priority", priority, -PRIORITY_MAX, PRIORITY_MAX), flag("detached", detached)


def answer_count(n: object) -> int:
    """Check the number of answers to one prompt.

    Raises:
        InvalidRequest: Names `n`.
    """
    return whole("n", n, 1, SAMPLES_MAX)


def request_number(request_id: object, field: str = "request_id") -> int:
    """Check the id of a request.

    Raises:
        InvalidRequest: Names `field`.
    """
    return whole(field, request_id, 1, INT64_MAX)


def milliseconds(field: str, value: object) -> int:
    """Convert a limit in seconds to whole milliseconds, rounded up; 0 for None.

    Raises:
        InvalidRequest: Names `field`.
    """
    if value is None:
        return 0
    try:
        seconds = number(field, value, 0, LIMIT_S_MAX)
    except InvalidRequest:
        seconds = 0.0
    if not seconds:
        problem = f"is {shown(value)}; it must be a number of seconds above 0, at most {LIMIT_S_MAX}"
        raise InvalidRequest(field, problem)
    # Round before ceil: 1.1 s are 1100 ms, though the floating-point product is slightly larger.
    return max(1, math.ceil(round(seconds * 1000, 3)))
