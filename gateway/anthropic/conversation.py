"""Anthropic's messages, converted for chat templates: tool results become messages of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvforge.gateway.chat.conversation import CalledArguments, NotText, naming
from kvforge.gateway.chat.tools import AUTO, NONE, REQUIRED, Choice, Tool, leave_out
from kvforge.gateway.http.ignored import Ignored
from kvforge.protocol.errors import InvalidRequest

from .editing import THINKING, thinking_kept
from .request_body import CUSTOM, Block, Conversation, Message

_KINDS = {"auto": AUTO, "none": NONE, "any": REQUIRED, "tool": REQUIRED}

MEDIA = ("image", "document")


def messages_of(asked: Conversation) -> list[dict[str, Any]]:
    """Return the conversation with its system prompt first.

    Raises:
        InvalidRequest: Names the field.
    """
    with naming(asked.model):
        return _messages(asked)


def _messages(asked: Conversation) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.system:
        messages.append({"role": "system", "content": _text(asked.system, "system")})
    kept, arguments = thinking_kept(asked), CalledArguments()
    last = max((at for at, message in enumerate(asked.messages) if message.role == "user"), default=0)
    for at, message in enumerate(asked.messages):
        if message.role == "system" and message.clear_at == "next_user_message" and at < last:
            continue
        messages += _message(message, f"messages[{at}].content", arguments, thinking_kept=at in kept)
    return messages


def tools_of(asked: Conversation, ignored: Ignored) -> list[Tool]:
    """Return the caller's own tools and note others in `ignored`.

    Raises:
        InvalidRequest: Names a malformed tool.
    """
    tools = []
    for at, tool in enumerate(asked.tools or ()):
        if tool.type not in (None, CUSTOM):
            leave_out(f"tools[{at}].type", tool.type, ignored)
            continue
        if tool.input_schema is None:
            raise InvalidRequest(f"tools[{at}].input_schema", "is missing")
        places = {"place": f"tools[{at}]", "schema": f"tools[{at}].input_schema"}
        tools.append(Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict), **places))
    return tools


def choice_of(asked: Conversation) -> Choice:
    """Return the tool choice.

    Raises:
        InvalidRequest: Names `tool_choice`.
    """
    choice = asked.tool_choice
    if choice is None:
        return Choice()
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name", "is required with the type 'tool' and invalid with any other")
    return Choice(_KINDS[choice.type], choice.name or "", not choice.disable_parallel_tool_use)


def _message(
    message: Message, field: str, arguments: CalledArguments, *, thinking_kept: bool
) -> Iterator[dict[str, Any]]:
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    turn: dict[str, Any] = {"role": message.role, "content": ""}
    texts: list[str] = []
    results = False
    for at, block in enumerate(message.content):
        name = f"{field}[{at}]"
        if block.type == "text":
            texts.append(_needed(block.text, f"{name}.text"))
        elif block.type in THINKING:
            if block.thinking and thinking_kept:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
        elif block.type == "tool_use" and message.role == "assistant":
            function = {
                "name": _needed(block.name, f"{name}.name"),
                "arguments": arguments.read(block.input if isinstance(block.input, dict | str) else {}),
            }
            call = {"id": _needed(block.id, f"{name}.id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif block.type == "tool_result" and message.role == "user":
            results = True
            yield {
                "role": "tool",
                "tool_call_id": _needed(block.tool_use_id, f"{name}.tool_use_id"),
                "content": _text(block.content or "", f"{name}.content"),
            }
        elif block.type in MEDIA:
            raise NotText(f"{name}.type", block.type)
        else:
            raise InvalidRequest(
                f"{name}.type", f"is {block.type!r}; only text and results of the caller's tools are supported"
            )
    turn["content"] = "\n".join(texts)
    if texts or turn.keys() > {"role", "content"} or not results:
        yield turn  # an empty message counts too: templates expect user and assistant to alternate


def _text(content: str | Sequence[Block], field: str) -> str:
    if isinstance(content, str):
        return content
    for at, block in enumerate(content):
        if block.type != "text":
            raise NotText(f"{field}[{at}].type", block.type)
    return "\n".join(_needed(block.text, f"{field}[{at}].text") for at, block in enumerate(content))


def _needed(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequest(field, "is missing")
    return value
