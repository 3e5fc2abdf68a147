"""The request bodies of /v1/messages, as in Anthropic's reference.

`IGNORED` lists fields of these structures without effect; `known.py` lists known fields that no structure has.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvforge.client.arguments import PRIORITY_MAX

IGNORED = {
    "metadata": "a label for the caller; no user data is stored",
    "service_tier": "there is only one tier",
    "cache_control": "prefix caching is automatic and based on content; `ttl` pins a prefix",
    "citations": "only `null` or disabled is accepted",
    "thinking.budget_tokens": "thinking has no budget of its own; max_tokens bounds it",
    "inference_geo": "inference runs where this service runs",
    "caller": "only the model makes calls",
    "eager_input_streaming": "arguments are always streamed",
    "input_examples": "chat templates cannot express examples: write them into the tool's description",
    "is_error": "chat templates cannot express it: say in the result that the call failed",
    "data": "only its provider can decrypt redacted thinking; not given to the model",
    "signature": "returned thinking is not verified",
    "thinking.display": "thinking is always returned in full",
}
CUSTOM = "custom"
Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A content block of a message. Its type determines which fields it has."""

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
    """A message of a conversation. `clear_at` limits how long a system message stays visible."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of type `custom` or without a type, which the caller runs. Tools of other types are ignored."""

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
    """Whether the model thinks first, if its chat template has such a switch."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The output format of an answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The output settings. `effort` is the reasoning effort, if the chat template has such a setting."""

    effort: str | None = None
    format: Format | None = None


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edit that shortens a conversation. `keep` is what `clear_thinking_20251015` keeps."""

    type: str
    keep: Any = None
    trigger: Any = None
    clear_at_least: Any = None
    clear_tool_inputs: Any = None
    exclude_tools: Any = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Edits of a conversation before the model reads it."""

    edits: list[Edit] | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/messages/count_tokens, which /v1/messages extends."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM extension


class Create(Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # vLLM extensions
    cache_salt: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    # without effect
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
