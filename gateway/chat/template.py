"""Detects what a model's chat template needs, by rendering test conversations and searching for each of their words.

Templates differ in what they read: content as text or as parts, arguments as objects or as JSON text, ids of nine
characters, one call per message. Parts that a template would lose are passed in another form, or refused by name.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kvforge.protocol.errors import KvforgeError

Message = dict[str, Any]
Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], Awaitable[str]]

USER, SYSTEM, ASSISTANT, TOOL = ROLES = ("user", "system", "assistant", "tool")
# Words that no template contains.
WORDS = {role: f"kvf{role}word" for role in ROLES}
TOOL_NAMES = ("kvfone", "kvftwo")
KEY, VALUES, RESULTS = "kvfkey", ("kvfred", "kvfblue"), ("kvfrain", "kvfsnow")
TOOL_WORD = "kvfdescribed"
LONG_IDS = ("call_kvf0AbCdEfGhIjKlMnOpQ0", "call_kvf0AbCdEfGhIjKlMnOpQ1")
ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """How a template expects conversations.

    Attributes:
        parts: Roles with a list of parts as content.
        system: Whether it supports system messages; else their text is prepended to the first user message.
        arguments_text: Arguments of calls must be JSON text, not objects.
        nine_ids: Ids of calls must have nine letters or digits.
        named_results: A result must have the name of its tool.
        single_calls: A message may hold only one call.
        empty_content: The content of a message with calls only: "" or None.
        flat_tools: Tools are functions without the enclosing object.
        split_content: Content beside calls must be a separate message before them.
        lost: Roles that are dropped.
        written_calls: It drops calls, so they are written into the content in the model's format.
        problem: Why conversations are refused, or "".
        tools_problem: Why tools and calls are refused, or "".
    """

    parts: frozenset[str] = frozenset()
    system: bool = True
    arguments_text: bool = False
    nine_ids: bool = False
    named_results: bool = False
    single_calls: bool = False
    empty_content: str | None = ""
    flat_tools: bool = False
    split_content: bool = False
    lost: frozenset[str] = frozenset()
    written_calls: bool = False
    problem: str = ""
    tools_problem: str = ""


async def probe(render: Render, template: str, *, writes_calls: bool = False) -> TemplateNeeds:
    """Detect the needs of a template.

    Args:
        render: Renders a conversation with the template; raises KvforgeError.
        template: The template.
        writes_calls: Whether calls can be written into content in this model's format.
    """
    needs, problem = await _contents(render)
    if problem:
        return replace(needs, problem=problem, tools_problem=problem)
    if "tools" not in template:
        return replace(needs, tools_problem="the model's chat template has no place for tools")
    needs, problem = await _tools(render, needs)
    if problem:
        return replace(needs, tools_problem=problem)
    needs = await _calls(render, needs, writes_calls)
    return needs if needs.tools_problem else await _content_beside(render, needs)


async def _contents(render: Render) -> tuple[TemplateNeeds, str]:
    """Detect which roles need parts, and whether system messages are supported."""
    needs, reason = TemplateNeeds(), ""
    for parts in (frozenset[str](), frozenset({USER})):
        needs = TemplateNeeds(parts=parts)
        text, reason = await _rendered(render, [{"role": USER, "content": WORDS[USER]}], needs)
        if _holds(text, WORDS[USER]):
            break
    else:
        return TemplateNeeds(), _lost("words of a user's message", reason)
    for role in (SYSTEM, ASSISTANT):
        needs = await _role(render, role, needs)
    return needs, ""


async def _role(render: Render, role: str, needs: TemplateNeeds) -> TemplateNeeds:
    message, user = {"role": role, "content": WORDS[role]}, {"role": USER, "content": WORDS[USER]}
    messages = [message, user] if role == SYSTEM else [user, message, user]
    for parts in (needs.parts, needs.parts | {role}):
        wanted = replace(needs, parts=parts)
        text, _ = await _rendered(render, messages, wanted)
        if _holds(text, WORDS[role]) and _holds(text, WORDS[USER]):
            return wanted
    return replace(needs, system=False) if role == SYSTEM else replace(needs, lost=frozenset({role}))


async def _tools(render: Render, needs: TemplateNeeds) -> tuple[TemplateNeeds, str]:
    reason = ""
    for flat in (False, True):
        wanted = replace(needs, flat_tools=flat)
        user = {"role": USER, "content": WORDS[USER]}
        text, reason = await _rendered(render, [user], wanted, tools=True)
        if all(_holds(text, word) for word in (WORDS[USER], *TOOL_NAMES)):
            return wanted, ""
    return needs, _lost("names of tools", reason)


async def _calls(render: Render, needs: TemplateNeeds, writes_calls: bool) -> TemplateNeeds:
    """Detect how calls and their results reach the prompt, with the fewest changes."""
    found: list[tuple[TemplateNeeds, str]] = []
    reason, named = "", False
    before, _ = await _rendered(render, _conversation()[:1], needs, tools=True)
    ways = product(
        (False, True), (False, True), (False, True), (needs.parts, needs.parts | {TOOL}), (False, True), ("", None)
    )
    for single, nine, as_text, parts, results, empty in sorted(
        ways, key=lambda way: sum((way[0], way[1], way[2], way[3] != needs.parts, way[4], way[5] is None))
    ):
        wanted = replace(
            needs,
            single_calls=single,
            nine_ids=nine,
            arguments_text=as_text,
            parts=parts,
            named_results=results,
            empty_content=empty,
        )
        text, wrong = await _rendered(render, _conversation(), wanted, tools=True)
        reason = reason or wrong
        if not text:
            continue
        named = named or _calls_named(text, before)
        if all(_holds(text, word) for word in RESULTS) and _arguments_stand(text):
            return wanted
        found.append((wanted, text))
    problem = _lost("calls, with their arguments, and their results", "" if found else reason)
    if named or not writes_calls:
        return replace(needs, tools_problem=problem)
    # The template drops calls, so only their results must appear.
    for wanted, text in found:
        if all(_holds(text, word) for word in RESULTS):
            return replace(wanted, written_calls=True)
    return replace(needs, tools_problem=problem)


async def _content_beside(render: Render, needs: TemplateNeeds) -> TemplateNeeds:
    """Detect whether the template drops content beside calls."""
    if needs.written_calls:
        return needs
    messages = _conversation()
    messages[1]["content"] = WORDS[ASSISTANT]
    for split in (False, True):
        wanted = replace(needs, split_content=split)
        text, _ = await _rendered(render, messages, wanted, tools=True)
        if _holds(text, WORDS[ASSISTANT]) and _arguments_stand(text):
            return wanted
    return needs


def _conversation() -> list[Message]:
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": {KEY: value}}}
        for id_, name, value in zip(LONG_IDS, TOOL_NAMES, VALUES, strict=True)
    ]
    results = [
        {"role": TOOL, "tool_call_id": id_, "content": text} for id_, text in zip(LONG_IDS, RESULTS, strict=True)
    ]
    user = {"role": USER, "content": WORDS[USER]}
    return [user, {"role": ASSISTANT, "content": "", "tool_calls": calls}, *results]


async def _rendered(
    render: Render, messages: list[Message], needs: TemplateNeeds, *, tools: bool = False
) -> tuple[str, str]:
    """Return the rendered text, or the reason why there is none."""
    options: dict[str, Any] = {"add_generation_prompt": True}
    if tools:
        options["tools"] = [tool_for(_tool(name), needs) for name in TOOL_NAMES]
    try:
        return await render(conversation_for(messages, needs), options), ""
    except KvforgeError as error:
        return "", error.message


def _tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {KEY: {"type": "string", "description": TOOL_WORD}},
        "required": [KEY],
    }
    return {"type": "function", "function": {"name": name, "description": TOOL_WORD, "parameters": parameters}}


def _holds(text: str, word: str) -> bool:
    """Return whether a word appears as itself, not within a printed list of parts."""
    return word in text and not any(f"{quote}text{quote}: {quote}{word}" in text for quote in "'\"")


def _calls_named(text: str, before: str) -> bool:
    """Return whether any part of a call appears. `before` is the prompt without calls, which has the tools' names."""
    return any(value in text for value in VALUES) or any(text.count(name) > before.count(name) for name in TOOL_NAMES)


def _arguments_stand(text: str) -> bool:
    """Return whether arguments appear as JSON, neither as a Python object nor as escaped text."""
    if not all(value in text for value in VALUES) or KEY not in text:
        return False
    spoiled = (f"{{'{KEY}'", f'\\"{KEY}\\"')
    return not any(mark in text for mark in spoiled)


def _lost(what: str, reason: str) -> str:
    return f"the model's chat template loses the {what}" + (f" ({reason})" if reason else "")


# ------------------------------------------------------------------------------------------------------- adaptation


def tool_for(tool: Mapping[str, Any], needs: TemplateNeeds) -> dict[str, Any]:
    """Return a tool in the form that the template expects."""
    return {**tool["function"]} if needs.flat_tools else {**tool}


def conversation_for(
    messages: Sequence[Mapping[str, Any]],
    needs: TemplateNeeds,
    write_calls: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str] | None = None,
) -> list[Message]:
    """Return a conversation in the form that the template expects.

    Args:
        messages: Content as text, arguments as objects.
        needs: The needs of the template.
        write_calls: Writes calls, each a name and arguments, in the model's format.
    """
    adapted: list[Message] = [{**message} for message in messages]
    if not needs.system:
        adapted = _without_system(adapted)
    if needs.split_content:
        adapted = _split_content(adapted)
    if needs.single_calls:
        adapted = _single_calls(adapted)
    names = {call["id"]: call["function"]["name"] for message in adapted for call in message.get("tool_calls") or ()}
    for message in adapted:
        if message.get("tool_calls"):
            _adapt_calls(message, needs, write_calls)
        if message["role"] == TOOL:
            if needs.named_results and "name" not in message and message.get("tool_call_id") in names:
                message["name"] = names[message["tool_call_id"]]
            if needs.nine_ids and "tool_call_id" in message:
                message["tool_call_id"] = nine(message["tool_call_id"])
        if message["role"] in needs.parts and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return adapted


def _adapt_calls(
    message: Message,
    needs: TemplateNeeds,
    write_calls: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str] | None,
) -> None:
    calls = message["tool_calls"]
    if needs.written_calls and write_calls is not None:
        written = write_calls([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        message["content"] = "\n".join(filter(None, (message["content"], written)))
    elif not message["content"]:
        message["content"] = needs.empty_content
    message["tool_calls"] = [_call_for(call, needs) for call in calls]


def _call_for(call: Mapping[str, Any], needs: TemplateNeeds) -> Message:
    function = {**call["function"]}
    if needs.arguments_text and not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "id": nine(call["id"]) if needs.nine_ids else call["id"], "function": function}


def _without_system(messages: list[Message]) -> list[Message]:
    """Prepend the system messages to the first user message."""
    texts = [str(message["content"]) for message in messages if message["role"] == SYSTEM]
    others = [message for message in messages if message["role"] != SYSTEM]
    if not texts:
        return messages
    at = next((at for at, message in enumerate(others) if message["role"] == USER), None)
    if at is None:
        return [{"role": USER, "content": "\n\n".join(texts)}, *others]
    others[at] = {**others[at], "content": "\n\n".join([*texts, str(others[at]["content"])])}
    return others


def _split_content(messages: list[Message]) -> list[Message]:
    adapted: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            adapted.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {name: value for name, value in message.items() if name != "reasoning_content"} | {"content": ""}
        adapted.append(message)
    return adapted


def _single_calls(messages: list[Message]) -> list[Message]:
    """Split calls into messages of their own, each followed by its result."""
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == TOOL}
    adapted: list[Message] = []
    placed: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if id(message) not in placed:
                adapted.append(message)
            continue
        for at, call in enumerate(calls):
            adapted.append({**message, "content": message["content"] if not at else "", "tool_calls": [call]})
            result = results.get(call["id"])
            if result is not None and id(result) not in placed:
                placed.add(id(result))
                adapted.append(result)
    return adapted


def nine(call_id: str) -> str:
    """Return an id of nine letters and digits, derived from `call_id`; a valid one is unchanged."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = int.from_bytes(hashlib.sha256(call_id.encode(errors="surrogatepass")).digest(), "big")
    letters = []
    for _ in range(9):
        digest, at = divmod(digest, len(ALPHABET))
        letters.append(ALPHABET[at])
    return "".join(letters)
