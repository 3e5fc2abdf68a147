"""A conversation to what is asked of the coordinator: prompt, parser of the answer, and what tokens may follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.chat.prompts import Rendered
from gateway.chat.tools import Choice, Tool, checked
from gateway.parse import Parser
from kvforge.text.tokenizer import TextStream

from . import answer
from .service import Model


@dataclass(frozen=True, slots=True)
class Conversing:
    """text, parser: make a new one for each answer."""

    rendered: Rendered
    text: Callable[[], TextStream]
    parser: Callable[[], answer.Parser] | None


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
    format_ = model.format
    schemas = {tool.name: tool.parameters for tool in offered} if offered else None
    if schemas is None and not format_.think[1] and format_.answer is None:
        return Conversing(rendered, partial(model.prompts.stream, continues=continued), None)
    in_reasoning = format_.starts_in_reasoning(rendered.text)
    return Conversing(
        rendered,
        partial(model.prompts.stream, continues=continued, keep=format_.special_tokens),
        partial(Parser, format_, schemas, in_reasoning=in_reasoning),
    )
