"""Shows several growing texts: side by side on a wide terminal, one after the other elsewhere."""

from __future__ import annotations

import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Protocol, TextIO

COLUMN_WIDTH_MIN = 26
GAP = "  "
HEIGHT_MIN = 12


class Screen(Protocol):
    """A display of several texts."""

    def add(self, index: int, text: str) -> None:
        """Append `text` to text `index`."""

    def end(self, index: int) -> None:
        """Mark text `index` as complete."""

    def close(self) -> None:
        """End the display."""


def screen(titles: Sequence[str], stream: TextIO) -> Screen:
    """Return the kind of screen that suits the stream."""
    if stream.isatty():
        size = shutil.get_terminal_size()
        width = (size.columns - len(GAP) * (len(titles) - 1)) // len(titles)
        if width >= COLUMN_WIDTH_MIN and size.lines >= HEIGHT_MIN:
            return Columns(titles, stream, width, size.lines - 3)
    return InTurn(titles, stream)


class InTurn:
    """Shows the first text as it grows, then the next one; later texts are buffered meanwhile."""

    def __init__(self, titles: Sequence[str], stream: TextIO) -> None:
        self._titles = titles
        self._stream = stream
        self._kept = [""] * len(titles)
        self._whole: set[int] = set()
        self._now = -1
        self._next()

    def add(self, index: int, text: str) -> None:
        """Show the text if it is its turn, else buffer it."""
        if index == self._now:
            self._write(text)
        else:
            self._kept[index] += text

    def end(self, index: int) -> None:
        """Mark a text as complete, and go on to the next incomplete one."""
        self._whole.add(index)
        while self._now in self._whole and self._now < len(self._titles) - 1:
            self._next()

    def close(self) -> None:
        """Show the remaining texts."""
        while self._now < len(self._titles) - 1:
            self._next()
        self._write("\n")

    def _next(self) -> None:
        before = "" if self._now < 0 else "\n\n"
        self._now += 1
        self._write(f"{before}[{self._now + 1}] {self._titles[self._now]}\n{self._kept[self._now]}")

    def _write(self, text: str) -> None:
        self._stream.write(printable(text))
        self._stream.flush()


class Columns:
    """Redraws all texts side by side. It shows the end of a text that is too long for the screen."""

    def __init__(self, titles: Sequence[str], stream: TextIO, width: int, height: int) -> None:
        self._titles = titles
        self._stream = stream
        self._width = width
        self._height = height
        self._texts = [""] * len(titles)
        self._drawn = 0
        self._draw()

    def add(self, index: int, text: str) -> None:
        """Redraw if the text has grown."""
        if text:
            self._texts[index] += text
            self._draw()

    def end(self, index: int) -> None:
        """Do nothing: the text stays."""

    def close(self) -> None:
        """Draw once more and leave the cursor below."""
        self._draw()

    def _draw(self) -> None:
        columns = [self._column(*both) for both in zip(self._titles, self._texts, strict=True)]
        height = max(map(len, columns))
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        lines = []
        for row in range(height):
            cells = [column[row] if row < len(column) else "" for column in columns]
            lines.append("\x1b[2K" + GAP.join(_pad(cell, self._width) for cell in cells).rstrip())
        self._stream.write(up + "\r" + "\n".join(lines) + "\n")
        self._stream.flush()
        self._drawn = height

    def _column(self, title: str, text: str) -> list[str]:
        head = [*textwrap.wrap(title, self._width), "-" * self._width]
        body: list[str] = []
        for line in printable(text).splitlines():
            body += textwrap.wrap(line, self._width) or [""]
        room = self._height - len(head)
        if len(body) > room:
            body = ["...", *body[len(body) - room + 1 :]]
        return head + body


def printable(text: str) -> str:
    """Return the text without control characters, so that a model cannot control the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char)[0] != "C")


def _pad(text: str, width: int) -> str:
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return text + " " * (width - len(text) - wide)
