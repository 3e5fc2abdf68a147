"""Request bodies: bounded, and decoded as JSON of the type that a route expects."""

from __future__ import annotations

import re
from itertools import islice
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.steady_timeout import steady_timeout

from .errors import TooLarge, TooSlow, WrongEncoding
from .fields import Reader
from .ignored import Ignored

T = TypeVar("T")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$", re.DOTALL)
# A quotation mark within a string is escaped: an odd number of backslashes precedes it.
_KEY_END = re.compile(rb'(?:[^\\]|\\\\)"\s*:')
SHOWN_MAX = 200
WITHIN_S = 60.0


async def read(request: Request, bytes_max: int, within_s: float = WITHIN_S) -> bytes:
    """Return the body of a request.

    Raises:
        WrongEncoding: The body is compressed.
        TooLarge: It exceeds `bytes_max`; raised before that much is read.
        TooSlow: It takes longer than `within_s`.
        ClientDisconnect: The client hung up.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise WrongEncoding("content-encoding", f"{encoding[:80]!r} is not supported: send the body uncompressed")
    try:
        async with steady_timeout(within_s):
            return await _read(request, bytes_max)
    except TimeoutError:
        raise TooSlow("body", f"was not received within {within_s:g} s") from None


async def _read(request: Request, bytes_max: int) -> bytes:
    length = request.headers.get("content-length")
    if length is not None and int(length) > bytes_max:  # the HTTP parser checked that it is a number
        raise _too_large(bytes_max)
    # Most bodies arrive whole with the first message.
    parts, held = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        held += len(part)
        if held > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def counted(body: bytes, fields_max: int) -> bytes:
    """Check the number of fields, since decoding blocks the event loop. Return the body.

    Raises:
        InvalidRequest: It may have more than `fields_max` fields.
    """
    if body.count(b":") <= fields_max or _fields_at_most(body) <= fields_max:  # text has colons too
        return body
    ends = sum(1 for _ in islice(_KEY_END.finditer(body), fields_max + 1))
    if ends > fields_max:
        raise InvalidRequest("body", f"has more than {fields_max} fields (body_fields_max in gateway.toml)")
    return body


def _fields_at_most(body: bytes) -> int:
    """Return an upper bound of the number of fields, faster to compute than the number."""
    spaced = sum(body.count(blank + b":") for blank in (b" ", b"\t", b"\n", b"\r"))
    return spaced + body.count(b'":') - body.count(b'\\":') + body.count(b'\\\\":')


def decoded(reader: Reader[T], body: bytes, ignored: Ignored) -> T:
    """Decode a body. Unknown fields are noted in `ignored`.

    Raises:
        InvalidRequest: Names the field that is refused, missing or of a wrong type.
    """
    try:
        return reader.read(body, ignored)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None


def _wrong(text: str) -> InvalidRequest:
    """Convert msgspec's error, with the path as a client writes it: `messages[0].role`, not `$.messages[0].role`."""
    found = _AT.match(text)
    assert found is not None, "matches whatever it is"
    what, path = found["what"][:SHOWN_MAX], (found["path"] or "$").removeprefix("$").removeprefix(".")
    if missing := _MISSING.match(what):
        return InvalidRequest(_joined(path, missing["name"]), "is missing")
    return InvalidRequest(path or "body", what)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge("body", f"is larger than the limit of {bytes_max} bytes")
