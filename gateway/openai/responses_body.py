"""The request body of /v1/responses, as in OpenAI's reference, and its conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from kvforge.gateway.chat.conversation import CalledArguments, content_text, naming
from kvforge.gateway.chat.shapes import ANY, Shape
from kvforge.protocol.errors import InvalidRequest

from .request_body import Part, Tokens
from .shapes import JsonSchema, ResponseFormat, StructuredOutputs, shape_of

# Fields without effect in addition to those of chat, with the reason.
IGNORED = {
    "include": "no further data exists; log-probabilities are refused",
    "reasoning.summary": "reasoning is always returned in full",
    "text.format.description": "not given to the model; the schema is enforced",
    "text.format.name": "not given to the model; the schema is enforced",
    "text.verbosity": "not given to the model",
    "truncation": "a conversation that exceeds the context is refused",
    "input[].summary": "the text of a reasoning item is its `content`; a `summary` is not given to the model",
    "input[].encrypted_content": "only its provider can decrypt it: send the `content` of reasoning",
    "input[].id": "not given to the model; it is the item's id where the response is stored",
    "input[].phase": "not given to the model",
    "input[].status": "the status of an item is not used",
    "stream_options": "events are not padded",
}


LOGPROBS = "message.output_text.logprobs"


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item of a conversation. Its type determines which fields it has; without a type it is a message."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call, or a namespace with functions in `tools`.

    Tools of other types are ignored.
    """

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[FunctionTool] | None = None


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool type and the name of a function."""

    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None


class ToolChoice(NamedTool, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool that must be called, or with the type `allowed_tools` those that may be."""

    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a stream. `include_obfuscation` has no effect."""

    include_obfuscation: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The output format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reasoning settings. `effort` is passed to the chat template if it has such a setting."""

    effort: str | None = None
    summary: str | None = None


class ConversationRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation by its id."""

    id: str


class Create(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/responses. `conversation` is an id, or an object with it."""

    input: str | list[Item] | None = None
    model: str = ""
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    store: bool | None = None
    background: bool | None = None
    # vLLM extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # without effect
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    truncation: str | None = None

    @property
    def conversation_id(self) -> str:
        """The id of the conversation, or ""."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation or ""


NOT_STORED = "this gateway stores nothing ([storage] url in gateway.toml)"


def check(asked: Create, *, stores: bool) -> None:
    """Refuse features that are not supported, or need stored responses.

    Args:
        asked: The request.
        stores: Whether the gateway has a storage.

    Raises:
        InvalidRequest: Names the field.
    """
    if not stores:
        for name in ("previous_response_id", "conversation"):
            if getattr(asked, name) is not None:
                raise InvalidRequest(name, f"{NOT_STORED}: send the conversation so far as `input`")
        if asked.background:
            raise InvalidRequest("background", f"must be false: {NOT_STORED}")
    if asked.background and asked.store is False:
        raise InvalidRequest("background", "needs `store`: a background response is fetched by its id")
    if asked.input is None and asked.previous_response_id is None and not asked.conversation_id:
        raise InvalidRequest("input", "is missing")
    for at, name in enumerate(asked.include or ()):
        if name == LOGPROBS:
            raise InvalidRequest(f"include[{at}]", "is not supported: use /v1/chat/completions with logprobs")


def messages_of(
    asked: Create, shown: Callable[[str, str], str], before: Sequence[Item] = (), field: str = "conversation"
) -> list[dict[str, Any]]:
    """Return the conversation for a chat template.

    Args:
        asked: The request.
        shown: Maps a namespace and a function name to the name that the model sees.
        before: The stored items before those of the request.
        field: The field that names what is stored.

    Raises:
        InvalidRequest: Names the field.
    """
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    arguments = CalledArguments()
    with naming(asked.model):
        for item in before:
            _item(item, field, messages, shown, arguments)
        if isinstance(asked.input, str):
            return [*messages, {"role": "user", "content": asked.input}]
        for at, item in enumerate(asked.input or ()):
            _item(item, f"input[{at}]", messages, shown, arguments)
    return messages


def _item(
    item: Item,
    field: str,
    messages: list[dict[str, Any]],
    shown: Callable[[str, str], str],
    arguments: CalledArguments,
) -> None:
    if item.type == "message":
        if item.role is None:
            raise InvalidRequest(f"{field}.role", "is missing")
        role = "system" if item.role == "developer" else item.role
        content = content_text(item.content, f"{field}.content")
        reasoned = bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}
        if role == "assistant" and reasoned and not messages[-1]["content"]:
            messages[-1]["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif item.type == "function_call":
        name, call_id = _needed(item.name, f"{field}.name"), _needed(item.call_id, f"{field}.call_id")
        name = shown(item.namespace or "", name)
        function = {"name": name, "arguments": arguments.read(item.arguments or "")}
        call = {"id": call_id, "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        call_id = _needed(item.call_id, f"{field}.call_id")
        messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": content_text(item.output, f"{field}.output")}
        )
    elif item.type == "reasoning":
        text = content_text(item.content, f"{field}.content")
        if text:
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    else:
        raise InvalidRequest(
            f"{field}.type", f"is {item.type!r} (expected message, reasoning, function_call or function_call_output)"
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message under construction."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def shape(asked: Create) -> Shape:
    """Return the output constraint.

    Raises:
        InvalidRequest: Names the field.
    """
    wanted = asked.text.format if asked.text is not None else None
    if asked.structured_outputs is not None and (wanted is None or wanted.type == "text"):
        return shape_of(None, asked.structured_outputs)
    if wanted is None:
        return ANY
    if asked.structured_outputs is not None:
        raise InvalidRequest("structured_outputs", "cannot be combined with text.format")
    if wanted.type == "json_schema" and wanted.schema is None:
        raise InvalidRequest("text.format.schema", "is missing")
    schema = JsonSchema(schema=wanted.schema) if wanted.type == "json_schema" else None
    found = shape_of(ResponseFormat(wanted.type, schema), None)
    field = "text.format.schema" if wanted.type == "json_schema" else "text.format"
    return Shape(found.name, found.value, field) if found.name else ANY


def _needed(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequest(field, "is missing")
    return value
