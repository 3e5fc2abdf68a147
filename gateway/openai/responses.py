"""/v1/responses: continue a conversation, answered in items. Responses are not stored."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvforge import SamplingParams
from kvforge.gateway.chat.shapes import Shape
from kvforge.gateway.generate.answer import Piece
from kvforge.gateway.generate.generation import Generation, Submission, Usage
from kvforge.gateway.generate.prepare import prepare_conversation
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.parse.events import Arguments, Event, Reasoning, ToolCall

from .bodies import encode
from .call import Call
from .fields import top_k_of, top_p_of
from .known import KNOWN, MINE
from .responses_body import Create, check, messages_of, shape
from .responses_tools import Offered, echoed

READER = Reader(Create, KNOWN, MINE)


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the token counts."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


class Responses:
    """One request to /v1/responses."""

    @classmethod
    async def of(cls, call: Call, asked: Create) -> Responses:
        """Check a request and render its conversation.

        Raises:
            InvalidRequest: Names the field.
        """
        work = cls(call, asked)
        await work.converse()
        return work

    def __init__(self, call: Call, asked: Create) -> None:
        check(asked)
        self.call, self.asked = call, asked
        self.created = int(time.time())
        self.wanted: list[Submission] = []

    async def converse(self) -> None:
        """Render the conversation and build the submission."""
        call, asked = self.call, self.asked
        effort = asked.reasoning.effort if asked.reasoning is not None else None
        variables = dict(asked.chat_template_kwargs or {})
        if effort is not None:
            variables["reasoning_effort"] = effort
        self.offered = Offered(asked, call.ignored)
        conversation = await prepare_conversation(
            call.model,
            messages_of(asked, self.offered.shown),
            tools=self.offered.tools,
            choice=self.offered.choice(asked),
            shape=shape(asked),
            told=variables,
        )
        prompt = conversation.rendered.ids
        most = asked.max_output_tokens or max(1, call.model.info.context_tokens_max - len(prompt))
        call.names.shape = conversation.shape
        options = call.options(self._sampling(conversation.shape), asked, most)
        self.wanted = [Submission(prompt=prompt, options=options, text=conversation.text, parser=conversation.parser)]

    def _sampling(self, wanted: Shape) -> SamplingParams:
        asked = self.asked
        fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        named = {name: value for name in fields if (value := getattr(asked, name)) is not None}
        if asked.top_p is not None:
            named["top_p"] = top_p_of(asked.top_p)
        if asked.top_k is not None:
            named["top_k"] = top_k_of(asked.top_k)
        sampling = SamplingParams(**named, **wanted.named)
        sampling.message()
        return sampling

    def body(self, generation: Generation, output: list[dict[str, Any]], reason: str = "") -> dict[str, Any]:
        """Build the response. `reason` is why it ended; "" while it continues."""
        asked = self.asked
        status = {"": "in_progress", "length": "incomplete"}.get(reason, "completed")
        return {
            "id": self.call.name("resp", [generation]),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.call.model_name,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning is not None else None, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": msgspec.to_builtins(asked.text.format) if asked.text and asked.text.format else _PLAIN},
            "tool_choice": msgspec.to_builtins(asked.tool_choice) if asked.tool_choice is not None else "auto",
            "tools": echoed(asked.tools),
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage_of(generation.usage) if reason else None,
            "user": asked.user,
            "metadata": asked.metadata or {},
        }

    async def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the complete response."""
        (generation,) = generations
        (answer,) = await generation.whole()
        items = Items(self.call.name("", generations), self.offered.name_of)
        for event in answer.events:
            items.add(event)
        items.close(answer.reason)
        return encode(self.body(generation, items.done, answer.reason))

    def events(self, generations: list[Generation]) -> ResponseEvents:
        """Return the response as a stream of events."""
        return ResponseEvents(self, generations[0])


class Items:
    """Builds the output items of an answer. `told` collects the stream events for them.

    Args:
        name: The base of the items' ids.
        name_of: Returns the name fields of a call, given the function's name.
    """

    def __init__(self, name: str, name_of: Callable[[str], dict[str, str]]) -> None:

        self._name_of = name_of
        self.done: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._name = name
        self._item: dict[str, Any] | None = None
        self._text: list[str] = []

    def add(self, event: Event) -> None:
        """Add an event of the answer."""
        if isinstance(event, ToolCall):
            self.close()
            at = f"{self._name}_{len(self.done)}"
            call = {"type": "function_call", "id": f"fc{at}", "call_id": event.call_id or f"call{at}"}
            self._open({**call, **self._name_of(event.name), "arguments": "", "status": "in_progress"})
        elif isinstance(event, Arguments):
            self._delta("response.function_call_arguments.delta", event.text)
        elif isinstance(event, Reasoning):
            if self._kind() != "reasoning":
                self.close()
                self._open({"type": "reasoning", "id": f"rs{self._name}_{len(self.done)}", "summary": []})
            self._delta("response.reasoning_text.delta", event.text, content_index=0)
        else:
            if self._kind() != "message":
                self.close()
                message = {"type": "message", "id": f"msg{self._name}_{len(self.done)}", "role": "assistant"}
                self._open({**message, "status": "in_progress", "content": []})
                self._add_event("response.content_part.added", content_index=0, part=_part(""))
            self._delta("response.output_text.delta", event.text, content_index=0, logprobs=[])

    def close(self, reason: str = "stop") -> None:
        """Complete the open item; with the reason `length` it is incomplete."""
        if self._item is None:
            return
        item, text, kind = self._item, "".join(self._text), self._kind()
        status = "incomplete" if reason == "length" else "completed"
        if kind == "function_call":
            self._add_event("response.function_call_arguments.done", arguments=text, name=item["name"])
            item = {**item, "arguments": text or "{}", "status": status}
        elif kind == "reasoning":
            self._add_event("response.reasoning_text.done", content_index=0, text=text)
            item = {**item, "content": [{"type": "reasoning_text", "text": text}], "status": status}
        else:
            self._add_event("response.output_text.done", content_index=0, text=text, logprobs=[])
            self._add_event("response.content_part.done", content_index=0, part=_part(text))
            item = {**item, "content": [_part(text)], "status": status}
        self.events.append(("response.output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        self._item = None

    def _kind(self) -> str:
        return str(self._item["type"]) if self._item is not None else ""

    def _open(self, item: dict[str, Any]) -> None:
        self._item, self._text = item, []
        self.events.append(("response.output_item.added", {"output_index": len(self.done), "item": item}))

    def _delta(self, kind: str, text: str, **fields: Any) -> None:
        self._text.append(text)
        self._add_event(kind, delta=text, **fields)

    def _add_event(self, kind: str, **fields: Any) -> None:
        assert self._item is not None, "an item is open"
        self.events.append((kind, {"item_id": self._item["id"], "output_index": len(self.done), **fields}))


class ResponseEvents:
    """The events of a streamed response; pieces that arrive together are one write."""

    def __init__(self, work: Responses, generation: Generation) -> None:
        self._work, self._generation = work, generation
        self._items = Items(work.call.name("", [generation]), work.offered.name_of)
        self._sequence = 0
        self._begun = False

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._generation.over

    def pop_events(self) -> bytes:
        """Return the events since the last call."""
        written: list[bytes] = []
        if not self._begun:
            self._begun = True
            begun = self._work.body(self._generation, [])
            written.append(self._event("response.created", response=begun))
            written.append(self._event("response.in_progress", response=begun))
        for piece in self._generation.pop_pieces():
            self._piece(piece, written)
        return b"".join(written)

    def _piece(self, piece: Piece, written: list[bytes]) -> None:
        for event in piece.events:
            self._items.add(event)
        if piece.reason:
            self._items.close(piece.reason)
        written += [self._event(kind, **fields) for kind, fields in self._items.events]
        self._items.events.clear()
        if piece.reason:
            body = self._work.body(self._generation, self._items.done, piece.reason)
            written.append(self._event(f"response.{body['status']}", response=body))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event(kind, sequence_number=self._sequence - 1, **fields)


def event(kind: str, **fields: Any) -> bytes:
    """Encode one server-sent event of this API."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


_PLAIN = {"type": "text"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
