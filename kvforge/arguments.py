"""What a client can check before it sends anything: each wrong argument is an InvalidRequest that names its field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.codec import FRAME_BYTES_MAX
from protocol.errors import InvalidRequest
from protocol.messages import LOGIT_BIAS_LIMIT, LOGIT_BIAS_MAX, SAMPLING_RANGES, Int32Array, Sampling

INT32_MAX = (1 << 31) - 1
SEED_MAX = (1 << 64) - 1
TEMPERATURE_MAX = 100.0
STOP_STRINGS_MAX = 16
STOP_LENGTH_MAX = 1024
PRIORITY_MAX = 100
KEY_LENGTH_MAX = 128
SAMPLES_MAX = 256
LIMIT_S_MAX = 30 * 24 * 3600
INT64_MAX = (1 << 63) - 1
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
    # numpy takes True for 1 beside integers; a set of types is the cheap way to see that there is none.
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


def check_submit(max_tokens: object, sampling: object, tenant: object) -> None:
    """Raises InvalidRequest naming `max_tokens`, `tenant` or the field of `sampling` that is wrong."""
    if not _is_int(max_tokens) or not 1 <= max_tokens <= INT32_MAX:  # type: ignore[operator]
        raise InvalidRequest("max_tokens", f"is {max_tokens!r}; it must be an integer of at least 1")
    if not isinstance(tenant, str) or not tenant:
        raise InvalidRequest("tenant", f"is {tenant!r}; it must be a name")
    if not isinstance(sampling, Sampling):
        raise InvalidRequest("sampling", f"is {type(sampling).__name__}; it must be a kvforge.Sampling")
    check_sampling(sampling)


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest naming the field that is out of range."""
    temperature = sampling.temperature
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise InvalidRequest("sampling.temperature", f"is {temperature!r}; it must be a number")
    if not math.isfinite(temperature) or not 0 <= temperature <= TEMPERATURE_MAX:
        raise InvalidRequest("sampling.temperature", f"is {temperature}; it must be 0 (greedy) to {TEMPERATURE_MAX:g}")
    if sampling.seed is not None and not (_is_int(sampling.seed) and 0 <= sampling.seed <= SEED_MAX):
        raise InvalidRequest("sampling.seed", f"is {sampling.seed!r}; it must be an integer of 64 bits")
    if not isinstance(sampling.stop_tokens, tuple | list):
        raise InvalidRequest("sampling.stop_tokens", "is not a sequence of token ids")
    for token in sampling.stop_tokens:
        if not _is_int(token) or not 0 <= token <= INT32_MAX:
            raise InvalidRequest("sampling.stop_tokens", f"holds {token!r}, which is not a token id")
    if not isinstance(sampling.ignore_eos, bool):
        raise InvalidRequest("sampling.ignore_eos", f"is {sampling.ignore_eos!r}; it must be True or False")
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(sampling, name)
        whole = isinstance(getattr(Sampling(), name), int)
        if not (_is_int(value) if whole else _is_int(value) or isinstance(value, float)) or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            raise InvalidRequest(f"sampling.{name}", f"is {value!r}; it must be {kind} from {low:g} to {high:g}")
    _check_bias(sampling.logit_bias)


def _check_bias(pairs: object) -> None:
    field = "sampling.logit_bias"
    if not isinstance(pairs, tuple | list) or not all(isinstance(p, tuple | list) and len(p) == 2 for p in pairs):
        raise InvalidRequest(field, "is not a sequence of (token id, value) pairs")
    if len(pairs) > LOGIT_BIAS_MAX:
        raise InvalidRequest(field, f"has {len(pairs)} entries; there may be {LOGIT_BIAS_MAX}")
    seen = set()
    for token, value in pairs:
        if not _is_int(token) or not 0 <= token <= INT32_MAX:
            raise InvalidRequest(field, f"holds {token!r}, which is not a token id")
        if token in seen:
            raise InvalidRequest(field, f"names token id {token} twice")
        if not (_is_int(value) or isinstance(value, float)) or not (
            abs(value) <= LOGIT_BIAS_LIMIT or value == -math.inf
        ):
            limit = f"-{LOGIT_BIAS_LIMIT:g} to {LOGIT_BIAS_LIMIT:g}, or -inf to ban the token"
            raise InvalidRequest(field, f"gives token id {token} the value {value!r}; it must be {limit}")
        seen.add(token)


def stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings from one or several. Raises InvalidRequest naming `stop`."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, tuple | list) or not all(isinstance(item, str) for item in stops):
        raise InvalidRequest("stop", "is neither a text nor a sequence of texts")
    if len(stops) > STOP_STRINGS_MAX or not all(0 < len(item) <= STOP_LENGTH_MAX for item in stops):
        problem = f"holds more than {STOP_STRINGS_MAX} texts, or one that has not 1 to {STOP_LENGTH_MAX} characters"
        raise InvalidRequest("stop", problem)
    return tuple(stops)


def check_request(priority: object, detached: object, key: object) -> None:
    """Raises InvalidRequest naming `priority`, `detached` or `key`."""
    if not _is_int(priority) or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:  # type: ignore[operator]
        raise InvalidRequest(
            "priority", f"is {priority!r}; it must be an integer from -{PRIORITY_MAX} to {PRIORITY_MAX}"
        )
    if not isinstance(detached, bool):
        raise InvalidRequest("detached", f"is {detached!r}; it must be True or False")
    if not isinstance(key, str) or len(key) > KEY_LENGTH_MAX or not key.isprintable():
        raise InvalidRequest("key", f"must be a text of at most {KEY_LENGTH_MAX} printable characters")


def check_count(count: object) -> None:
    """How many answers to one prompt. Raises InvalidRequest naming `count`."""
    if not _is_int(count) or not 1 <= count <= SAMPLES_MAX:  # type: ignore[operator]
        raise InvalidRequest("count", f"is {count!r}; it must be an integer from 1 to {SAMPLES_MAX}")


def check_attach(request_id: object, offset: object) -> None:
    """Raises InvalidRequest naming `request_id` or `offset`."""
    if not _is_int(request_id) or not 1 <= request_id <= INT64_MAX:  # type: ignore[operator]
        raise InvalidRequest("request_id", f"is {request_id!r}; it must be the id of a request")
    if not _is_int(offset) or not 0 <= offset <= INT32_MAX:  # type: ignore[operator]
        raise InvalidRequest("offset", f"is {offset!r}; it must be an integer from 0 to {INT32_MAX}")


def milliseconds(field: str, value: object) -> int:
    """A limit in seconds as whole milliseconds, rounded up; 0 for None. Raises InvalidRequest naming `field`."""
    if value is None:
        return 0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= LIMIT_S_MAX:  # type: ignore[operator]
        raise InvalidRequest(field, f"is {value!r}; it must be a number of seconds above 0, at most {LIMIT_S_MAX}")
    # A microsecond is not worth a millisecond: 1.1 s are 1100 ms, though the product is a little more.
    return max(1, math.ceil(round(value * 1000, 3)))  # type: ignore[operator]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
