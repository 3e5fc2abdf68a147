"""Calls between two markers, as JSON objects or in Python's syntax, and markers around an answer, which are dropped."""

from __future__ import annotations

import re

from .bodies import Body, arguments_json, behind_bracket, json_object, object_or_nothing, pythonic
from .reader import Reading, markers
from .writer import Writer

_INDEX = re.compile(r":\d+$")


def json_list(close: str) -> Body:
    """Read objects with a name and arguments, in brackets or one after the other.

    Args:
        close: The closing marker; "": the end of the list.
    """

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        reader.keep()
        called = False
        listed = (yield from reader.space()) == "["
        if listed:
            reader.read_to(reader.at + 1)
        while following := (yield from reader.space()):
            if following == "," and called:
                reader.read_to(reader.at + 1)
                continue
            if following != "{" or not (yield from json_object(writer, known=False, close=close)):
                break
            reader.kept()
            reader.keep()
            called = True
        if listed and called and (yield from reader.peek()) == "]":
            reader.read_to(reader.at + 1)
        read = reader.kept()
        if not called:
            writer.content(opened + read)
            return
        if close:
            rest, _ = yield from reader.collect(markers(close))
            read += rest
        if read.strip(" \n,]"):
            writer.content(read)

    return body


def python_or_json(close: str) -> Body:
    """Read calls in Python's syntax in brackets, or JSON objects. `close` is the closing marker."""
    objects, calls = json_list(close), pythonic(close, listed=True, known=False)

    def body(writer: Writer, opened: str) -> Reading:
        writer.reader.keep()
        following = yield from writer.reader.space()
        opened += writer.reader.kept()
        if following == "[" and (yield from behind_bracket(writer.reader)) != "{":
            yield from calls(writer, opened)
        else:
            yield from objects(writer, opened)

    return body


def id_and_json(between: str, close: str) -> Body:
    """Read Kimi's calls: an id `functions.NAME:INDEX`, `between`, and the arguments as JSON up to `close`."""

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        reader.keep()
        call_id, stop = yield from reader.collect(markers(between, close))
        call_id = call_id.strip()
        name = _INDEX.sub("", call_id.removeprefix("functions."))
        called = stop == between and bool(name) and (yield from object_or_nothing(reader, close))
        read = reader.kept()
        if not called:
            writer.content(opened + read)
            return
        # Without an index the id would not be unique.
        writer.call(name, call_id if _INDEX.search(call_id) else "")
        yield from arguments_json(writer, close)
        rest, _ = yield from reader.collect(markers(close))
        if rest.strip():
            writer.content(rest)

    return body


def before_answer(writer: Writer, opened: str) -> Reading:
    """Drop a marker before the content; behind some content it is content."""
    if writer.shown:
        writer.content(opened)
    yield from ()


def behind_answer(*followed: str) -> Body:
    """Drop a marker at the end of the answer or before one of `followed`; elsewhere it is content."""

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        reader.keep()
        following = yield from reader.space()
        space = reader.kept()
        last = not following
        for mark in followed:
            last = last or (yield from reader.starts_with(mark))
        if last:
            writer.drop_space()
        else:
            writer.content(opened + space)

    return body
