"""Tools that a model may call, for all APIs."""

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
    """A function.

    Attributes:
        name: Its name.
        description: What it does, for the model.
        parameters: The JSON schema of its arguments.
        strict: Whether the schema is enforced.
        place: Its path in the request.
        schema: The path of its schema in the request.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    place: str = ""
    schema: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools the model may or must call.

    Attributes:
        kind: AUTO, NONE or REQUIRED.
        name: The tool that must be called, with REQUIRED; "" for any.
        parallel: Whether several calls are allowed.
        allowed: The names of the tools that may be called; None for all.
    """

    kind: str = AUTO
    name: str = ""
    parallel: bool = True
    allowed: frozenset[str] | None = None


NOT_RUN = "only functions are supported, not built-in tools of a provider"


def leave_out(field: str, kind: str, ignored: Ignored) -> None:
    """Note a tool that is not a function.

    Args:
        field: The path of its type.
        kind: Its type.
        ignored: Collects it.

    Raises:
        InvalidRequest: The request is read strictly, or the tool is the caller's own, which would wait for a call.
    """
    if kind == CUSTOM:
        raise InvalidRequest(field, "is 'custom'; tools without a schema are not supported: offer a function")
    ignored.add(field, f"is {kind[:80]!r}; {NOT_RUN}", kind)


def not_run(field: str, kind: str) -> InvalidRequest:
    """Return the refusal of a tool choice that forces an unsupported tool."""
    return InvalidRequest(field, f"asks for a call of {kind[:80]!r}; {NOT_RUN}")


def checked(tools: Sequence[Tool], choice: Choice, field: str = "tools") -> Sequence[Tool]:
    """Return the tools that are offered to the model.

    Raises:
        InvalidRequest: Names `tools` or `tool_choice`.
    """
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(field, f"has {len(tools)} tools; the limit is {TOOLS_MAX}")
    names = [tool.name for tool in tools]
    for at, name in enumerate(names):
        place = tools[at].place or f"{field}[{at}]"
        if not _NAME.fullmatch(name):
            raise InvalidRequest(place, f"invalid tool name {name[:80]!r} (expected 1 to 256 of A-Z a-z 0-9 _ . : -)")
        if name in names[:at]:
            raise InvalidRequest(place, f"duplicate tool name {name!r}")
    for name in sorted({choice.name, *(choice.allowed or ())} - {"", *names}):
        raise InvalidRequest("tool_choice", f"names {name[:80]!r}, which is not a function in {field}")
    if choice.allowed is not None:
        tools = [tool for tool in tools if tool.name in choice.allowed]
    if choice.kind == REQUIRED and not tools:
        raise InvalidRequest("tool_choice", f"requires a call, but {field} has no function that may be called")
    return () if choice.kind == NONE else tools
