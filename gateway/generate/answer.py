"""One answer: from the tokens of its stream to events, up to its end.

Law: what it gives depends on the tokens alone, not on how they came together: so an answer that is read again, from
its first token or from a later one, is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvforge.gateway.parse.events import Arguments, Content, Event, Reasoning
from kvforge.gateway.replicas.stream import Stream
from kvforge.protocol.errors import Conflict
from kvforge.text.stop import StopText
from kvforge.text.tokenizer import TextStream

LENGTH, STOP = "length", "stop"
CANCELLED = "cancelled"


class Parser(Protocol):
    """What makes events of text (`kvforge.gateway.parse`)."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """The events that are certain now."""

    def finish(self) -> list[Event]:
        """The rest, at the answer's end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one answer since the last one. tokens: [start, end) of the stream's. reason: why it has ended, or ""
    while it has not."""

    index: int
    events: list[Event]
    start: int
    end: int
    reason: str = ""


class Answer:
    """Reads `stream`. stops: strings that end it. stop_tokens: ids that end it and are no text. parser: None: all of
    the text is content.

    reasoning_tokens: how many of the tokens so far were reasoning.
    """

    __slots__ = ("_over", "_parser", "_read", "_stop", "_stop_tokens", "_text", "index", "reasoning_tokens", "stream")

    def __init__(
        self,
        index: int,
        stream: Stream,
        text: TextStream,
        *,
        stops: Sequence[str] = (),
        stop_tokens: frozenset[int] = frozenset(),
        parser: Parser | None = None,
    ) -> None:
        self.index, self.stream = index, stream
        self._text = text
        self._stop = StopText(stops) if stops else None
        self._stop_tokens = stop_tokens
        self._parser = parser
        self._read = 0
        self._over = False
        self.reasoning_tokens = 0

    @property
    def over(self) -> bool:
        """Its end was given."""
        return self._over

    @property
    def stopped_by(self) -> str:
        """The stop string that ended it, or ""."""
        return self._stop.matched if self._stop is not None else ""

    @property
    def waits_for_tokens(self) -> bool:
        """Whether tokens matter before the end: a stop string may be among them."""
        return self._stop is not None

    def skip(self, tokens: int) -> bool:
        """Reads what comes before the token at offset `tokens` and gives it to nobody. False: not all is there yet."""
        reach = min(tokens, len(self.stream.tokens))
        if self._read < reach:
            self._read_to(reach)
        return reach == tokens or self.stream.done

    def take(self) -> Piece | None:
        """What has come since; None: nothing that matters. Raises the error that the request ended with."""
        stream, start = self.stream, self._read
        if self._over:
            return None
        ended = stream.ended  # looked at before the tokens: those that it counts are there
        stopped = self._stop is not None and self._stop.found
        events = [] if stopped else self._read_to(len(stream.tokens))
        if not stream.done:
            return Piece(self.index, events, start, self._read) if events or self._read > start else None
        if stream.error is not None:
            raise stream.error
        assert ended is not None, "done without an error"
        if ended.reason == CANCELLED:
            raise Conflict(f"request {stream.request_id} was cancelled by somebody else")
        self._over = True
        stopped = self._stop is not None and self._stop.found
        if not stopped:
            events += self._rest()
        stopped = stopped or (self._stop is not None and self._stop.found)
        return Piece(self.index, joined(events), start, self._read, STOP if stopped else ended.reason)

    def _read_to(self, reach: int) -> list[Event]:
        tokens = self.stream.tokens
        if self._stop is None and self._parser is None:
            ids = [token for token in tokens[self._read : reach] if token not in self._stop_tokens]
            self._read = reach
            text = self._text.push(ids)
            return [Content(text)] if text else []
        events: list[Event] = []
        while self._read < reach:
            token = tokens[self._read]
            self._read += 1
            ids = [] if token in self._stop_tokens else [token]
            came = self._parsed(self._text.push(ids), ids)
            events += came
            if came and all(isinstance(event, Reasoning) for event in came):
                self.reasoning_tokens += 1
            if self._stop is not None and self._stop.found:
                if not self.stream.done:
                    self.stream.finish_at(self._read)
                events += self._parser.finish() if self._parser is not None else []
                break
        return joined(events)

    def _parsed(self, text: str, ids: Sequence[int]) -> list[Event]:
        if self._stop is not None and text:
            text = self._stop.push(text)
        if self._parser is not None:
            return self._parser.feed(text, ids) if text or ids else []
        return [Content(text)] if text else []

    def _rest(self) -> list[Event]:
        """What was held back until nothing more could come."""
        text = self._text.finish()
        if self._stop is not None:
            text = self._stop.push(text)
            text += self._stop.finish()
        events: list[Event] = []
        if self._parser is not None:
            events = (self._parser.feed(text) if text else []) + self._parser.finish()
        elif text:
            events = [Content(text)]
        return events


def joined(events: list[Event]) -> list[Event]:
    """The same with neighbours of one kind as one."""
    if len(events) < 2:
        return events
    merged: list[Event] = [events[0]]
    for event in events[1:]:
        last = merged[-1]
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            merged[-1] = Arguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
