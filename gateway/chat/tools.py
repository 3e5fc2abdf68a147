"""Tools that a model may call, as every API here says them in its own way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvforge.protocol.errors import InvalidRequest

AUTO, NONE, REQUIRED = "auto", "none", "required"
TOOLS_MAX = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. parameters: a JSON schema of its arguments. strict: they are made to follow it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools the model may or must call. kind: AUTO, NONE or REQUIRED; name: this one, with REQUIRED. parallel:
    several at once."""

    kind: str = AUTO
    name: str = ""
    parallel: bool = True


def checked(tools: Sequence[Tool], choice: Choice, field: str = "tools") -> Sequence[Tool]:
    """The tools that the model is told of. Raises InvalidRequest naming `tools` or `tool_choice`."""
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(field, f"holds {len(tools)} tools; there may be {TOOLS_MAX}")
    names = [tool.name for tool in tools]
    for at, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{field}[{at}]", f"the name {name[:80]!r} is not 1 to 256 of A-Z a-z 0-9 _ . : -")
        if name in names[:at]:
            raise InvalidRequest(f"{field}[{at}]", f"there are two tools of the name {name!r}")
    if choice.kind == REQUIRED and not tools:
        raise InvalidRequest("tool_choice", f"asks for a call, and {field} is empty")
    if choice.name and choice.name not in names:
        raise InvalidRequest("tool_choice", f"names {choice.name!r}, which is none of the tools")
    return () if choice.kind == NONE else tools
