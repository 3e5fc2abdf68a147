"""Converts the arguments that a model wrote into a JSON object, incrementally.

A model's text may be truncated or invalid JSON. OpenAI's APIs carry it as a string. Anthropic's API and chat templates
need an object: `ObjectText` closes truncated text and puts unreadable text into the member `UNPARSED`. A valid JSON
object is passed through unchanged.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto
from typing import Any

import msgspec

UNPARSED = "unparsed_arguments"
DEPTH_MAX = 64  # nesting limit of lists and objects
BROKEN_MAX = 1 << 16  # characters of invalid JSON that are parsed; its tokens are read one by one
DIGITS_MAX = 300  # a longer number exceeds the range of a double
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
    **{word: f'"{word}"' for word in ("NaN", "Infinity", "-Infinity")},
}
_CLOSES = {"{": "}", "[": "]"}
_REPLACED = "\\ufffd"


class _At(Enum):
    """The position in JSON's grammar, between two tokens."""

    BEGINNING = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    FIRST_VALUE = auto()
    VALUE = auto()
    AFTER = auto()
    END = auto()


def whole_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text; None if it is something else, or nested too deeply for some clients."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    flat = text.count("{") + text.count("[") <= DEPTH_MAX
    return found if isinstance(found, dict) and (flat or _is_shallow(found, DEPTH_MAX)) else None


def object_of(text: str, broken_max: int = BROKEN_MAX) -> dict[str, Any]:
    """Return the arguments of a call as an object, whatever the text is.

    Args:
        text: The model's text, complete or truncated.
        broken_max: Longer text that is not valid JSON is not parsed.

    Returns:
        The object. Unreadable text is its member `UNPARSED`.
    """
    if (whole := whole_object(text)) is not None:
        return whole
    if len(text) > broken_max:
        return {UNPARSED: _sound(text)}
    made = ObjectText()
    found: dict[str, Any] = json.loads(made.feed(text) + made.finish())
    return found


class ObjectText:
    """Converts the text of a call's arguments into one JSON object, emitting each part as soon as it is certain."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._state = _At.BEGINNING
        self._open: list[str] = []
        self._in_string = self._is_key = False
        self._held: list[str] = []  # written with the next value: blanks, a comma, a key
        self._held_raw: list[str] = []
        self._members = False
        self._unread: list[str] | None = None

    def feed(self, text: str) -> str:
        """Return the certain part of the object after a further piece.

        Args:
            text: The piece.
        """
        if self._unread is not None:
            self._unread.append(text)
            return ""
        self._text, self._at = self._text[self._at :] + text, 0
        written: list[str] = []
        while self._unread is None and self._step(written):
            pass
        return "".join(written)

    def finish(self) -> str:
        """Return the rest, so that all parts together are a JSON object."""
        if self._state is _At.BEGINNING:
            return _whole("".join([*self._held_raw, *(self._unread or (self._text[self._at :],))]))
        if self._state is _At.END and self._unread is None:
            return "}"
        written = ['"'] if self._in_string and not self._is_key else []
        written += [_CLOSES[opened] for opened in reversed(self._open[1:])]
        unread = "".join(self._unread or ())
        if unread.strip():
            comma = ", " if self._members else ""
            written.append(f"{comma}{json.dumps(UNPARSED)}: {json.dumps(_sound(unread), ensure_ascii=False)}")
        return "".join([*written, "}"])

    def _step(self, written: list[str]) -> bool:
        """Read one token or a part of a string. Return False if more text is needed."""
        if self._in_string:
            return self._read_string(written)
        if found := _SPACE.match(self._text, self._at):
            self._hold(found.group(), found.group())
            self._at = found.end()
        if self._at == len(self._text):
            return False
        first = self._text[self._at]
        match self._state:
            case _At.BEGINNING if first == "{":
                self._enter(first, written)
            case _At.FIRST_KEY | _At.KEY if first == '"':
                self._begin_string(written, is_key=True)
            case _At.COLON if first == ":":
                self._read_mark(":", _At.VALUE)
            case _At.FIRST_VALUE | _At.VALUE if first in _CLOSES and len(self._open) < DEPTH_MAX:
                self._enter(first, written)
            case _At.FIRST_VALUE | _At.VALUE if first == '"':
                self._begin_string(written, is_key=False)
            case _At.FIRST_VALUE | _At.VALUE if first not in "]}[{":
                return self._read_word(written)
            case _At.AFTER if first == ",":
                self._read_mark(",", _At.KEY if self._open[-1] == "{" else _At.VALUE)
            case _At.AFTER | _At.FIRST_KEY | _At.FIRST_VALUE if first == _CLOSES[self._open[-1]]:
                self._leave(written)
            case _:
                self._give_up()
        return True

    def _enter(self, opening: str, written: list[str]) -> None:
        self._write(opening, written)
        self._open.append(opening)
        self._at += 1
        self._state = _At.FIRST_KEY if opening == "{" else _At.FIRST_VALUE

    def _leave(self, written: list[str]) -> None:
        self._at += 1
        if len(self._open) == 1:
            # The closing brace is held back: text that follows becomes a member.
            self._state, self._held, self._held_raw = _At.END, [], []
            return
        self._write(_CLOSES[self._open.pop()], written)
        self._state = _At.AFTER

    def _read_mark(self, mark: str, state: _At) -> None:
        self._hold(mark, mark)
        self._at += 1
        self._state = state

    def _begin_string(self, written: list[str], *, is_key: bool) -> None:
        self._in_string, self._is_key = True, is_key
        self._at += 1
        if is_key:
            self._hold('"', '"')
        else:
            self._write('"', written)

    def _read_string(self, written: list[str]) -> bool:
        start = self._at
        text, closed = self._string_part()
        if self._is_key:
            self._hold(text, self._text[start : self._at])
        elif text:
            written.append(text)
        if closed:
            self._in_string = False
            self._state = _At.COLON if self._is_key else _At.AFTER
        return closed

    def _string_part(self) -> tuple[str, bool]:
        """Return the certain part of a string with its closing quote, and whether the quote was found."""
        parts: list[str] = []
        while self._at < len(self._text):
            if found := _PLAIN.match(self._text, self._at):
                parts.append(found.group())
                self._at = found.end()
                continue
            character = self._text[self._at]
            if character == "\\":
                escape = self._escape()
                if not escape:
                    break
                parts.append(escape)
                continue
            self._at += 1
            if character == '"':
                return "".join([*parts, '"']), True
            parts.append(json.dumps(character)[1:-1] if character < " " else _REPLACED)
        return "".join(parts), False

    def _escape(self) -> str:
        """Read an escape and repair it for JSON and UTF-8. Return "" if it is incomplete."""
        text, at = self._text, self._at
        if at + 1 == len(text):
            return ""
        if text[at + 1] != "u":
            known = text[at + 1] in '"\\/bfnrt'
            self._at += 2 if known else 1
            return text[at : at + 2] if known else "\\\\"
        if not _HEX.match(text, at + 2):
            if len(text) < at + 6 and re.fullmatch(r"[0-9a-fA-F]*", text[at + 2 :]):
                return ""
            self._at += 1
            return "\\\\"
        code = int(text[at + 2 : at + 6], 16)
        if not 0xD800 <= code < 0xE000:
            self._at += 6
            return text[at : at + 6]
        rest = text[at + 6 : at + 12]
        if code < 0xDC00:
            if re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", rest):
                self._at += 12
                return text[at : at + 12]
            if len(rest) < 6 and re.fullmatch(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?", rest):
                return ""
        self._at += 6
        return _REPLACED

    def _read_word(self, written: list[str]) -> bool:
        found = _WORD.match(self._text, self._at)
        assert found is not None, "matches whatever is there"
        if found.end() == len(self._text) and len(found.group()) <= DIGITS_MAX:
            return False  # the rest of a number may follow
        if value := _value(found.group()):
            self._write(value, written)
            self._at = found.end()
            self._state = _At.AFTER
        else:
            self._give_up()
        return True

    def _hold(self, text: str, raw: str) -> None:
        self._held.append(text)
        self._held_raw.append(raw)

    def _write(self, text: str, written: list[str]) -> None:
        """Write the beginning of a value or a bracket, after the text that was held back for it."""
        self._members = self._members or bool(self._open)
        written += [*self._held, text]
        self._held, self._held_raw = [], []

    def _give_up(self) -> None:
        """Treat the rest as text that is not JSON."""
        self._unread = [*self._held_raw, self._text[self._at :]]
        self._held, self._held_raw = [], []


def _is_shallow(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return True
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in value)


def _value(word: str) -> str:
    """Return a word or number as JSON; "" if it is neither."""
    if word in _WORDS:
        return _WORDS[word]
    if len(word) > DIGITS_MAX or not _NUMBER.fullmatch(word):
        return ""
    return word if math.isfinite(float(word)) else f'"{word}"'


def _whole(text: str) -> str:
    """Return the object for text that does not begin as one: empty, one within a string, or plain text."""
    stripped = text.strip()
    if not stripped:
        return "{}"
    try:
        found = json.loads(stripped)
    except (ValueError, RecursionError):
        found = stripped
    if found is None:
        return "{}"
    if isinstance(found, str) and found.lstrip().startswith("{"):
        inner = ObjectText()
        return inner.feed(found) + inner.finish()
    return json.dumps({UNPARSED: _sound(stripped)}, ensure_ascii=False)


def _sound(text: str) -> str:
    """Return text that UTF-8 can encode."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
