"""What is asked of /v1/messages, as Anthropic's reference has it.

Fields of these structures that have no effect are in `IGNORED`, known fields that no structure has are in `known.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvforge.client.arguments import PRIORITY_MAX

IGNORED = {
    "metadata": "a label of the caller's own: nothing is kept about users",
    "service_tier": "there is one",
    "cache_control": "prefixes are found by what they hold, wherever they end",
    "citations": "`null` or disabled is how it is",
    "thinking.budget_tokens": "how long a model thinks is its own; max_tokens bounds it",
    "inference_geo": "it is computed where this service runs",
    "caller": "calls come from the model alone",
    "eager_input_streaming": "arguments are streamed as they come",
    "input_examples": "chat templates have no place for examples of a tool: write them into its description",
    "is_error": "chat templates have no place for it: the text of a result shows that a call failed",
    "data": "redacted thinking can be read by its provider alone: it is not given to the model",
    "signature": "thinking that is sent back is not verified",
    "thinking.display": "thinking is given as it is",
}
CUSTOM = "custom"
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
    """A message of a conversation. clear_at: how long one of the system's is read."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of type `custom`, or with no type: the caller runs it. Tools of other types are left out."""

    name: str = ""
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


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edit that shortens a conversation. keep: the thinking that `clear_thinking_20251015` keeps."""

    type: str
    keep: Any = None
    trigger: Any = None
    clear_at_least: Any = None
    clear_tool_inputs: Any = None
    exclude_tools: Any = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The edits of a conversation before the model reads it."""

    edits: list[Edit] | None = None


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
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's


class Create(Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # vLLM's
    cache_salt: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    # without effect
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
