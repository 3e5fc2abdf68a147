"""Text that comes in pieces, read as if it were whole.

Parsers here are generators: they `yield` where they need more than has come, and go on when there is more, or when
there never will be (`ended`). So each is written as for a whole text, and how it was split cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache

Emit = Callable[[str], None]
Reading = Generator[None, None, None]


class Markers:
    """Strings to stop at. None may begin with another."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._pattern = re.compile("|".join(re.escape(string) for string in strings)) if strings else None
        self._length = max((len(string) for string in strings), default=0)
        self._firsts = frozenset(string[0] for string in strings)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first of them from `at` on."""
        return self._pattern.search(text, at) if self._pattern is not None else None

    def held(self, text: str, at: int) -> int:
        """Where the end of `text` might be the beginning of one; its length where it is not."""
        for start in range(max(at, len(text) - self._length + 1), len(text)):
            if text[start] in self._firsts and any(string.startswith(text[start:]) for string in self._strings):
                return start
        return len(text)


@cache
def markers(*strings: str) -> Markers:
    """The same object for the same strings."""
    return Markers(strings)


class Reader:
    """text[at:] is what was not read yet. kept: what was read since `keep`, where that was called."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        """More has come."""
        self.text, self.at = self.text[self.at :] + text, 0

    def keep(self) -> None:
        """From here on, what is read is kept."""
        self._kept = []

    def kept(self) -> str:
        """What was read since `keep`; no more is kept."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def take(self, end: int) -> str:
        """Reads up to `end`."""
        piece = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def peek(self) -> Generator[None, None, str]:
        """The next character, not read; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Generator[None, None, str]:
        """Reads white space; returns what comes behind it, not read."""
        while True:
            end = self.at
            while end < len(self.text) and self.text[end].isspace():
                end += 1
            self.take(end)
            if end < len(self.text) or self.ended:
                return self.text[end : end + 1]
            yield

    def starts_with(self, string: str) -> Generator[None, None, bool]:
        """Whether this comes next; not read."""
        while len(self.text) - self.at < len(string):
            if self.ended or not string.startswith(self.text[self.at :]):
                return False
            yield
        return self.text.startswith(string, self.at)

    def expect(self, string: str) -> Generator[None, None, bool]:
        """Reads this, where it comes next."""
        found = yield from self.starts_with(string)
        if found:
            self.take(self.at + len(string))
        return found

    def until(self, stops: Markers, emit: Emit) -> Generator[None, None, str]:
        """Reads up to a marker and over it; what comes before is emitted as soon as it is certain. "": none came."""
        while True:
            found = stops.find(self.text, self.at)
            if found is not None:
                if before := self.take(found.start()):
                    emit(before)
                self.take(found.end())
                return found.group()
            certain = len(self.text) if self.ended else stops.held(self.text, self.at)
            if certain > self.at:
                emit(self.take(certain))
            if self.ended:
                return ""
            yield

    def collect(self, stops: Markers) -> Generator[None, None, tuple[str, str]]:
        """The same, with what comes before as a text: it, and the marker."""
        parts: list[str] = []
        stop = yield from self.until(stops, parts.append)
        return "".join(parts), stop
