"""One answer: from the tokens of its stream to events.

Invariant: the events depend on the tokens alone, not on how they were batched. An answer that is read again, from the
first token or a later one, yields the same events.
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
    """A parser of the model's output (`kvforge.gateway.parse`)."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Return the events that further text completes."""

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the answer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The events of one answer since the last piece.

    Attributes:
        index: The answer's index among those of its prompt.
        events: The events.
        start, end: The range of stream tokens that they come from.
        reason: The finish reason; "" while the answer continues.
    """

    index: int
    events: list[Event]
    start: int
    end: int
    reason: str = ""


class Answer:
    """Reader of one answer's stream.

    Args:
        index: Its index among the answers of its prompt.
        stream: The tokens.
        text: The incremental detokenizer.
        stops: Stop strings.
        stop_tokens: Stop token ids, which produce no text.
        parser: The parser; None if all text is content.

    Attributes:
        reasoning_tokens: The number of reasoning tokens so far.
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
        """Whether the final piece was returned."""
        return self._over

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the answer, or ""."""
        return self._stop.matched if self._stop is not None else ""

    @property
    def waits_for_tokens(self) -> bool:
        """Whether each token matters before the end, because a stop string may complete."""
        return self._stop is not None

    def skip(self, tokens: int) -> bool:
        """Read and discard the tokens before offset `tokens`. Return False while some are missing."""
        reach = min(tokens, len(self.stream.tokens))
        if self._read < reach:
            self._read_to(reach)
        return reach == tokens or self.stream.done

    def pop_piece(self) -> Piece | None:
        """Return the next piece; None if there is nothing new.

        Raises:
            KvforgeError: The error that ended the request.
        """
        stream, start = self.stream, self._read
        if self._over:
            return None
        ended = stream.ended  # read before the tokens, so that all tokens that it counts are present
        stopped = self._stop is not None and self._stop.found
        events = [] if stopped else self._read_to(len(stream.tokens))
        if not stream.done:
            return Piece(self.index, events, start, self._read) if events or self._read > start else None
        if stream.error is not None:
            raise stream.error
        assert ended is not None, "done without an error"
        if ended.reason == CANCELLED:
            raise Conflict(f"request {stream.request_id} was cancelled by another client")
        self._over = True
        stopped = self._stop is not None and self._stop.found
        if not stopped:
            events += self._rest()
        stopped = stopped or (self._stop is not None and self._stop.found)
        return Piece(self.index, joined(events), start, self._read, STOP if stopped else ended.reason)

    def pop_each(self) -> list[Piece]:
        """Return the pieces that `pop_piece` would return as one, a piece for each token.

        They depend on the tokens alone, not on when they came, so that two readers can count them.

        Raises:
            KvforgeError: The error that ended the request.
        """
        pieces: list[Piece] = []
        while not self._over and self._read < len(self.stream.tokens) and not (self._stop and self._stop.found):
            start = self._read
            if events := self._read_to(start + 1):
                pieces.append(Piece(self.index, events, start, self._read))
        if self.stream.done and (last := self.pop_piece()) is not None:
            pieces.append(last)
        return pieces

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
        """Flush the text that was held back for a stop string or an incomplete character."""
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
    """Merge neighbouring events of one kind."""
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
