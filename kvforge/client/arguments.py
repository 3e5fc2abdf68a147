"""What a client can check before it sends anything: each wrong argument is an InvalidRequest that names its field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvforge.protocol.codec import FRAME_BYTES_MAX
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array

from .sampling import Sampling
from .values import INT32_MAX, INT64_MAX, flag, number, shown, whole

STOP_STRINGS_MAX = 16
STOP_LENGTH_MAX = 1024
PRIORITY_MAX = 100
KEY_LENGTH_MAX = 128
SAMPLES_MAX = 256
LIMIT_S_MAX = 30 * 24 * 3600
PROMPT_TOKENS_MAX = FRAME_BYTES_MAX // 4


def prompt_array(prompt: Sequence[int] | np.ndarray[Any, Any], empty: bool = False) -> Int32Array:
    """The token ids as [prompt_tokens] int32. Raises InvalidRequest naming `prompt`."""
    return token_array("prompt", prompt, empty)


def token_array(field: str, tokens: object, empty: bool = False) -> Int32Array:
    """Token ids as [tokens] int32. `empty`: none at all is fine too. Raises InvalidRequest naming `field`."""
    if isinstance(tokens, str | bytes):
        raise InvalidRequest(field, "is text; submit() takes token ids, generate() takes text")
    try:
        items = tokens if isinstance(tokens, np.ndarray) else list(tokens)  # type: ignore[call-overload]
        ids = np.asarray(items)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(field, "is not a sequence of token ids") from None
    if ids.ndim != 1:
        raise InvalidRequest(field, f"is one sequence of token ids; this has {ids.ndim} dimensions")
    if not len(ids):
        if empty:
            return np.zeros(0, np.int32)
        raise InvalidRequest(field, "is empty; it needs at least one token id")
    if len(ids) > PROMPT_TOKENS_MAX:
        raise InvalidRequest(field, f"has {len(ids)} token ids; the most that can be sent is {PROMPT_TOKENS_MAX}")
    # Among integers numpy reads True as 1; comparing the set of types is a cheap way to find it.
    if ids.dtype.kind not in "iu" or (isinstance(items, list) and set(map(type, items)) != {int}):
        _point_at(field, items)
    wrong = np.flatnonzero((ids < 0) | (ids > INT32_MAX))
    if len(wrong):
        _refuse(field, int(wrong[0]), ids[wrong[0]])
    return ids.astype("<i4")


def _point_at(field: str, tokens: Sequence[Any] | np.ndarray[Any, Any]) -> None:
    """Raises for the first item that is no token id, if there is one."""
    for index, item in enumerate(tokens):
        if isinstance(item, bool | np.bool_) or not isinstance(item, int | np.integer) or not 0 <= item <= INT32_MAX:
            _refuse(field, index, item)


def _refuse(field: str, index: int, item: object) -> None:
    shown = str(item) if len(str(item)) <= 30 else str(item)[:27] + "..."
    kind = "" if isinstance(item, int | np.integer) else f" ({type(item).__name__})"
    raise InvalidRequest(field, f"item {index} is {shown}{kind}; a token id is an integer from 0 to {INT32_MAX}")


def check_submit(max_tokens: object, sampling: object, tenant: object, salt: object) -> int:
    """Returns `max_tokens` as int. Raises InvalidRequest naming `max_tokens`, `tenant`, `salt` or `sampling`."""
    if not isinstance(tenant, str) or not tenant:
        raise InvalidRequest("tenant", f"is {tenant!r}; it must be a name")
    if not isinstance(salt, str):
        raise InvalidRequest("salt", f"is {shown(salt)}; it must be a text")
    if not isinstance(sampling, Sampling):
        raise InvalidRequest("sampling", f"is {type(sampling).__name__}; it must be a kvforge.Sampling")
    return whole("max_tokens", max_tokens, 1, INT32_MAX)


def stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings from one or several. Raises InvalidRequest naming `stop`."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, tuple | list) or not all(isinstance(item, str) for item in stops):
        raise InvalidRequest("stop", "is neither a text nor a sequence of texts")
    if len(stops) > STOP_STRINGS_MAX or not all(0 < len(item) <= STOP_LENGTH_MAX for item in stops):
        problem = f"holds more than {STOP_STRINGS_MAX} texts, or one that has not 1 to {STOP_LENGTH_MAX} characters"
        raise InvalidRequest("stop", problem)
    return tuple(stops)


def check_request(priority: object, detached: object, key: object) -> tuple[int, bool]:
    """Returns `priority` and `detached` as they are sent. Raises InvalidRequest naming one of them, or `key`."""
    if not isinstance(key, str) or len(key) > KEY_LENGTH_MAX or not key.isprintable():
        raise InvalidRequest("key", f"must be a text of at most {KEY_LENGTH_MAX} printable characters")
    return whole("priority", priority, -PRIORITY_MAX, PRIORITY_MAX), flag("detached", detached)


def answer_count(count: object) -> int:
    """How many answers to one prompt. Raises InvalidRequest naming `count`."""
    return whole("count", count, 1, SAMPLES_MAX)


def request_number(request_id: object, field: str = "request_id") -> int:
    """The id of a request. Raises InvalidRequest naming `field`."""
    return whole(field, request_id, 1, INT64_MAX)


def milliseconds(field: str, value: object) -> int:
    """A limit in seconds as whole milliseconds, rounded up; 0 for None. Raises InvalidRequest naming `field`."""
    if value is None:
        return 0
    try:
        seconds = number(field, value, 0, LIMIT_S_MAX)
    except InvalidRequest:
        seconds = 0.0
    if not seconds:
        problem = f"is {shown(value)}; it must be a number of seconds above 0, at most {LIMIT_S_MAX}"
        raise InvalidRequest(field, problem)
    # A microsecond is not worth a millisecond: 1.1 s are 1100 ms, though the product is a little more.
    return max(1, math.ceil(round(seconds * 1000, 3)))
