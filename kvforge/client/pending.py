"""What callers wait for: the reply to a command (`PendingCommand`), and the tokens of a request (`RequestStream`).

A session creates them and drops them once they are done. A caller that holds one keeps its data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvforge.protocol.errors import DeadlineExceeded, InternalError, KvforgeError, ProtocolError, restore
from kvforge.protocol.messages import (
    Attach,
    Cancel,
    Ended,
    Explain,
    FindPrefix,
    FinishAt,
    GetBlock,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    ListRequests,
    Message,
)

from .prompt_stream import PromptStream

M = TypeVar("M", bound=Message)
# Idempotent commands.
REPEATABLE = (
    Attach,
    Cancel,
    Explain,
    FindPrefix,
    FinishAt,
    GetBlock,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    ListRequests,
)


WHOLE = ("length", "stop")  # reasons of an end with nothing missing


def again(error: KvforgeError) -> KvforgeError:
    """Return a new exception equal to `error`: raising one object twice would accumulate tracebacks on it."""
    return restore(error.code, error.message, error.fields)


class Watched:
    """Something that callers wait for. Each registers a function that is called on every change."""

    __slots__ = ("wakers",)

    def __init__(self) -> None:
        self.wakers: set[Callable[[], None]] = set()

    def wake(self) -> None:
        """Call every registered function."""
        for waker in [*self.wakers]:
            waker()


class PendingCommand(Watched):
    """One command on its way, done when it has a reply or an error.

    Attributes:
        count: The number of requests that it starts.
        tracks: The requests that it started or reads.
        resumes: The request with the stream that an Attach of the session itself resumes, else 0.
        sent: The message once it was sent. It is sent again if the connection is lost before the reply.
        keyed: It was sent with an idempotency key, so that it can be repeated.
        resent: A reply may have been sent before.
        abandoned: The caller gave up, but the requests that it starts must still be cancelled.
    """

    __slots__ = (
        *("abandoned", "count", "error", "expects", "keyed", "reply"),
        *("resent", "resumes", "rid", "sent", "tracks", "what"),
    )

    def __init__(self, rid: int, expects: type[Message], what: str, count: int = 1, resumes: int = 0) -> None:
        super().__init__()
        self.rid = rid
        self.expects = expects
        self.what = what
        self.count = count
        self.sent: Message | None = None
        self.keyed = False
        self.resent = False
        self.abandoned = False
        self.resumes = resumes
        self.reply: Message | None = None
        self.tracks: tuple[RequestStream, ...] = ()
        self.error: KvforgeError | None = None

    @property
    def repeatable(self) -> bool:
        """Return whether the command may be executed twice."""
        return self.keyed or isinstance(self.sent, REPEATABLE)

    @property
    def done(self) -> bool:
        """Return whether the reply or an error has arrived."""
        return self.reply is not None or self.error is not None

    def answer(self, expects: type[M]) -> M:
        """Return the reply.

        Args:
            expects: The type of the reply.

        Raises:
            KvforgeError: The error that arrived instead.
        """
        if self.error is not None:
            raise again(self.error)
        assert isinstance(self.reply, expects), "the reply has not arrived, or has another type"
        return self.reply


class RequestStream(Watched):
    """The stream of one request from its token `start` on. logprobs are in nats.

    Attributes:
        prompt: The log-probabilities of the prompt, which precede the tokens; None if they are not read.
        top_logprobs: For each token the most likely ones at its place, as (token id, log-probability); empty unless
            requested.
        kept: The request goes on when the last reader here stops.
        readers: The number of tasks that read it.
    """

    __slots__ = (
        "ended",
        "error",
        "kept",
        "logprobs",
        "prompt",
        "readers",
        "request_id",
        "seed",
        "start",
        "tokens",
        "top_logprobs",
    )

    def __init__(self, request_id: int, seed: int, start: int = 0, prompt: PromptStream | None = None) -> None:
        super().__init__()
        self.request_id = request_id
        self.seed = seed
        self.start = start
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None
        self.kept = True
        self.readers = 0

    @property
    def done(self) -> bool:
        """Return whether the request has ended or failed."""
        return self.ended is not None or self.error is not None

    @property
    def reach(self) -> int:
        """Return the offset of the next token."""
        return self.start + len(self.tokens)

    @property
    def due(self) -> int:
        """Return the offset of the next row: negative while log-probabilities of the prompt are due."""
        return -self.prompt.lacking if self.prompt is not None and self.prompt.lacking else self.reach

    def add_prompt(
        self, offset: int, token: int, logprob: float, rank: int, top: tuple[tuple[int, float], ...]
    ) -> bool:
        """Add the log-probability of a prompt token. Return whether it changed anything.

        Raises:
            ProtocolError: A row is missing before it.
        """
        prompt = self.prompt
        if prompt is None or offset < -prompt.lacking:
            return False
        if offset > -prompt.lacking:
            raise self.gap(f"prompt token {-prompt.lacking} was due and {offset} came")
        prompt.tokens.append(token)
        prompt.logprobs.append(logprob)
        prompt.ranks.append(rank)
        prompt.top_logprobs.append(top)
        return True

    def settle(self) -> None:
        """Drop a partly stored token, which a signal handler may have interrupted."""
        columns: tuple[list[Any], ...] = (self.tokens, self.logprobs, self.top_logprobs)
        whole = min(map(len, columns))
        for column in columns:
            del column[whole:]
        if self.prompt is not None:
            self.prompt.settle()

    def end(self, ended: Ended, anew: int | None = None) -> None:
        """Record the end of the request; if tokens are missing, record an error instead.

        Args:
            ended: The end as the coordinator reports it.
            anew: The offset that a restarted stream has reached, None if the stream was not restarted. Tokens that were
                cut by then are not in it.
        """
        streamed = ended.generated_tokens + ended.cut_tokens
        # A track that starts behind the last token is complete without any token.
        whole = max(streamed, self.start) == self.reach or (anew == streamed and streamed < self.reach)
        if ended.cut_tokens < 0 or not whole:
            self.error = self.gap(f"it ended after {ended.generated_tokens} tokens and {self.reach} came")
            return
        if self.due < 0 and ended.reason in WHOLE:
            self.error = self.gap(f"it ended before {-self.due} log-probabilities of its prompt came")
            return
        for column in (self.tokens, self.logprobs, self.top_logprobs):
            del column[max(0, ended.generated_tokens - self.start) :]
        self.ended = ended

    def gap(self, problem: str) -> ProtocolError:
        """Return the error for a gap in this stream."""
        return ProtocolError(f"the stream of request {self.request_id} has a gap: {problem}")

    def failure(self) -> KvforgeError | None:
        """Return the error that ended the request; None while it runs, or if it succeeded or was cancelled."""
        if self.error is not None:
            return again(self.error)
        if self.ended is None:
            return None
        if self.ended.error is not None and self.ended.reason != "cancelled":
            info = self.ended.error
            return restore(info.code, info.message, info.fields)
        if self.ended.reason == "failed":
            return InternalError(f"request {self.request_id} failed; the coordinator gave no reason")
        if self.ended.reason == "expired":
            return DeadlineExceeded(f"request {self.request_id} ran out of time in the coordinator")
        return None
