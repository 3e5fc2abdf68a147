"""Gemma's calls: `call:name{key:value,...}`, with a marker around each string instead of quotes and escapes."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from . import json_text
from .bodies import Body
from .reader import Emit, Reader, Reading, markers
from .writer import Writer

_NAME = re.compile(r"[\w.:/-]+")
_WORD = re.compile(r"[^\s,:\[\]{}<]*")
_BRACKETS = {"{": "}", "[": "]"}
DEPTH = 64  # nesting limit of lists and objects

Whole = Generator[None, None, bool]
"""False: the text is malformed, or the answer ended within it."""


def fenced(fence: str, close: str) -> Body:
    """Read a call. `fence` is the marker around a string, `close` the closing marker."""

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        reader.keep()
        name = ""
        stop = ""
        if (yield from reader.space()) and (yield from reader.expect("call:")):
            name, stop = yield from reader.collect(markers("{", close))
        read = reader.kept()
        if stop != "{" or not _NAME.fullmatch(name.strip()):
            writer.content(opened + read)
            return
        writer.call(name.strip())
        whole = yield from _several(reader, writer.arguments, fence, "{", 0)
        rest, _ = yield from reader.collect(markers(close))
        if not whole:
            # Malformed text stays in the arguments: a tool is never called with less than the model wrote.
            writer.arguments(rest)
        elif rest.strip():
            writer.content(rest)

    return body


def _several(reader: Reader, emit: Emit, fence: str, opening: str, depth: int) -> Whole:
    """Read the members behind an opening bracket."""
    emit(opening)
    first = True
    while (following := (yield from reader.space())) != _BRACKETS[opening]:
        if not following or depth == DEPTH:
            return False
        if following == ",":
            reader.read_to(reader.at + 1)
            continue
        if not first:
            emit(", ")
        first = False
        if opening == "{" and not (yield from _key(reader, emit, fence)):
            return False
        if not (yield from _value(reader, emit, fence, depth)):
            return False
    reader.read_to(reader.at + 1)
    emit(_BRACKETS[opening])
    return True


def _key(reader: Reader, emit: Emit, fence: str) -> Whole:
    if (yield from reader.expect(fence)):
        key, stop = yield from reader.collect(markers(fence))
        if not stop:
            emit(json.dumps(key, ensure_ascii=False)[:-1])
            return False
    elif (yield from reader.peek()) == '"':
        key = (yield from json_text.string(reader)) or ""
    else:
        key = yield from _word(reader)
    if (yield from reader.space()) != ":":
        emit(json.dumps(key, ensure_ascii=False))
        return False
    reader.read_to(reader.at + 1)
    emit(json.dumps(key, ensure_ascii=False) + ": ")
    return True


def _value(reader: Reader, emit: Emit, fence: str, depth: int) -> Whole:
    following = yield from reader.space()
    if (yield from reader.expect(fence)):
        emit('"')
        stop = yield from reader.until(markers(fence), lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]))
        if stop:
            emit('"')
        return bool(stop)
    if following == '"':
        return (yield from json_text.value(reader, emit))
    if following in _BRACKETS:
        reader.read_to(reader.at + 1)
        return (yield from _several(reader, emit, fence, following, depth + 1))
    word = yield from _word(reader)
    if not word:
        return False
    try:
        json_text.strict(word)
        emit(word)
    except ValueError:
        emit(json.dumps({"None": None, "True": True, "False": False}.get(word, word), ensure_ascii=False))
    return True


def _word(reader: Reader) -> Generator[None, None, str]:
    parts: list[str] = []
    while True:
        found = _WORD.match(reader.text, reader.at)
        assert found is not None, "matches whatever is there"
        parts.append(reader.read_to(found.end()))
        if reader.at < len(reader.text) or reader.ended:
            return "".join(parts)
        yield
