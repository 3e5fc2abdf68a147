"""Readers of the text between the markers of a call, one for each notation.

Each is a generator over `Writer.reader`. A call that has begun stays one, complete or truncated; text that cannot be a
call is content, with its marker, so none of the model's output is lost.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Generator
from typing import Any

from . import json_text
from .reader import Reader, Reading, markers
from .writer import Writer

Body = Callable[[Writer, str], Reading]
_FENCE = re.compile(r"`+[ \w]*")
_NAME = re.compile(r"[\w.:/-]+")
_CALLED = re.compile(r"([\w.:/-]+)\(")
ARGUMENTS = ("arguments", "parameters", "args")
NAMES = ("name", "tool_name", "function")
BESIDE = ("id", "type", "index", "tool_call_id")  # further members of a call object


def json_call(close: str, *, known: bool = False, several: str = "") -> Body:
    """Read JSON objects with a name and arguments.

    Args:
        close: The closing marker; "": the end of the object closes the call.
        known: Whether only offered tools are calls.
        several: Characters that may separate several objects.
    """

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        while True:
            reader.keep()
            called = yield from json_object(writer, known, close)
            read = reader.kept()
            if not called:
                writer.content(opened + read)
                return
            if close:
                # An unclosed call may be followed by the next one.
                rest, stop = yield from reader.collect(markers(close, opened))
                if rest.strip():
                    writer.content(rest)
                if stop == opened:
                    continue
                return
            reader.keep()
            after = yield from reader.space()
            while after and after in several:
                reader.read_to(reader.at + 1)
                after = yield from reader.space()
            opened = reader.kept()
            if after != "{":
                writer.content(opened)
                return

    return body


def json_object(writer: Writer, known: bool, close: str = "") -> Any:
    """Read a JSON object and return whether it was a call. `close` ends it even if the JSON is incomplete."""
    reader = writer.reader
    name: str | None = None
    call_id, opened = "", False
    arguments: list[str] = []
    astray = empty = False
    if (yield from reader.space()) != "{":
        return False
    reader.read_to(reader.at + 1)
    while True:
        following = yield from reader.space()
        if following == "}":
            reader.read_to(reader.at + 1)
            break
        if following == ",":
            reader.read_to(reader.at + 1)
            continue
        if empty and following != '"':
            break  # truncated behind its arguments; the caller reads on
        key = yield from json_text.string(reader)
        if key is None:
            return opened
        if (yield from reader.space()) != ":":
            return opened
        reader.read_to(reader.at + 1)
        if key in NAMES and name is None:
            yield from reader.space()
            name = yield from json_text.string(reader)
            if not name or (known and name not in writer.tools):
                return opened
        elif key in ARGUMENTS and not opened and not arguments:
            # Empty arguments are held back: a damaged call may have its arguments behind them.
            object_of_named = (yield from reader.space()) == "{" and name is not None
            empty = object_of_named and (yield from behind_bracket(reader)) == "}"
            if name is not None and object_of_named and not empty:
                opened = True
                writer.call(name, call_id)
                if not (yield from json_text.value(reader, writer.arguments, close)):
                    return True
            elif not (yield from json_text.value(reader, arguments.append, close)):
                return opened
        elif known and not opened and key not in BESIDE:
            return False
        else:
            astray = astray or key not in BESIDE
            other: list[str] = []
            if not (yield from json_text.value(reader, other.append, close)):
                return opened
            if key == "id" and not opened:
                call_id = "".join(other).strip('"')
    if opened or name is None:
        return opened
    text = json_text.as_object("".join(arguments)) if arguments else "{}"
    if text is None or (astray and not text.strip("{} \t\r\n")):
        return False  # a call without its arguments would differ from what the model wrote
    writer.call(name, call_id)
    writer.arguments(text)
    return True


def behind_bracket(reader: Reader) -> Generator[None, None, str]:
    """Peek at the first character behind the bracket that is not white space."""
    while True:
        rest = reader.text[reader.at + 1 :].lstrip()
        if rest or reader.ended:
            return rest[:1]
        yield


def named_json(between: str, close: str, *, before_name: str = "", fence: bool = False) -> Body:
    """Read a name, `between`, and JSON arguments, up to `close`.

    Args:
        between: The marker behind the name.
        close: The closing marker.
        before_name: A word that may precede the name, such as the kind of the call.
        fence: Whether the JSON stands in a Markdown code fence.
    """

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        reader.keep()
        name, stop = yield from reader.collect(markers(between, close))
        if before_name and stop == between and name.strip() == before_name:
            name, stop = yield from reader.collect(markers("\n", close))
            stop = between if stop == "\n" else stop
        called = stop == between and bool(name.strip())
        if called:
            following = yield from reader.space()
            if fence and following == "`":
                line, ended = yield from reader.collect(markers("\n", "{"))
                called = _FENCE.fullmatch(line) is not None
                if ended == "{":
                    reader.at -= 1  # unread the brace: it belongs to the arguments
            called = called and (yield from object_or_nothing(reader, close, *(("`",) if fence else ())))
        read = reader.kept()
        if not called:
            writer.content(opened + read)
            return
        writer.call(name.strip())
        yield from arguments_json(writer, close)
        rest, _ = yield from reader.collect(markers(close))
        if rest.strip("` \n"):
            writer.content(rest)

    return body


def mistral(writer: Writer, opened: str) -> Reading:
    """Read an array of objects, or in newer models a name, `[ARGS]` and an object."""
    reader = writer.reader
    reader.keep()
    if (yield from reader.space()) == "[":
        reader.read_to(reader.at + 1)
        while (following := (yield from reader.space())) and following in "{,":
            if following == ",":
                reader.read_to(reader.at + 1)
                continue
            if not (yield from json_object(writer, known=False)):
                writer.content(opened + reader.kept())
                return
            reader.kept()
            reader.keep()
            opened = ""
        read = reader.kept()
        if opened:
            writer.content(opened + read)
            return
        if (yield from reader.peek()) == "]":
            reader.read_to(reader.at + 1)
        return
    read = reader.kept()
    reader.keep()
    name, stop = yield from reader.collect(markers("[ARGS]", "[CALL_ID]", "{"))
    call_id = ""
    if stop == "[CALL_ID]":
        call_id, stop = yield from reader.collect(markers("[ARGS]", "{"))
    called = bool(stop) and _NAME.fullmatch(name.strip()) is not None
    if stop == "[ARGS]" and called:
        called = yield from object_or_nothing(reader, "[TOOL_CALLS]")
    more = reader.kept()
    if not called:
        writer.content(opened + read + more)
        return
    writer.call(name.strip(), call_id.strip())
    if stop == "{":
        reader.at -= 1  # unread the brace: it belongs to the arguments
    yield from arguments_json(writer)


def object_or_nothing(reader: Reader, *ends: str) -> Generator[None, None, bool]:
    """Return whether arguments can follow: an object, or nothing before one of `ends`.

    Before any other text the call becomes content: a tool is never called with less than the model wrote for it.
    """
    if (yield from reader.space()) in ("{", ""):
        return True
    for end in ends:
        if (yield from reader.starts_with(end)):
            return True
    return False


def arguments_json(writer: Writer, close: str = "") -> Reading:
    """Read an object of arguments; without one the call has none. `close` ends it even if the JSON is incomplete."""
    if (yield from writer.reader.space()) == "{":
        yield from json_text.value(writer.reader, writer.arguments, close)
    else:
        writer.arguments("{}")


def tagged(
    name_ends: tuple[str, ...],
    key_open: str,
    key_close: str,
    value_open: str,
    value_close: str,
    close: str,
    trim: str = "",
) -> Body:
    """Read a name, then keys and values between tags, up to `close`.

    Args:
        name_ends: Markers that end the name.
        key_open: The marker before a key.
        key_close: The marker behind a key.
        value_open: The marker before a value; "": the value begins where the key ends.
        value_close: The marker behind a value.
        close: The closing marker of the call.
        trim: Text that is removed once from either end of a value.
    """

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        reader.keep()
        name, stop = yield from reader.collect(markers(*name_ends, key_open, close))
        read = reader.kept()
        if not name.strip() or not stop or any(mark in name for mark in "<{"):
            writer.content(opened + read)
            return
        name = name.strip()
        writer.call(name)
        first, cut, astray = True, False, list[str]()
        while stop != close:
            if stop != key_open:
                between, stop = yield from reader.collect(markers(key_open, close))
                if between.strip():
                    astray.append(between)
                if stop != key_open:
                    break
            if first:
                writer.arguments("{")
            cut = True
            key, ended = yield from reader.collect(markers(key_close))
            if value_open and ended:
                _, ended = yield from reader.collect(markers(value_open))
            if not ended:
                break
            writer.arguments(f"{'' if first else ', '}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            first = False
            kinds = writer.argument_types(name, key.strip())
            if kinds == {"string"}:
                yield from text_value(writer, value_close, trim)
            else:
                text, _ = yield from reader.collect(markers(value_close))
                writer.arguments(typed(_trimmed(text, trim), kinds))
            stop, cut = "", False
        if first and not cut:
            # Malformed arguments are passed on as text: a tool is never called with less than the model wrote.
            writer.arguments("".join(astray).strip() or "{}")
            return
        writer.arguments("" if cut else "}")
        for text in astray:
            writer.content(text)

    return body


def text_value(writer: Writer, close: str, trim: str) -> Reading:
    """Emit a string as it arrives. A final `trim` is held back until more follows."""
    begun, held = False, ""
    writer.arguments('"')

    def emit(text: str) -> None:
        nonlocal begun, held
        if trim:
            text = held + text
            held = ""
            if not begun and text:
                text = text.removeprefix(trim)
                begun = True
            if text.endswith(trim):
                text, held = text[: -len(trim)], trim
        if text:
            writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    yield from writer.reader.until(markers(close), emit)
    writer.arguments('"')


def _trimmed(text: str, trim: str) -> str:
    return text.removeprefix(trim).removesuffix(trim) if trim else text


def typed(text: str, kinds: set[str]) -> str:
    """Convert a value by its schema's type; without a type it is JSON if it parses, else a string."""
    try:
        found = json_text.strict(text)
    except (ValueError, RecursionError):
        if kinds & {"array", "object"} and (read := _python_value(text.strip())) is not None:
            return read
        lowered = {"True": "true", "False": "false", "None": "null"}.get(text.strip())
        return lowered if lowered is not None and "string" not in kinds else json.dumps(text, ensure_ascii=False)
    if "string" in kinds and not isinstance(found, dict | list) and found is not None:
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def llama(close: str) -> Body:
    """Read JSON objects or a Python list: the same model writes either, depending on its prompt."""
    objects, list_ = json_call("", known=True, several=";,"), pythonic(close, listed=True)

    def body(writer: Writer, opened: str) -> Reading:
        writer.reader.keep()
        following = yield from writer.reader.space()
        opened += writer.reader.kept()
        yield from (list_ if following == "[" else objects)(writer, opened)

    return body


def pythonic(close: str, *, listed: bool, known: bool = True) -> Body:
    """Read calls in Python's syntax: `f(a=1, b="x")`. The writer gets each call when it is complete.

    Args:
        close: The closing marker.
        listed: Whether the calls stand in brackets.
        known: Whether only offered tools are calls, if `listed`.
    """

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        stops = markers("(", ")", "[", "]", "{", "}", '"', "'", "\\", *((close,) if close else ()))
        parts: list[str] = []
        depth, quote, called = 0, "", False
        reader.keep()
        while True:
            stop = yield from reader.until(stops, parts.append)
            if not stop:
                break
            if stop == close and not quote:
                break
            parts.append(stop)
            if quote:
                if stop == "\\":
                    if (yield from reader.peek()):
                        parts.append(reader.read_to(reader.at + 1))
                elif stop == quote:
                    quote = ""
            elif stop in "\"'":
                quote = stop
            elif stop in "([{":
                depth += 1
            elif stop in ")]}":
                depth -= 1
                if depth == (1 if listed else 0) and stop == ")":
                    found = _python_call("".join(parts).lstrip("[, \n"))
                    if found is None or (listed and known and found[0] not in writer.tools):
                        break
                    reader.kept()
                    reader.keep()
                    parts, called = [], True
                    writer.call(found[0])
                    writer.arguments(found[1])
                elif depth <= 0:
                    break
        read = reader.kept()
        if not called:
            writer.content(opened + read)
        elif (rest := "".join(parts).strip(" \n,]")) and not rest.startswith("```"):
            writer.content(rest)

    return body


class _Words(ast.NodeTransformer):
    """Replaces JSON's constants in a Python expression."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace `true`, `false` and `null`."""
        words = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(words[node.id]), node) if node.id in words else node


def _python_call(text: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments of a call. The name need not be a Python identifier."""
    given = ""
    if (begun := _CALLED.match(text)) is not None and not begun[1].replace(".", "").isidentifier():
        given, text = begun[1], f"f{text[begun.end(1) :]}"
    try:
        tree = _parsed(text)
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "print" and tree.args:
            tree = tree.args[0]
        if not isinstance(tree, ast.Call) or tree.args or any(word.arg is None for word in tree.keywords):
            return None
        values = {str(word.arg): ast.literal_eval(_Words().visit(word.value)) for word in tree.keywords}
        name = given or ast.unparse(tree.func)
        return (name, _json_text(values)) if _NAME.fullmatch(name) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_value(text: str) -> str | None:
    """Return the JSON of a Python literal."""
    try:
        return _json_text(ast.literal_eval(_Words().visit(_parsed(text))))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes
        return ast.parse(text, mode="eval").body


def _json_text(value: Any) -> str:
    return json_text.sound(json.dumps(value, ensure_ascii=False, allow_nan=False))
