"""The output items of a response and the events that describe them.

The events of a stored response depend on the answer's tokens alone, so that any process writes the same ones with the
same sequence numbers: while it runs, and later from the items and the lengths of their pieces (`replayed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvforge.gateway.generate.answer import LENGTH
from kvforge.gateway.http.encoding import encode
from kvforge.gateway.parse.events import Arguments, Event, Reasoning, ToolCall

# Fields of a response that differ before its end.
_BEGUN: Mapping[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
# The last event of a response by its status; OpenAI has none of its own for cancelled ones.
_LAST = {"cancelled": "response.incomplete"}


class Items:
    """Builds the output items of an answer. `events` collects the stream events for them.

    Args:
        name: The base of the items' ids.
        name_of: Returns the name fields of a call, given the function's name.

    Attributes:
        done: The complete items.
        pieces: For each complete item the lengths of the pieces in which its text came.
    """

    def __init__(self, name: str, name_of: Callable[[str], dict[str, str]]) -> None:
        self._name_of = name_of
        self.done: list[dict[str, Any]] = []
        self.pieces: list[list[int]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._name = name
        self._item: dict[str, Any] | None = None
        self._text: list[str] = []

    def add(self, event: Event) -> None:
        """Add an event of the answer."""
        if isinstance(event, ToolCall):
            self.close()
            at = f"{self._name}_{len(self.done)}"
            call = {"type": "function_call", "id": f"fc{at}", "call_id": event.call_id or f"call{at}"}
            self._open({**call, **self._name_of(event.name), "arguments": "", "status": "in_progress"})
        elif isinstance(event, Arguments):
            self._delta(event.text)
        elif isinstance(event, Reasoning):
            if self._kind() != "reasoning":
                self.close()
                self._open({"type": "reasoning", "id": f"rs{self._name}_{len(self.done)}", "summary": []})
            self._delta(event.text)
        else:
            if self._kind() != "message":
                self.close()
                message = {"type": "message", "id": f"msg{self._name}_{len(self.done)}", "role": "assistant"}
                self._open({**message, "status": "in_progress", "content": []})
            self._delta(event.text)

    def close(self, reason: str = "stop") -> None:
        """Complete the open item; with the reason `length` it is incomplete."""
        if self._item is None:
            return
        item, text, kind = self._item, "".join(self._text), self._kind()
        status = "incomplete" if reason == LENGTH else "completed"
        if kind == "function_call":
            self._add_event("response.function_call_arguments.done", arguments=text, name=item["name"])
            item = {**item, "arguments": text or "{}", "status": status}
        elif kind == "reasoning":
            self._add_event("response.reasoning_text.done", content_index=0, text=text)
            item = {**item, "content": [{"type": "reasoning_text", "text": text}], "status": status}
        else:
            self._add_event("response.output_text.done", content_index=0, text=text, logprobs=[])
            self._add_event("response.content_part.done", content_index=0, part=_part(text))
            item = {**item, "content": [_part(text)], "status": status}
        self.events.append(("response.output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        self.pieces.append([len(piece) for piece in self._text])
        self._item = None

    def repeat(self, item: Mapping[str, Any], pieces: Sequence[int]) -> None:
        """Add a complete item again, in the pieces in which it came."""
        if item["type"] == "function_call":
            self._open({**item, "arguments": "", "status": "in_progress"})
            text = item["arguments"]
        elif item["type"] == "reasoning":
            self._open({name: item[name] for name in ("type", "id", "summary")})
            text = item["content"][0]["text"]
        else:
            self._open({**item, "status": "in_progress", "content": []})
            text = item["content"][0]["text"]
        at = 0
        for length in pieces:
            self._delta(text[at : at + length])
            at += length
        self.close(LENGTH if item["status"] == "incomplete" else "stop")

    def _kind(self) -> str:
        return str(self._item["type"]) if self._item is not None else ""

    def _open(self, item: dict[str, Any]) -> None:
        self._item, self._text = item, []
        self.events.append(("response.output_item.added", {"output_index": len(self.done), "item": item}))
        if item["type"] == "message":
            self._add_event("response.content_part.added", content_index=0, part=_part(""))

    def _delta(self, text: str) -> None:
        kind = self._kind()
        self._text.append(text)
        if kind == "function_call":
            self._add_event("response.function_call_arguments.delta", delta=text)
        elif kind == "reasoning":
            self._add_event("response.reasoning_text.delta", delta=text, content_index=0)
        else:
            self._add_event("response.output_text.delta", delta=text, content_index=0, logprobs=[])

    def _add_event(self, kind: str, **fields: Any) -> None:
        assert self._item is not None, "an item is open"
        self.events.append((kind, {"item_id": self._item["id"], "output_index": len(self.done), **fields}))


class EventWriter:
    """Writes the events of one response with their sequence numbers.

    Args:
        items: The response's items.
        after: Events up to this sequence number are left out.
    """

    def __init__(self, items: Items, after: int = -1) -> None:
        self.items, self._after = items, after
        self._sequence = 0

    @property
    def written(self) -> int:
        """The sequence number of the last event, left out or not; -1 before the first."""
        return self._sequence - 1

    def begin(self, body: Mapping[str, Any]) -> bytes:
        """Return the first events. `body` is the response at any time."""
        begun = {**body, **_BEGUN}
        return self.event("response.created", response=begun) + self.event("response.in_progress", response=begun)

    def add(self, events: Sequence[Event], reason: str = "") -> bytes:
        """Return the events for a piece of the answer; with the reason of its end, the open item is closed."""
        for one in events:
            self.items.add(one)
        if reason:
            self.items.close(reason)
        return self.pop()

    def pop(self) -> bytes:
        """Return the events that the items have collected."""
        written = b"".join([self.event(kind, **fields) for kind, fields in self.items.events])
        self.items.events.clear()
        return written

    def end(self, body: Mapping[str, Any]) -> bytes:
        """Return the last event."""
        return self.event(_LAST.get(body["status"], f"response.{body['status']}"), response=body)

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return one event, or b"" if it is left out."""
        self._sequence += 1
        return event(kind, sequence_number=self._sequence - 1, **fields) if self._sequence - 1 > self._after else b""


def event(kind: str, **fields: Any) -> bytes:
    """Encode one server-sent event of this API."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def replayed(body: Mapping[str, Any], pieces: Sequence[Sequence[int]], after: int = -1) -> bytes:
    """Return all events of a response that has ended.

    Args:
        body: The response.
        pieces: The lengths of the pieces of each output item.
        after: Events up to this sequence number are left out.
    """
    writer = EventWriter(Items("", lambda name: {"name": name}), after)
    written = [writer.begin(body)]
    for item, lengths in zip(body["output"], pieces, strict=True):
        writer.items.repeat(item, lengths)
        written.append(writer.pop())
    return b"".join([*written, writer.end(body)])


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
