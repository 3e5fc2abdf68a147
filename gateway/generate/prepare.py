"""From a conversation to its submission: the prompt, the parser of the answer and the grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvforge.gateway.chat.prompts import Rendered
from kvforge.gateway.chat.shapes import ANY, Shape
from kvforge.gateway.chat.tools import REQUIRED, Choice, Tool, checked
from kvforge.gateway.parse import Parser
from kvforge.gateway.parse.grammars import WRITTEN, Shaped, after_reasoning, calls_grammar, schema_grammar
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Grammar
from kvforge.text.grammar import check
from kvforge.text.tokenizer import TextStream

from . import answer
from .service import Model
from .shape_checks import check_shape


@dataclass(frozen=True, slots=True)
class PreparedConversation:
    """A prepared conversation.

    Attributes:
        rendered: The prompt.
        text: Factory of the detokenizer, called for each answer.
        parser: Factory of the parser, called for each answer; None if all text is content.
        shape: The output constraint: the request's own, or the grammar of the tool calls.
    """

    rendered: Rendered
    text: Callable[[], TextStream]
    parser: Callable[[], answer.Parser] | None
    shape: Shape


async def prepare_conversation(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Tool] = (),
    choice: Choice | None = None,
    shape: Shape = ANY,
    continued: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> PreparedConversation:
    """Render a conversation and prepare the parsing of its answer.

    Raises:
        InvalidRequest: Names `messages`, `tools`, `tool_choice`, `chat_template_kwargs` or the field of the shape.
    """
    choice = choice or Choice()
    offered = checked(tools, choice)
    plain = [tool.plain() for tool in offered]
    model.prompts.check(messages, plain)
    if offered and not model.format.has_calls:
        problem = f"unknown tool call format of this model (detected: {model.format.name!r})"
        raise InvalidRequest("tools", f"{problem}; set tool_format in gateway.toml")
    rendered = await model.prompts.chat(messages, tools=plain, continued=continued, variables=variables)
    format_ = model.format
    in_reasoning = format_.starts_in_reasoning(rendered.ending)
    if shape.name or offered:
        shape = await _shape(model, offered, choice, shape, in_reasoning)
        await check_shape(model.prompts, shape)
    text, parser = reading_of(model, offered, rendered.ending, continued=continued)
    return PreparedConversation(rendered, text, parser, shape)


def reading_of(
    model: Model, tools: Sequence[Tool], ending: str, *, continued: bool = False
) -> tuple[Callable[[], TextStream], Callable[[], answer.Parser] | None]:
    """Return what reads the answer to a prompt.

    Args:
        model: The model.
        tools: The tools that were offered.
        ending: The end of the prompt's text, as `Rendered` has it.
        continued: The answer continues the last message.

    Returns:
        The factories of the detokenizer, and of the parser, or None if all text is content.
    """
    format_ = model.format
    schemas = {tool.name: tool.parameters for tool in tools} if tools else None
    if schemas is None and not format_.think[1] and format_.answer is None:
        return partial(model.prompts.stream, continues=continued), None
    parser = partial(Parser, format_, schemas, in_reasoning=format_.starts_in_reasoning(ending))
    return partial(model.prompts.stream, continues=continued, keep=format_.special_tokens), parser


async def _shape(model: Model, offered: Sequence[Tool], choice: Choice, shape: Shape, in_reasoning: bool) -> Shape:
    special = model.prompts.special_tokens
    must, strict = choice.kind == REQUIRED, [tool.name for tool in offered if tool.strict]
    if offered and must:
        shape = ANY  # it constrains text beside tool calls, and there is none
    shaped: Shaped | None = None
    if shape.name and (offered or in_reasoning):
        await check_shape(model.prompts, shape)
        shaped = _shaped(shape, tools=bool(offered))
    if offered and (must or strict or not choice.parallel or shaped is not None):
        if shaped is not None and model.format.name not in WRITTEN:
            problem = f"cannot be enforced together with tools in this model's format, {model.format.name}"
            raise InvalidRequest(shape.field, f"{problem}: give only one")
        called = [tool for tool in offered if choice.name in ("", tool.name)]
        try:
            for tool in called:
                await model.prompts.check_shape(schema_grammar(tool.parameters), f"tools.{tool.name}.parameters")
            text = calls_grammar(
                model.format,
                {tool.name: tool.parameters for tool in called},
                special=special,
                must=must,
                parallel=choice.parallel and not choice.name,
                in_reasoning=in_reasoning,
                strict=strict,
                otherwise=shaped,
            )
        except InvalidRequest as error:
            raise _of_tool(error, offered) from None
        return Shape("grammar", text, "tools")
    if shaped is None:
        return shape
    return Shape("grammar", after_reasoning(model.format, special, shaped), shape.field)


def _of_tool(error: InvalidRequest, offered: Sequence[Tool]) -> InvalidRequest:
    """Return the error with the field of the tool's schema as the request has it."""
    for tool in offered:
        field = f"tools.{tool.name}.parameters"
        if error.field == field and tool.schema:
            return InvalidRequest(tool.schema, error.message.removeprefix(f"{field}: "))
    return error


def _shaped(shape: Shape, *, tools: bool) -> Shaped:
    """Return the shape as part of a larger grammar. Raises InvalidRequest naming its field."""
    if shape.name == "grammar":
        beside = "together with tools; give only one" if tools else "behind reasoning; turn that off"
        raise InvalidRequest(shape.field, f"cannot be enforced {beside}, or use JSON or a regex")
    text = shape.value if isinstance(shape.value, str) else json.dumps(shape.value)
    if shape.name == "json_schema":
        check(Grammar(kind="json_schema", text=text), shape.field)
    return Shaped(shape.name, text)
