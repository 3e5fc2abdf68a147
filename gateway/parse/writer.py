"""The event writer that all readers share. It drops the white space between the parts of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .events import Arguments, Content, Event, Reasoning, ToolCall
from .reader import Reader, Reading, markers

REFERENCES = 16  # nesting limit of a schema's references
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class Writer:
    """Collects the events of an answer.

    White space between the parts of an answer (reasoning, content, calls) is dropped.

    Args:
        tools: The schemas of the tools' parameters by name; None if calls are not parsed.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None) -> None:
        self.reader = Reader()
        self.tools = tools if tools is not None else {}
        self._calling = tools is not None
        self._events: list[Event] = []
        self._calls = 0
        self._held: list[str] = []
        self._shown = False

    @property
    def shown(self) -> bool:
        """Whether there was content."""
        return self._shown

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._calls > 0

    @property
    def calling(self) -> bool:
        """Whether calls are parsed."""
        return self._calling

    def content(self, text: str) -> None:
        """Add text for the user. Trailing white space is held back until more content follows."""
        if not text or text.isspace():
            self._held.append(text)
            return
        text = "".join([*self._held, text])
        if not self._shown:
            text = text.lstrip()
        body = text.rstrip()
        self._held = [text[len(body) :]]
        self._shown = True
        self._events.append(Content(body))

    def mark(self, text: str) -> None:
        """Hold back a marker before calls: it is content if no call follows."""
        self._held.append(text)

    def drop_space(self) -> None:
        """Drop the white space that was held back."""
        self._held = [text for text in self._held if not text.isspace()]

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def call(self, name: str, call_id: str = "") -> None:
        """Begin a call."""
        self._held = []
        self._events.append(ToolCall(self._calls, name, call_id))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Add a piece of the JSON text of the last call's arguments."""
        if text:
            self._events.append(Arguments(self._calls - 1, text))

    def argument_types(self, name: str, key: str) -> set[str]:
        """Return the JSON types that a tool's schema allows for an argument; empty if it sets none."""
        whole = self.tools.get(name, {})
        properties = whole.get("properties", {})
        return _types(properties.get(key, {}) if isinstance(properties, Mapping) else {}, whole)

    def think(self, close: str) -> Reading:
        """Read reasoning up to `close` and strip it."""
        held: list[str] = []
        begun = False

        def emit(text: str) -> None:
            nonlocal held, begun
            if not text or text.isspace():
                held.append(text)
                return
            text = "".join([*held, text]) if begun else text.lstrip()
            body = text.rstrip()
            held, begun = [text[len(body) :]], True
            self.reasoning(body)

        yield from self.reader.until(markers(close), emit)

    def end(self) -> None:
        """Flush the held-back white space: it belongs to the content if there are no calls."""
        held = "".join(self._held)
        if held and not self._calls and self._shown:
            self._events.append(Content(held))
        elif held.strip():
            self._events.append(Content(held.strip()))

    def pop_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def _types(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> set[str]:
    if not isinstance(schema, Mapping) or depth > REFERENCES:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in kind}
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return {_KINDS.get(type(value), "") for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = whole
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return _types(found, whole, depth + 1)
    either = [_types(one, whole, depth + 1) for name in ("anyOf", "oneOf") for one in schema.get(name) or ()]
    return set().union(*either) if either and all(either) else set()
