"""/v1/responses: continue a conversation, answered in items."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from kvforge import SamplingParams
from kvforge.gateway.chat.shapes import Shape
from kvforge.gateway.generate.answer import Piece
from kvforge.gateway.generate.generation import Generation, Submission, Usage
from kvforge.gateway.generate.prepare import prepare_conversation
from kvforge.gateway.http.encoding import encode
from kvforge.gateway.http.errors import openai_error
from kvforge.gateway.http.fields import Reader
from kvforge.protocol.errors import KvforgeError, StorageFailed

from .call import Call
from .fields import top_k_of, top_p_of
from .kept import KeptSequence, kept_of
from .response_items import EventWriter, Items, event
from .responses_body import NOT_STORED, Create, check, messages_of, shape
from .responses_tools import OfferedFunctions, echoed
from .stored import Context, Stored, StoredResponse, input_items, items_of, named_id
from .unimplemented_fields import READ_IF, UNIMPLEMENTED

Forget = Callable[[KeptSequence], Awaitable[None]]  # gives a kept sequence up
READER = Reader(Create, UNIMPLEMENTED, READ_IF)
log = logging.getLogger(__name__)


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
    """One request to /v1/responses.

    Args:
        call: Its context.
        asked: Its body.
        stored: The stored objects; None if the gateway stores nothing.
        name: Its id, if it has one already.
        forget: Gives its sequence up if it cannot be stored.

    Attributes:
        ending: The end of the prompt's text.
        shape: The output constraint.
    """

    @classmethod
    async def of(
        cls, call: Call, asked: Create, stored: Stored | None = None, forget: Forget | None = None
    ) -> Responses:
        """Check a request and render its conversation.

        Raises:
            InvalidRequest: Names the field.
            NotFound: The response or conversation to continue does not exist.
        """
        work = cls(call, asked, stored, forget=forget)
        await work.converse()
        return work

    def __init__(
        self,
        call: Call,
        asked: Create,
        stored: Stored | None = None,
        name: str = "",
        forget: Forget | None = None,
    ) -> None:
        check(asked, stores=stored is not None)
        if stored is None and asked.store:
            call.ignored.add("store", f"cannot be true: {NOT_STORED}")
        self.call, self.asked, self.stored, self._forget = call, asked, stored, forget
        self.stores = stored is not None and asked.store is not False
        self.id = name or _id_of(call, asked)
        self.created = int(time.time())
        self.wanted: list[Submission] = []
        self.input = input_items(asked.input, self.base)
        self.offered = OfferedFunctions(asked, call.ignored)
        self.ending, self.shape = "", Shape()

    @property
    def base(self) -> str:
        """The base of the ids of its items."""
        return self.id.removeprefix("resp")

    @property
    def keep_s(self) -> float:
        """How long its sequence is kept for a response that continues it, in seconds."""
        return self.call.settings.storage.sequence_s if self.stores else 0.0

    async def converse(self) -> None:
        """Render the conversation and build the submission."""
        call, asked = self.call, self.asked
        before, kept = await self.stored.context(call.caller.tenant, asked) if self.stored is not None else Context([])
        if self.stored is not None:
            given = await self.stored.resolved(call.caller.tenant, asked, before)
            asked = msgspec.structs.replace(asked, input=given)
        effort = asked.reasoning.effort if asked.reasoning is not None else None
        variables = dict(asked.chat_template_kwargs or {})
        if effort is not None:
            variables["reasoning_effort"] = effort
        field = "conversation" if asked.conversation_id else "previous_response_id"
        conversation = await prepare_conversation(
            call.model,
            messages_of(asked, self.offered.shown, items_of(before) if before else (), field),
            tools=self.offered.tools,
            choice=self.offered.choice(asked),
            shape=shape(asked),
            variables=variables,
        )
        prompt = conversation.rendered.ids
        most = asked.max_output_tokens or max(1, call.model.info.context_tokens_max - len(prompt))
        call.names.shape = self.shape = conversation.shape
        self.ending = conversation.rendered.ending
        options = replace(
            call.options(self.sampling(conversation.shape), asked, most),
            continues=kept.sequence_id if kept is not None else 0,
            keep_s=self.keep_s,
        )
        self.wanted = [Submission(prompt=prompt, options=options, text=conversation.text, parser=conversation.parser)]

    def sampling(self, wanted: Shape) -> SamplingParams:
        """Return the sampling parameters with an output constraint."""
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

    def items(self) -> Items:
        """Return a builder of its output items."""
        return Items(self.base, self.offered.name_of)

    def body(
        self,
        usage: Usage | None,
        output: list[dict[str, Any]],
        reason: str = "",
        *,
        status: str = "",
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Build the response.

        Args:
            usage: The token counts; None before the end.
            output: The output items.
            reason: Why the answer ended; "" while it continues.
            status: The status, if it does not follow from the reason.
            error: Why it failed.
        """
        asked = self.asked
        status = status or {"": "in_progress", "length": "incomplete"}.get(reason, "completed")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(asked.background),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.call.model_name,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "conversation": {"id": asked.conversation_id} if asked.conversation_id else None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning is not None else None, "summary": None},
            "store": self.stores,
            "temperature": asked.temperature,
            "text": {"format": msgspec.to_builtins(asked.text.format) if asked.text and asked.text.format else _PLAIN},
            "tool_choice": msgspec.to_builtins(asked.tool_choice) if asked.tool_choice is not None else "auto",
            "tools": echoed(asked.tools),
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage_of(usage) if usage is not None else None,
            "user": asked.user,
            "metadata": asked.metadata or {},
        }

    async def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the complete response."""
        (generation,) = generations
        (answer,) = await generation.whole()
        items = self.items()
        for one in answer.events:
            items.add(one)
        items.close(answer.reason)
        body = self.body(generation.usage, items.done, answer.reason)
        return encode(await self.saved(body, items, kept_of(answer.stream)))

    async def saved(self, body: dict[str, Any], items: Items, kept: KeptSequence | None) -> dict[str, Any]:
        """Store a complete response, if it is to be stored.

        An answer is not lost with its storage: if it cannot be stored, `store` is false, and its sequence is given up.
        Where it is not known whether it was stored, it is stored again, which changes nothing if it was.

        Returns:
            The response as it is sent.
        """
        if not self.stores or self.stored is None:
            return body
        stored = StoredResponse(
            response=body, input=self.input, pieces=items.pieces, conversation=self.asked.conversation_id, kept=kept
        )
        operations = self.stored.put(self.call.caller.tenant, stored, group=self.call.model.info.name)
        try:
            try:
                await self.stored.storage.apply(*operations)
            except StorageFailed:
                await self.stored.storage.apply(*operations)
        except KvforgeError as error:
            log.warning("the response %s is not stored: %s", self.id, error.message)
            if kept is not None and self._forget is not None:
                await self._forget(kept)
            return {**body, "store": False}
        return body

    def events(self, generations: list[Generation]) -> ResponseEvents:
        """Return the response as a stream of events."""
        return ResponseEvents(self, generations[0])


class ResponseEvents:
    """The events of a streamed response; pieces that arrive together are one write. The last follows the storage."""

    def __init__(self, work: Responses, generation: Generation) -> None:
        self._work, self._generation = work, generation
        self._items = work.items()
        self._writer = EventWriter(self._items)
        self._begun = False
        self._saving: asyncio.Task[dict[str, Any]] | None = None
        self._ended = False

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._ended

    def pop_events(self) -> bytes:
        """Return the events since the last call."""
        written: list[bytes] = []
        if not self._begun:
            self._begun = True
            written.append(self._writer.begin(self._work.body(None, [])))
        for piece in self._generation.pop_pieces():
            self._piece(piece, written)
        if self._saving is not None and self._saving.done() and not self._ended:
            self._ended = True
            written.append(self._writer.end(self._saving.result()))
        return b"".join(written)

    def _piece(self, piece: Piece, written: list[bytes]) -> None:
        written.append(self._writer.add(piece.events, piece.reason))
        if not piece.reason:
            return
        work = self._work
        body = work.body(self._generation.usage, self._items.done, piece.reason)
        if work.stores:
            kept = kept_of(self._generation.answers[0].stream)
            self._saving = asyncio.ensure_future(work.saved(body, self._items, kept))
            self._saving.add_done_callback(lambda _: self._generation.ring())
        else:
            self._ended = True
            written.append(self._writer.end(body))


def response_failed(error: KvforgeError) -> bytes:
    """Encode an error as the last event of a stream."""
    described = openai_error(error)["error"]
    named = {name: described[name] for name in ("code", "message", "param")}
    return event("error", **named, sequence_number=0)


def _id_of(call: Call, asked: Create) -> str:
    """Return the id of a response, which stays the same when it is asked for again with its idempotency key."""
    return named_id("resp", call.caller.tenant, call.key.name, "background" if asked.background else "")


_PLAIN = {"type": "text"}
