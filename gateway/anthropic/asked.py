"""What is asked of /v1/messages, as Anthropic's reference has it.

A field that is not in a struct here is refused by its name. What is accepted and has no effect is in `IGNORED`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

IGNORED = {
    "metadata": "a label of the caller's own: nothing is kept about users",
    "service_tier": "there is one",
    "cache_control": "prefixes are found by what they hold, wherever they end",
    "citations": "`null` or disabled is how it is",
    "thinking.budget_tokens": "how long a model thinks is its own; max_tokens bounds it",
    "context_management": "`null` is how it is",
    "container": "`null` is how it is",
    "inference_geo": "it is computed where this service runs",
    "speed": "there is one",
    "user_profile_id": "a label of the caller's own",
    "workspace_id": "a label of the caller's own",
    "diagnostics": "`null` is how it is",
}
Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message. Which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    citations: Any = None
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of the caller's. type: "custom" or nothing: those that Anthropic runs itself are not here."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tools may or must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model is told to think first, where its chat template can be told."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """effort: how much a model thinks, where its chat template can be told."""

    effort: str | None = None
    format: Format | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/messages/count_tokens, and what /v1/messages has of it."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: None = None


class Create(Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/messages."""

    max_tokens: Count
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: None = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    diagnostics: None = None
