"""What the ways to read an answer write to: events, with the white space between parts left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .events import Arguments, Content, Event, Reasoning, ToolCall
from .reader import Reader, Reading, markers

REFERENCES = 16  # of a schema into itself, one in the other
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
    """tools: the schemas of their arguments by name; None: no calls are looked for.

    White space between an answer's parts (reasoning, content, calls) belongs to none of them.
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
        """There was content."""
        return self._shown

    @property
    def called(self) -> bool:
        """There was a call."""
        return self._calls > 0

    @property
    def calling(self) -> bool:
        """Calls are looked for."""
        return self._calling

    def content(self, text: str) -> None:
        """Text for the user; white space is held back until it is known what follows."""
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
        """A bracket before calls: it is content if none follows."""
        self._held.append(text)

    def drop_space(self) -> None:
        """White space that was held back is no part of the content."""
        self._held = [text for text in self._held if not text.isspace()]

    def reasoning(self, text: str) -> None:
        """What it thinks."""
        if text:
            self._events.append(Reasoning(text))

    def call(self, name: str, call_id: str = "") -> None:
        """A call begins."""
        self._held = []
        self._events.append(ToolCall(self._calls, name, call_id))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the JSON text of the last call's arguments."""
        if text:
            self._events.append(Arguments(self._calls - 1, text))

    def kinds(self, name: str, key: str) -> set[str]:
        """The types that a tool's schema allows for an argument; empty: it does not say."""
        whole = self.tools.get(name, {})
        properties = whole.get("properties", {})
        return _types(properties.get(key, {}) if isinstance(properties, Mapping) else {}, whole)

    def think(self, close: str) -> Reading:
        """Reasoning up to `close`, without white space at its ends."""
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
        """The answer has ended: white space that was held back is the end of a content without calls."""
        held = "".join(self._held)
        if held and not self._calls and self._shown:
            self._events.append(Content(held))
        elif held.strip():
            self._events.append(Content(held.strip()))

    def taken(self) -> list[Event]:
        """The events since the last time."""
        taken, self._events = self._events, []
        return taken


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
