"""/v1/chat/completions: continue a conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvforge.gateway.chat.conversation import CalledArguments, content_text, naming
from kvforge.gateway.chat.tools import AUTO, FUNCTION, NONE, REQUIRED, Choice, Tool, leave_out, not_run
from kvforge.gateway.generate.answer import Piece
from kvforge.gateway.generate.generation import CompleteAnswer, Generation, Submission
from kvforge.gateway.generate.prepare import prepare_conversation
from kvforge.gateway.http.encoding import encode
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.parse.events import Arguments, Content, Event, Reasoning, ToolCall
from kvforge.protocol.errors import InvalidRequest

from . import logprobs, request_body
from .bodies import DONE, EventEncoder, usage_of
from .call import Call
from .fields import check_ignored, requested_shape, sampling_of, stops_of
from .request_body import Chat, Message
from .unimplemented_fields import READ_IF, UNIMPLEMENTED

READER = Reader(Chat, UNIMPLEMENTED, READ_IF)
KIND, CHUNK = "chat.completion", "chat.completion.chunk"
TOOL_CALLS = "tool_calls"


def messages_of(messages: list[Message], model: str | None) -> list[dict[str, Any]]:
    """Return the conversation for a chat template.

    Args:
        messages: The messages of the request.
        model: The name of the model in the request, for errors.

    Raises:
        InvalidRequest: Names the field.
    """
    arguments = CalledArguments()
    with naming(model):
        return [_message(message, f"messages[{at}]", arguments) for at, message in enumerate(messages)]


def _message(message: Message, field: str, arguments: CalledArguments) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    # A refusal stands in place of content.
    content = content_text(message.content, f"{field}.content") or message.refusal or ""
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    if role == "tool":
        if not message.tool_call_id:
            raise InvalidRequest(
                f"{field}.tool_call_id", "is missing: it identifies the call that this result belongs to"
            )
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments.read(call.function.arguments or ""),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def tools_of(tools: Sequence[request_body.Tool], ignored: Ignored) -> list[Tool]:
    """Return the functions among the tools of a request and note others in `ignored`.

    Raises:
        InvalidRequest: Names a malformed tool.
    """
    functions = []
    for at, tool in enumerate(tools):
        if tool.type != FUNCTION:
            leave_out(f"tools[{at}].type", tool.type, ignored)
            continue
        if (function := tool.function) is None:
            raise InvalidRequest(f"tools[{at}].function", "is missing")
        parameters = function.parameters or {"type": "object", "properties": {}}
        places = {"place": f"tools[{at}]", "schema": f"tools[{at}].function.parameters"}
        functions.append(Tool(function.name, function.description or "", parameters, bool(function.strict), **places))
    return functions


def choice_of(chat: Chat) -> Choice:
    """Return which tools may or must be called; none if the request has no tools.

    Raises:
        InvalidRequest: Names `tool_choice`.
    """
    choice, parallel = chat.tool_choice, chat.parallel_tool_calls is not False
    if choice is None:
        return Choice(AUTO if chat.tools else NONE, "", parallel)
    if isinstance(choice, str):
        return Choice(choice, "", parallel)
    if choice.type == "allowed_tools":
        if (allowed := choice.allowed_tools) is None:
            raise InvalidRequest("tool_choice.allowed_tools", "is missing")
        names = frozenset(tool.function.name for tool in allowed.tools if tool.function is not None)
        return Choice(allowed.mode, "", parallel, names)
    if choice.type != FUNCTION:
        raise not_run("tool_choice", choice.type)
    if choice.function is None:
        raise InvalidRequest("tool_choice.function", "is missing")
    return Choice(REQUIRED, choice.function.name, parallel)


class ChatCompletion:
    """One request to /v1/chat/completions."""

    @classmethod
    async def of(cls, call: Call, asked: Chat) -> ChatCompletion:
        """Check a request and render its conversation.

        Raises:
            InvalidRequest: Names the field.
        """
        work = cls(call, asked)
        await work.converse()
        return work

    def __init__(self, call: Call, asked: Chat) -> None:
        check_ignored(asked)
        if asked.add_special_tokens:
            raise InvalidRequest("add_special_tokens", "must be false: the chat template adds special tokens")
        if asked.stream and asked.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "cannot be streamed: it is sent with the complete answer")
        self.call, self.asked = call, asked
        self.shown = self._logprobs()
        self.wanted: list[Submission] = []

    async def converse(self) -> None:
        """Render the conversation and build the submission."""
        call, asked = self.call, self.asked
        variables = dict(asked.chat_template_kwargs or {})
        if asked.reasoning_effort is not None:
            variables["reasoning_effort"] = asked.reasoning_effort
        if asked.continue_final_message and asked.add_generation_prompt:
            problem = "cannot be combined with continue_final_message"
            raise InvalidRequest("add_generation_prompt", problem)
        continued = bool(asked.continue_final_message)
        conversation = await prepare_conversation(
            call.model,
            messages_of(asked.messages, asked.model),
            tools=tools_of(asked.tools or (), call.ignored),
            choice=choice_of(asked),
            shape=requested_shape(asked),
            continued=continued,
            variables=variables,
        )
        prompt = conversation.rendered.ids
        most = asked.max_completion_tokens or asked.max_tokens
        if most is None:
            most = max(1, call.model.info.context_tokens_max - len(prompt))
        call.names.shape = conversation.shape
        if asked.prompt_logprobs is not None:
            logprobs.check_size("prompt_logprobs", len(prompt), asked.prompt_logprobs)
        sampling = sampling_of(asked, self.shown or 0, conversation.shape, asked.prompt_logprobs)
        self.wanted = [
            Submission(
                prompt=prompt,
                options=call.options(sampling, asked, most),
                text=conversation.text,
                count=asked.n or 1,
                stops=stops_of(asked),
                stop_tokens=frozenset(asked.stop_token_ids or ()),
                parser=conversation.parser,
                resume=call.resume,
                ahead=call.settings.ahead_tokens_max,
            )
        ]

    def _logprobs(self) -> int | None:
        """Return how many of the most likely tokens to report; None for no log-probabilities."""
        asked = self.asked
        if not asked.logprobs:
            if asked.top_logprobs:
                raise InvalidRequest("top_logprobs", "requires logprobs: true")
            return None
        return asked.top_logprobs or 0

    async def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the complete response."""
        (generation,) = generations
        answers = await generation.whole()
        name = self.call.name("chatcmpl", generations)
        prompt = self.wanted[0].prompt.tolist()
        more: dict[str, Any] = {"prompt_token_ids": prompt} if self.asked.return_token_ids else {}
        scored, width = generation.answers[0].stream.prompt_logprobs, self.asked.prompt_logprobs
        if scored is not None and width is not None:
            more["prompt_logprobs"] = await logprobs.of_prompt(self.call.model.prompts, prompt, scored, width)
        return encode(
            {
                "id": name,
                "object": KIND,
                "created": int(time.time()),
                "model": self.call.model_name,
                "choices": [self._choice(answer, name) for answer in answers],
                "usage": usage_of(generation.usage),
                **more,
            }
        )

    def _choice(self, answer: CompleteAnswer, name: str) -> dict[str, Any]:
        message = message_of(self.shown_of(answer.events), f"{name}-{answer.index}")
        called = TOOL_CALLS in message
        choice: dict[str, Any] = {
            "index": answer.index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason(answer.reason, called),
        }
        if self.shown is not None:
            end = len(answer.stream.tokens)
            choice["logprobs"] = logprobs.of_chat(self.call.model.prompts, answer.stream, 0, end)
        if self.asked.return_token_ids:
            choice["token_ids"] = list(answer.stream.tokens)
        return choice

    def shown_of(self, events: list[Event]) -> list[Event]:
        """Return the events without reasoning, if the client does not want it."""
        if self.asked.include_reasoning is not False:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def events(self, generations: list[Generation]) -> ChatEvents:
        """Return the response as a stream of events."""
        return ChatEvents(self, generations[0])


class ChatEvents:
    """The events of a streamed response; pieces that arrive together are one write."""

    def __init__(self, chat: ChatCompletion, generation: Generation) -> None:
        call, options = chat.call, chat.asked.stream_options
        self._chat, self._generation = chat, generation
        self._name = call.name("chatcmpl", [generation])
        count = len(generation.answers)
        self._usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        self._events = EventEncoder(
            self._name,
            CHUNK,
            int(time.time()),
            call.model_name,
            usage_null=self._usage,
            numbered=call.numbered and count == 1,
            counted=len(chat.wanted[0].prompt) if continuous else None,
        )
        self._plain = chat.shown is None and not chat.asked.return_token_ids
        self._called = [False] * count
        self._begun = bool(call.resume)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._generation.over

    def pop_events(self) -> bytes:
        """Return the events since the last call."""
        events, written = self._events, []
        if not self._begun:
            self._begun = True
            roles = {"role": "assistant", "content": ""}
            prompt = self._chat.wanted[0].prompt.tolist() if self._chat.asked.return_token_ids else None
            choices = [_delta(index, roles) for index in range(len(self._called))]
            written += [events.choice(choice, prompt_ids=None if at else prompt) for at, choice in enumerate(choices)]
        for piece in self._generation.pop_pieces():
            if self._plain and not piece.reason and len(piece.events) == 1 and isinstance(piece.events[0], Content):
                written.append(events.text(piece.index, piece.events[0].text, piece.end))
            else:
                written += self._chunks(piece)
        if self._generation.over:
            written.append((events.usage(self._generation.usage) if self._usage else b"") + DONE)
        return written[0] if len(written) == 1 else b"".join(written)

    def _chunks(self, piece: Piece) -> list[bytes]:
        """Encode a piece that is more than text: one event for each kind, the first with the data of its tokens."""
        chat = self._chat
        deltas = [delta_of(event, f"{self._name}-{piece.index}") for event in chat.shown_of(piece.events)]
        self._called[piece.index] |= any(TOOL_CALLS in delta for delta in deltas)
        if not deltas and (piece.reason or not self._plain):
            deltas = [{}]
        choices = [_delta(piece.index, delta) for delta in deltas]
        if choices:
            stream = self._generation.answers[piece.index].stream
            end = min(piece.end, len(stream.tokens))
            if chat.shown is not None:
                choices[0]["logprobs"] = logprobs.of_chat(chat.call.model.prompts, stream, piece.start, end)
            if chat.asked.return_token_ids:
                choices[0]["token_ids"] = list(stream.tokens[piece.start : end])
            if piece.reason:
                # In an event of its own, as OpenAI sends it.
                if choices[-1]["delta"]:
                    choices.append(_delta(piece.index, {}))
                choices[-1]["finish_reason"] = finish_reason(piece.reason, self._called[piece.index])
        return [self._events.choice(choice, piece.end) for choice in choices]


def finish_reason(reason: str, called: bool) -> str:
    """Return why an answer ended; "tool_calls" if it stopped after tool calls."""
    return TOOL_CALLS if called and reason == "stop" else reason


def message_of(events: list[Event], name: str) -> dict[str, Any]:
    """Build the message of a complete answer. The ids of its calls derive from `name` if the format has none."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCall):
            calls.append(
                {
                    "id": call_id(event, name),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            )
        elif isinstance(event, Arguments):
            calls[event.index]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message[TOOL_CALLS] = calls
    return message


def delta_of(event: Event, name: str) -> dict[str, Any]:
    """Convert an event to a message delta."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCall):
        function = {"name": event.name, "arguments": ""}
        return {
            TOOL_CALLS: [{"index": event.index, "id": call_id(event, name), "type": "function", "function": function}]
        }
    return {TOOL_CALLS: [{"index": event.index, "function": {"arguments": event.text}}]}


def call_id(call: ToolCall, name: str) -> str:
    """Return the id of a call: the model's own, or one that stays the same when the answer is read again."""
    return call.call_id or f"call-{name}-{call.index}"


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
