"""The tools of /v1/responses: functions, also those within namespaces. Other tools are ignored.

The model sees one name for each function. Within a namespace that is the function's own name if it is unique, else the
namespace and the name. Calls are returned with both parts, as the client knows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from kvforge.gateway.chat.tools import AUTO, FUNCTION, NONE, REQUIRED, Choice, Tool, leave_out, not_run
from kvforge.gateway.http.ignored import Ignored
from kvforge.protocol.errors import InvalidRequest

from .responses_body import Create, FunctionTool

NAMESPACE = "namespace"
SEPARATOR = "__"


class OfferedFunctions:
    """The functions of one request.

    Args:
        asked: The request.
        ignored: Collects the ignored tools.

    Raises:
        InvalidRequest: Names a malformed tool, or any tool other than a function if requests are read strictly.
    """

    def __init__(self, asked: Create, ignored: Ignored) -> None:
        found = list(_functions(asked, ignored))
        times = Counter(tool.name for _, _, tool in found)
        self.tools: list[Tool] = []
        self._names: dict[str, tuple[str, str]] = {}
        self._shown: dict[tuple[str, str], str] = {}
        for place, space, tool in found:
            shown = tool.name if not space or times[tool.name] == 1 else _joined(space, tool.name)
            parameters = tool.parameters or {"type": "object", "properties": {}}
            places = {"place": place, "schema": f"{place}.parameters"}
            self.tools.append(Tool(shown, tool.description or "", parameters, bool(tool.strict), **places))
            self._names[shown] = (space, tool.name)
            self._shown[space, tool.name] = shown

    def name_of(self, shown: str) -> dict[str, str]:
        """Return the name fields of a call, given the name that the model sees."""
        space, name = self._names.get(shown, ("", shown))
        return {"name": name, NAMESPACE: space} if space else {"name": name}

    def shown(self, namespace: str, name: str) -> str:
        """Return the name that the model sees."""
        return self._shown.get((namespace, name), name)

    def choice(self, asked: Create) -> Choice:
        """Return which functions may or must be called.

        Raises:
            InvalidRequest: Names `tool_choice`.
        """
        choice, parallel = asked.tool_choice, asked.parallel_tool_calls is not False
        if choice is None:
            return Choice(AUTO if self.tools else NONE, "", parallel)
        if isinstance(choice, str):
            return Choice(choice, "", parallel)
        if choice.type == "allowed_tools":
            allowed = [tool for tool in choice.tools or () if tool.type == FUNCTION]
            names = frozenset(self.shown(tool.namespace or "", tool.name or "") for tool in allowed)
            return Choice(choice.mode or AUTO, "", parallel, names)
        if choice.type != FUNCTION:
            raise not_run("tool_choice", choice.type)
        if not choice.name:
            raise InvalidRequest("tool_choice.name", "is missing")
        return Choice(REQUIRED, self.shown(choice.namespace or "", choice.name), parallel)


def echoed(tools: list[FunctionTool] | None) -> list[dict[str, Any]]:
    """Return the tools as the response repeats them: those that were offered."""
    return [_echoed(tool) for tool in tools or () if tool.type in (FUNCTION, NAMESPACE)]


def _echoed(tool: FunctionTool) -> dict[str, Any]:
    plain = {"type": tool.type, "name": tool.name, "description": tool.description}
    if tool.type == NAMESPACE:
        return {**plain, "description": tool.description or "", "tools": echoed(tool.tools)}
    return {**plain, "parameters": msgspec.to_builtins(tool.parameters or {}), "strict": bool(tool.strict)}


def _functions(asked: Create, ignored: Ignored) -> Iterator[tuple[str, str, FunctionTool]]:
    """Yield each function with its path in the request and its namespace ("" for none)."""
    for at, tool in enumerate(asked.tools or ()):
        field = f"tools[{at}]"
        if tool.type == FUNCTION:
            yield field, "", tool
        elif tool.type == NAMESPACE:
            for place, inner in enumerate(tool.tools or ()):
                if inner.type == FUNCTION:
                    yield f"{field}.tools[{place}]", tool.name, inner
                else:
                    leave_out(f"{field}.tools[{place}].type", inner.type, ignored)
        else:
            leave_out(f"{field}.type", tool.type, ignored)


def _joined(space: str, name: str) -> str:
    return space + name if space.endswith(SEPARATOR) else f"{space}{SEPARATOR}{name}"
