"""Incremental JSON: finds where a value ends without waiting for the rest of the text."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from .reader import Emit, Reader

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r'["{}\[\]<]')  # "<" may begin the closing marker of a call
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")


def string(reader: Reader) -> Generator[None, None, str | None]:
    """Read a string. Return None if there is none, or an incomplete one."""
    if (yield from reader.peek()) != '"':
        return None
    parts: list[str] = []
    if not (yield from value(reader, parts.append)):
        return None
    try:
        text = json.loads("".join(parts), strict=False)
    except ValueError:
        return None
    return sound(text) if isinstance(text, str) else None


def value(reader: Reader, emit: Emit, stop: str = "") -> Generator[None, None, bool]:
    """Read one value and emit its text as it arrives.

    Args:
        reader: The text.
        emit: Receives the pieces of the value.
        stop: A marker that ends an incomplete value outside of strings; it is not consumed.

    Returns:
        Whether a complete value was read.
    """
    first = yield from reader.space()
    if first == '"':
        emit(reader.read_to(reader.at + 1))
        return (yield from _string_rest(reader, emit))
    if first in ("{", "["):
        return (yield from _nested(reader, emit, stop))
    return (yield from _scalar(reader, emit))


def _scalar(reader: Reader, emit: Emit) -> Generator[None, None, bool]:
    """Read a number or a word, which ends at any other character."""
    parts: list[str] = []
    while True:
        found = _SCALAR.match(reader.text, reader.at)
        assert found is not None, "matches whatever is there"
        parts.append(reader.read_to(found.end()))
        if reader.at < len(reader.text) or reader.ended:
            break
        yield
    text = "".join(parts)
    try:
        json.loads(text)
    except ValueError:
        return False
    emit(text)
    return True


def _string_rest(reader: Reader, emit: Emit) -> Generator[None, None, bool]:
    """Read a string behind its opening quote. No piece ends within an escape; raw line breaks are escaped."""
    while True:
        found = _IN_STRING.search(reader.text, reader.at)
        if found is None:
            if reader.at < len(reader.text):
                emit(reader.read_to(len(reader.text)))
        elif found.group() == '"':
            emit(reader.read_to(found.end()))
            return True
        elif found.group() != "\\":
            if found.start() > reader.at:
                emit(reader.read_to(found.start()))
            emit(json.dumps(reader.read_to(found.end()))[1:-1])
            continue
        elif found.end() < len(reader.text):
            emit(reader.read_to(found.end() + 1))
            continue
        elif found.start() > reader.at:
            emit(reader.read_to(found.start()))
        if reader.ended:
            return False
        yield


def _nested(reader: Reader, emit: Emit, stop: str) -> Generator[None, None, bool]:
    """Read an object or an array up to its closing bracket."""
    depth = 0
    while True:
        found = _OUTSIDE.search(reader.text, reader.at)
        if found is None:
            if reader.at < len(reader.text):
                emit(reader.read_to(len(reader.text)))
            if reader.ended:
                return False
            yield
            continue
        bracket = found.group()
        if bracket == "<":
            if found.start() > reader.at:
                emit(reader.read_to(found.start()))
            if stop and (yield from reader.starts_with(stop)):
                return False
            emit(reader.read_to(reader.at + 1))
            continue
        emit(reader.read_to(found.end()))
        if bracket == '"':
            if not (yield from _string_rest(reader, emit)):
                return False
        else:
            depth += 1 if bracket in "{[" else -1
            if depth == 0:
                return True


def as_object(text: str) -> str | None:
    """Return `text` if it is a JSON object, or the object inside a JSON string, as some models write it; else None."""
    try:
        found = json.loads(text, strict=False)
        if isinstance(found, str):
            text = found
            found = json.loads(found, strict=False)
    except ValueError:
        return None
    if found is None:
        return "{}"
    return sound(text) if isinstance(found, dict) else None


def sound(text: str) -> str:
    """Return text that UTF-8 can encode: surrogate pairs become characters, lone surrogates U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def strict(text: str) -> object:
    """Return the value of a JSON text. Raises ValueError, also for NaN and infinities."""
    return json.loads(text, parse_constant=_refused)


def _refused(constant: str) -> object:
    raise ValueError(constant)
