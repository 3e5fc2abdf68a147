"""A conversation to what is asked of the coordinator: prompt, parser of the answer, and what tokens may follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat.prompts import Rendered
from gateway.chat.tools import Choice, Tool, checked
from kvforge.text.tokenizer import TextStream

from .answer import Parser
from .service import Model


@dataclass(frozen=True, slots=True)
class Conversing:
    """text, parser: make a new one for each answer."""

    rendered: Rendered
    text: Callable[[], TextStream]
    parser: Callable[[], Parser] | None


def conversing(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Tool] = (),
    choice: Choice | None = None,
    continued: bool = False,
    told: Mapping[str, Any] | None = None,
) -> Conversing:
    """Raises InvalidRequest naming `messages`, `tools`, `tool_choice` or `chat_template_kwargs`."""
    choice = choice or Choice()
    offered = checked(tools, choice)
    rendered = model.prompts.chat(messages, tools=[tool.plain() for tool in offered], continued=continued, told=told)
    return Conversing(rendered, lambda: model.prompts.stream(continues=continued), None)
