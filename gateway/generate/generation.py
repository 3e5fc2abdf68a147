"""The answers to one prompt, from submission to their ends.

Invariant: a request that is abandoned before its end is cancelled, unless it has an idempotency key. With a key it
continues, and a later request with the same key reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from kvforge.client.options import RequestOptions
from kvforge.gateway.access import Caller
from kvforge.gateway.parse.events import Event
from kvforge.gateway.replicas.stream import Stream
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Int32Array
from kvforge.text.tokenizer import TextStream

from .answer import Answer, Parser, Piece, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A submission.

    Attributes:
        prompt: [prompt_tokens] int32.
        options: The options of the request.
        text: Factory of the detokenizer, called for each answer.
        count: The number of answers (`n`).
        stops: Stop strings.
        stop_tokens: Stop token ids, which produce no text.
        parser: Factory of the parser, called for each answer.
        resume: How many tokens the client already has; for a single answer only.
        ahead: An answer of at most this many tokens is computed as a prompt after its end, while nothing else is to be
            done, so that a next turn that sends it back finds it cached.
    """

    prompt: Int32Array
    options: RequestOptions
    text: Callable[[], TextStream]
    count: int = 1
    stops: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    parser: Callable[[], Parser] | None = None
    resume: int = 0
    ahead: int = 0


class Streams(Protocol):
    """The submission interface: `AsyncStreams` of one coordinator, or several replicas."""

    def submit_samples(
        self, prompt: Int32Array, count: int, options: RequestOptions, changed: Callable[[], None]
    ) -> Sequence[Stream]:
        """Submit a prompt and return the streams of its answers."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached` is the part of the prompt that came from the prefix cache."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


@dataclass(slots=True)
class CompleteAnswer:
    """A complete answer.

    Attributes:
        index: Its index among the answers of its prompt.
        events: All events.
        reason: The finish reason.
        stream: The tokens.
        stopped_by: The stop string that ended it, or "".
    """

    index: int
    events: list[Event]
    reason: str
    stream: Stream
    stopped_by: str = ""


class WakeUp:
    """Wake-up signal for the one task that waits."""

    __slots__ = ("_again", "_waiting")

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None
        self._again = False

    def ring(self) -> None:
        """Wake the task."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def ring_again(self) -> None:
        """Let the next `rung` return as soon as other tasks have had their turn: the task has more to do."""
        self._again = True

    async def rung(self) -> None:
        """Wait for the next ring. Check the condition before the call: earlier rings do not count."""
        if self._again:
            self._again = False
            await asyncio.sleep(0)
            return
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None


class Generation:
    """The answers to one prompt. Leaving its `async with` block cancels those that still run.

    Args:
        streams: Where to submit.
        wanted: The submission.
        bell: Rung when `take` may have something.

    Attributes:
        each_token: Whether the bell is rung for each token, or only at the first and at the end.
    """

    def __init__(self, streams: Streams, wanted: Submission, bell: WakeUp) -> None:
        self._bell = bell
        self._streams, self._wanted = streams, wanted
        self._left = wanted.count
        self._kept = wanted.options.kept
        self._resume = wanted.resume
        self.each_token = True
        requests = streams.submit_samples(wanted.prompt, wanted.count, wanted.options, self._changed)
        self.answers = tuple(
            Answer(
                index,
                stream,
                wanted.text(),
                stops=wanted.stops,
                stop_tokens=wanted.stop_tokens,
                parser=wanted.parser() if wanted.parser is not None else None,
            )
            for index, stream in enumerate(requests)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for answer in self.answers:
            if not answer.stream.done:
                answer.stream.leave() if self._kept else answer.stream.cancel()
        if self._wanted.ahead:
            self._compute_ahead()

    def _compute_ahead(self) -> None:
        """Let the coordinator compute the only answer as a prompt, if it finds the time."""
        wanted, stream = self._wanted, self.answers[0].stream
        if wanted.count != 1 or stream.ended is None or not 0 < len(stream.tokens) <= wanted.ahead:
            return
        prompt = np.concatenate([wanted.prompt, np.asarray(stream.tokens, np.int32)])
        options = RequestOptions(
            max_tokens=1, tenant=wanted.options.tenant, cache_salt=wanted.options.cache_salt, ahead=True
        )
        with suppress(KvforgeError):  # the answer is whole, though the coordinator or every replica is away now
            (ahead,) = self._streams.submit_samples(prompt, 1, options, _nothing)
            ahead.leave()

    @property
    def pins(self) -> tuple[tuple[int, float], ...]:
        """What the request asked to pin."""
        return self._wanted.options.pins

    @property
    def request_id(self) -> int:
        """The request id of the first answer; those of the others follow."""
        return self.answers[0].stream.request_id

    @property
    def usage(self) -> Usage:
        """The token counts of all answers together; final when they have ended."""
        ends = [answer.stream.ended for answer in self.answers]
        first = ends[0]
        return Usage(
            prompt=first.prompt_tokens if first is not None else 0,
            completion=sum(end.generated_tokens for end in ends if end is not None),
            cached=min(first.cached_tokens, first.prompt_tokens) if first is not None else 0,
            reasoning=sum(answer.reasoning_tokens for answer in self.answers),
        )

    async def accepted(self) -> None:
        """Wait until the coordinator has accepted the request.

        Raises:
            KvforgeError: The coordinator refused it.
        """
        first = self.answers[0].stream
        while not first.request_id:
            if first.error is not None:
                raise first.error
            await self._bell.rung()

    def ring(self) -> None:
        """Wake the reader."""
        self._bell.ring()

    def ring_again(self) -> None:
        """Let the reader come back after other tasks."""
        self._bell.ring_again()

    @property
    def over(self) -> bool:
        """Whether all answers have ended and their last pieces were taken."""
        return not self._left

    def pop_pieces(self) -> list[Piece]:
        """Return the pieces since the last call.

        Raises:
            KvforgeError: The error that ended an answer.
        """
        if self._resume and not self.answers[0].skip(self._resume):
            return []
        self._resume = 0
        came = [piece for answer in self.answers if (piece := answer.pop_piece()) is not None]
        for piece in came:
            if piece.reason:
                self._left -= 1
        return came

    async def whole(self) -> list[CompleteAnswer]:
        """Wait for the complete answers.

        Raises:
            KvforgeError: The error that ended an answer.
        """
        self.each_token = any(answer.waits_for_tokens for answer in self.answers)
        answers = [CompleteAnswer(answer.index, [], "", answer.stream) for answer in self.answers]
        while True:
            for piece in self.pop_pieces():
                answers[piece.index].events += piece.events
                answers[piece.index].reason = piece.reason
            if self.over:
                break
            await self._bell.rung()
        for answer, read in zip(answers, self.answers, strict=True):
            answer.events, answer.stopped_by = joined(answer.events), read.stopped_by
        return answers

    def _changed(self) -> None:
        if self.each_token or any(a.stream.done or not a.stream.tokens for a in self.answers):
            self._bell.ring()


def _nothing() -> None:
    """Take no notice."""


def charge(caller: Caller, generations: Sequence[Generation]) -> None:
    """Charge computed prompt tokens and all generated tokens to the caller, those of abandoned answers included."""
    for generation in generations:
        usage = generation.usage
        came = sum(len(answer.stream.tokens) for answer in generation.answers)
        caller.used(usage.prompt - usage.cached + max(usage.completion, came))
