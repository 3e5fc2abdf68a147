"""/v1/messages: from a request to its submission, and the answer as a whole or as events."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvforge import SamplingParams
from kvforge.client.arguments import stop_strings
from kvforge.client.options import RequestOptions
from kvforge.gateway.access import Caller
from kvforge.gateway.chat.arguments import ObjectText, object_of
from kvforge.gateway.chat.naming import Names
from kvforge.gateway.chat.shapes import ANY, Shape
from kvforge.gateway.chat.tools import checked
from kvforge.gateway.generate.answer import Piece
from kvforge.gateway.generate.generation import Generation, Submission, Usage
from kvforge.gateway.generate.prepare import PreparedConversation, prepare_conversation
from kvforge.gateway.generate.service import Model
from kvforge.gateway.http.encoding import encode
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.parse.events import Arguments, Content, Event, Reasoning, ToolCall
from kvforge.protocol.messages import SAMPLING_RANGES, Int32Array

from .conversation import choice_of, messages_of, tools_of
from .pins import cache_creation, pins_of
from .request_body import Conversation, Create
from .unimplemented_fields import READ_IF, UNIMPLEMENTED

CREATE, COUNT = Reader(Create, UNIMPLEMENTED, READ_IF), Reader(Conversation, UNIMPLEMENTED, READ_IF)
TOP_P_MIN = SAMPLING_RANGES["top_p"][0]
TOOL_USE = "tool_use"


def _variables(asked: Conversation) -> dict[str, Any]:
    """Return the variables of the chat template."""
    variables: dict[str, Any] = dict(asked.chat_template_kwargs or {})
    if asked.thinking is not None:
        variables["enable_thinking"] = asked.thinking.type != "disabled"
    if asked.output_config is not None and asked.output_config.effort is not None:
        variables["reasoning_effort"] = asked.output_config.effort
    return variables


async def conversation_of(asked: Conversation, model: Model, ignored: Ignored) -> PreparedConversation:
    """Prepare the conversation of a request and note ignored tools in `ignored`.

    Raises:
        InvalidRequest: Names the field.
    """
    messages = messages_of(asked)
    # As in Anthropic's API, a final assistant message is continued.
    continued = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if continued and not messages[-1]["content"]:
        continued = False  # there is nothing to continue
        del messages[-1]
    tools, choice = tools_of(asked, ignored), choice_of(asked)
    format_ = asked.output_config.format if asked.output_config is not None else None
    shape = ANY if format_ is None else Shape("json_schema", format_.schema, "output_config.format.schema")
    return await prepare_conversation(
        model, messages, tools=tools, choice=choice, shape=shape, continued=continued, variables=_variables(asked)
    )


async def _rendered(model: Model, asked: Conversation) -> Int32Array:
    """Return a conversation up to the end of its last message, as tokens."""
    offered = [tool.plain() for tool in checked(tools_of(asked, Ignored()), choice_of(asked))]
    found = await model.prompts.chat(messages_of(asked), tools=offered, opened=False, variables=_variables(asked))
    return found.ids


def names_of() -> Names:
    """Return the names of a request's fields."""
    return Names({"prompt": "messages", "stop": "stop_sequences"})


async def wanted_of(
    asked: Create, model: Model, caller: Caller, key: str, ignored: Ignored, names: Names
) -> Submission:
    """Return the submission of a request.

    Raises:
        InvalidRequest: Names the field, for `names` to rename.
    """
    conversation = await conversation_of(asked, model, ignored)
    names.shape = conversation.shape
    top_p = TOP_P_MIN if asked.top_p == 0 else asked.top_p
    named = {
        "temperature": asked.temperature,
        "top_p": top_p,
        "top_k": None if asked.top_k is None else max(asked.top_k, 0),
    }
    sampling = SamplingParams(**named, **conversation.shape.named)  # type: ignore[arg-type]
    options = RequestOptions(
        max_tokens=asked.max_tokens,
        sampling=sampling,
        tenant=caller.tenant,
        cache_salt=caller.tenant_salt(asked.cache_salt or ""),
        priority=caller.check_priority(asked.priority or 0),
        detached=bool(key),
        idempotency_key=key,
        pins=await pins_of(asked, conversation.rendered.ids, partial(_rendered, model)),
    )
    stops = stop_strings(asked.stop_sequences or ())
    return Submission(
        prompt=conversation.rendered.ids,
        options=options,
        text=conversation.text,
        stops=stops,
        parser=conversation.parser,
    )


def usage_of(usage: Usage, created: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the token counts. As in Anthropic's API, `input_tokens` excludes cached and pinned tokens.

    Args:
        usage: The counts.
        created: The pinned tokens by their time to live; None if the request pins nothing.
    """
    pinned = sum((created or {}).values())
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt - usage.cached - pinned,
        "cache_creation_input_tokens": pinned,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
    return counts if created is None else {**counts, "cache_creation": created}


def final_usage(generation: Generation) -> dict[str, Any]:
    """Return the token counts of an answer that has ended."""
    pins = generation.pins
    return usage_of(generation.usage, cache_creation(pins, generation.answers[0].stream.ended) if pins else None)


def stop_reason(reason: str, stopped_by: str, called: bool) -> str:
    """Return why an answer ended, in Anthropic's terms."""
    if reason == "length":
        return "max_tokens"
    if stopped_by:
        return "stop_sequence"
    return "tool_use" if called else "end_turn"


def name_of(generation: Generation) -> str:
    """Return the id of a message, which stays the same when the message is read again."""
    return f"msg_{generation.request_id:016x}"


def call_id(event: ToolCall, name: str) -> str:
    """Return the id of a call: the model's own, or one that stays the same when the answer is read again."""
    return event.call_id or f"toolu_{name}_{event.index}"


async def whole(generation: Generation, model_name: str) -> bytes:
    """Return the body of a complete answer."""
    (answer,) = await generation.whole()
    name = name_of(generation)
    content: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for event in answer.events:
        if isinstance(event, Content):
            content.append({"type": "text", "text": event.text})
        elif isinstance(event, Reasoning):
            content.append({"type": "thinking", "thinking": event.text, "signature": ""})
        elif isinstance(event, ToolCall):
            content.append({"type": "tool_use", "id": call_id(event, name), "name": event.name, "input": event.index})
        else:
            arguments[event.index] = arguments.get(event.index, "") + event.text
    for block in content:
        if block["type"] == TOOL_USE:
            block["input"] = object_of(arguments.get(block["input"], ""))
    called = any(block["type"] == TOOL_USE for block in content)
    return encode(
        {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": model_name,
            "content": content,
            "stop_reason": stop_reason(answer.reason, answer.stopped_by, called),
            "stop_sequence": answer.stopped_by or None,
            "usage": final_usage(generation),
        }
    )


class MessageEvents:
    """The events of a streamed answer; pieces that arrive together are one write."""

    def __init__(self, generation: Generation, model_name: str, prompt_tokens: int) -> None:
        self._generation, self._model_name, self._prompt_tokens = generation, model_name, prompt_tokens
        self._name = name_of(generation)
        self._begun = False
        self._block = -1
        self._kind = ""
        self._called = False
        self._arguments = ObjectText()

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._generation.over

    def pop_events(self) -> bytes:
        """Return the events since the last call."""
        written: list[bytes] = []
        if not self._begun:
            self._begun = True
            written.append(self._start())
        for piece in self._generation.pop_pieces():
            self._piece(piece, written)
        return written[0] if len(written) == 1 else b"".join(written)

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(Usage(self._prompt_tokens, 0, 0, 0)),
        }
        return event("message_start", message=message)

    def _piece(self, piece: Piece, written: list[bytes]) -> None:
        for came in piece.events:
            self._event(came, written)
        if piece.reason:
            self._close(written)
            stopped_by = self._generation.answers[0].stopped_by
            delta = {
                "stop_reason": stop_reason(piece.reason, stopped_by, self._called),
                "stop_sequence": stopped_by or None,
            }
            written.append(event("message_delta", delta=delta, usage=final_usage(self._generation)))
            written.append(event("message_stop"))

    def _event(self, came: Event, written: list[bytes]) -> None:
        if isinstance(came, ToolCall):
            self._called = True
            self._arguments = ObjectText()
            block = {"type": "tool_use", "id": call_id(came, self._name), "name": came.name, "input": {}}
            self._open(TOOL_USE, block, written)
        elif isinstance(came, Arguments):
            self._input(self._arguments.feed(came.text), written)
        elif isinstance(came, Reasoning):
            if self._kind != "thinking":
                self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""}, written)
            self._delta({"type": "thinking_delta", "thinking": came.text}, written)
        else:
            if self._kind != "text":
                self._open("text", {"type": "text", "text": ""}, written)
            self._delta({"type": "text_delta", "text": came.text}, written)

    def _open(self, kind: str, block: dict[str, Any], written: list[bytes]) -> None:
        self._close(written)
        self._block += 1
        self._kind = kind
        written.append(event("content_block_start", index=self._block, content_block=block))

    def _close(self, written: list[bytes]) -> None:
        if self._kind:
            if self._kind == TOOL_USE:
                self._input(self._arguments.finish(), written)
            self._kind = ""
            written.append(event("content_block_stop", index=self._block))

    def _input(self, text: str, written: list[bytes]) -> None:
        if text:
            self._delta({"type": "input_json_delta", "partial_json": text}, written)

    def _delta(self, delta: dict[str, Any], written: list[bytes]) -> None:
        written.append(event("content_block_delta", index=self._block, delta=delta))


def event(kind: str, **fields: Any) -> bytes:
    """Encode one server-sent event of Anthropic's API."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
