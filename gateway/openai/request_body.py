"""The request bodies of /v1/completions and /v1/chat/completions, as in OpenAI's reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from .fields import LOGPROBS_MAX, Common

# Fields of messages and tools without effect, with the reason.
IGNORED = {
    "content[].cache_control": "prefix caching is automatic and based on content",
    "messages[].annotations": "only the text reaches the model",
    "tools[].cache_control": "prefix caching is automatic and based on content",
}
Tokens = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]


class Completion(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions."""

    # One text, several texts, token ids, or several lists of token ids.
    prompt: str | list[str | int | list[int]]
    # 0: only the log-probabilities of the prompt.
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    suffix: str | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content. Only text parts are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    audio_url: Any = None
    file: Any = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function name and the JSON text of its arguments."""

    name: str
    arguments: str | dict[str, Any] | None = ""


class Called(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the model made."""

    function: CalledFunction
    id: str | None = ""
    type: Literal["function"] | None = "function"
    index: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a conversation. Fields of an answer may be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call.

    Attributes:
        name: Its name.
        description: What it does, for the model.
        parameters: The JSON schema of its arguments.
        strict: Whether the schema is enforced.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call. Tools of other types are ignored."""

    function: Function | None = None
    type: str = "function"
    cache_control: dict[str, Any] | None = None


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool type and the name of a function."""

    function: NamedFunction | None = None
    type: str = "function"


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tools that may be called, or must be with the mode `required`."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(NamedTool, frozen=True, forbid_unknown_fields=True):
    """A tool that must be called, or with the type `allowed_tools` those that may be."""

    allowed_tools: AllowedTools | None = None


class Chat(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
