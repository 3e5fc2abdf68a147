"""The engine: from one answer's text to events, driven by its format's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .events import Event
from .formats import Format
from .reader import Reading, markers
from .writer import Writer


class Parser(Writer):
    """The parser of one answer.

    Args:
        format_: The format.
        tools: The schemas of the tools' parameters by name; None if calls are not parsed.
        in_reasoning: Whether the prompt opens the reasoning.
    """

    def __init__(
        self, format_: Format, tools: Mapping[str, Mapping[str, Any]] | None = None, *, in_reasoning: bool = False
    ) -> None:
        super().__init__(tools)
        self._format = format_
        self._reading = format_.answer(self, in_reasoning) if format_.answer is not None else self._answer(in_reasoning)
        self._over = False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:  # noqa: ARG002 - of formats by tokens
        """Return the events that further text completes."""
        self.reader.feed(text)
        self._go()
        return self.pop_events()

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the answer."""
        self.reader.ended = True
        self._go()
        self.end()
        return self.pop_events()

    def _answer(self, in_reasoning: bool) -> Reading:
        """Read content with reasoning and calls between markers."""
        table, reader = self._format, self.reader
        calls = {**table.wraps, **(table.calls if self._calling else {})}
        opening, closing = table.think
        stops = markers(*calls, *((opening,) if opening else ()))
        if in_reasoning and closing:
            yield from self.think(closing)
        if self._calling and table.bare is not None:
            yield from self._bare()
        while True:
            stop = yield from reader.until(stops, self.content)
            if not stop:
                return
            if stop == opening:
                if self.shown:
                    # Behind content the marker is text.
                    self.content(stop)
                else:
                    yield from self.think(closing)
                    if self._calling and table.bare is not None:
                        yield from self._bare()
            else:
                yield from calls[stop](self, stop)

    def _bare(self) -> Reading:
        """Read a call without a marker, where content would begin."""
        bare = self._format.bare
        assert bare is not None, "the caller checked it"
        start, body = bare
        following = yield from self.reader.space()
        if following and following in start:
            yield from body(self, "")

    def _go(self) -> None:
        if not self._over:
            try:
                next(self._reading)
            except StopIteration:
                self._over = True
        if self._over and self.reader.at < len(self.reader.text):
            self.content(self.reader.read_to(len(self.reader.text)))
