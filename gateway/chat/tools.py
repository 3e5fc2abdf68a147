"""Tools that a model may call, whichever API names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.http.ignored import Ignored
from kvforge.protocol.errors import InvalidRequest

AUTO, NONE, REQUIRED = "auto", "none", "required"
FUNCTION, CUSTOM = "function", "custom"
TOOLS_MAX = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. parameters: a JSON schema of its arguments. strict: they are made to follow it. place, schema: where
    the request has the function, and its schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    place: str = ""
    schema: str = ""

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools the model may or must call. kind: AUTO, NONE or REQUIRED; name: this one, with REQUIRED. parallel:
    several at once. allowed: the names of those that may be called; None: all."""

    kind: str = AUTO
    name: str = ""
    parallel: bool = True
    allowed: frozenset[str] | None = None


NOT_RUN = "it is no function: tools that their provider runs, or that its models alone know, are not here"


def leave_out(field: str, kind: str, ignored: Ignored) -> None:
    """Note a tool that is no function.

    Args:
        field: The field of the request that holds its type.
        kind: The type.
        ignored: Where it is noted.

    Raises:
        InvalidRequest: Requests are read strictly, or the caller itself would run the tool: it would wait for a call.
    """
    if kind == CUSTOM:
        raise InvalidRequest(field, "is 'custom'; tools without a schema are not supported: offer a function")
    ignored.add(field, f"is {kind[:80]!r}; {NOT_RUN}", kind)


def not_run(field: str, kind: str) -> InvalidRequest:
    """The refusal of a tool choice that forces a call of a tool that is left out."""
    return InvalidRequest(field, f"asks for a call of {kind[:80]!r}; {NOT_RUN}")


def checked(tools: Sequence[Tool], choice: Choice, field: str = "tools") -> Sequence[Tool]:
    """The tools that are offered to the model. Raises InvalidRequest naming `tools` or `tool_choice`."""
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(field, f"holds {len(tools)} tools; there may be {TOOLS_MAX}")
    names = [tool.name for tool in tools]
    for at, name in enumerate(names):
        place = tools[at].place or f"{field}[{at}]"
        if not _NAME.fullmatch(name):
            raise InvalidRequest(place, f"the name {name[:80]!r} is not 1 to 256 of A-Z a-z 0-9 _ . : -")
        if name in names[:at]:
            raise InvalidRequest(place, f"there are two tools of the name {name!r}")
    for name in sorted({choice.name, *(choice.allowed or ())} - {"", *names}):
        raise InvalidRequest("tool_choice", f"names {name[:80]!r}, which is none of the functions in {field}")
    if choice.allowed is not None:
        tools = [tool for tool in tools if tool.name in choice.allowed]
    if choice.kind == REQUIRED and not tools:
        raise InvalidRequest("tool_choice", f"asks for a call, and {field} has no function that may be called")
    return () if choice.kind == NONE else tools
