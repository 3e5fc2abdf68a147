"""Incremental text, read as if it were complete.

The parsers are generators: they `yield` when they need more text, and resume when it arrives or the text has ended
(`ended`). Each is written as for a complete text, so its result cannot depend on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache

Emit = Callable[[str], None]
Reading = Generator[None, None, None]


class Markers:
    """Strings to stop at. No string may be a prefix of another."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._pattern = re.compile("|".join(re.escape(string) for string in strings)) if strings else None
        self._length = max((len(string) for string in strings), default=0)
        self._firsts = frozenset(string[0] for string in strings)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Return the first marker from `at` on."""
        return self._pattern.search(text, at) if self._pattern is not None else None

    def held(self, text: str, at: int) -> int:
        """Return where an incomplete marker at the end of `text` may begin; else the length of `text`."""
        for start in range(max(at, len(text) - self._length + 1), len(text)):
            if text[start] in self._firsts and any(string.startswith(text[start:]) for string in self._strings):
                return start
        return len(text)


@cache
def markers(*strings: str) -> Markers:
    """Return the cached Markers of these strings."""
    return Markers(strings)


class Reader:
    """A cursor over incremental text: text[at:] is unread."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append text."""
        self.text, self.at = self.text[self.at :] + text, 0

    def keep(self) -> None:
        """Start to record what is read."""
        self._kept = []

    def kept(self) -> str:
        """Stop recording and return what was read since `keep`."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def read_to(self, end: int) -> str:
        """Read up to `end`."""
        piece = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Generator[None, None, str]:
        """Skip white space. Return the next character without reading it; "" at the end."""
        while True:
            end = self.at
            while end < len(self.text) and self.text[end].isspace():
                end += 1
            self.read_to(end)
            if end < len(self.text) or self.ended:
                return self.text[end : end + 1]
            yield

    def starts_with(self, string: str) -> Generator[None, None, bool]:
        """Return whether the unread text starts with `string`."""
        while len(self.text) - self.at < len(string):
            if self.ended or not string.startswith(self.text[self.at :]):
                return False
            yield
        return self.text.startswith(string, self.at)

    def expect(self, string: str) -> Generator[None, None, bool]:
        """Read `string` if it comes next. Return whether it did."""
        found = yield from self.starts_with(string)
        if found:
            self.read_to(self.at + len(string))
        return found

    def until(self, stops: Markers, emit: Emit) -> Generator[None, None, str]:
        """Read through the next marker and return it; "" at the end. Text before it is emitted as soon as possible."""
        while True:
            found = stops.find(self.text, self.at)
            if found is not None:
                if before := self.read_to(found.start()):
                    emit(before)
                self.read_to(found.end())
                return found.group()
            certain = len(self.text) if self.ended else stops.held(self.text, self.at)
            if certain > self.at:
                emit(self.read_to(certain))
            if self.ended:
                return ""
            yield

    def collect(self, stops: Markers) -> Generator[None, None, tuple[str, str]]:
        """Read through the next marker. Return the text before it, and the marker."""
        parts: list[str] = []
        stop = yield from self.until(stops, parts.append)
        return "".join(parts), stop
