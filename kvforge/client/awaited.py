"""What callers wait for: the answer to a command (`Pending`), the tokens of a request (`Track`).

A session makes them and forgets them once they are done; whoever holds one keeps its data.
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

M = TypeVar("M", bound=Message)
# Commands that are the same when they are done twice.
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


def again(error: KvforgeError) -> KvforgeError:
    """A new exception equal to `error`, so that raising it twice does not pile up tracebacks on one object."""
    return restore(error.code, error.message, error.fields)


class Watched:
    """Something that callers wait for; each registers a function that is called whenever it changes."""

    __slots__ = ("wakers",)

    def __init__(self) -> None:
        self.wakers: set[Callable[[], None]] = set()

    def wake(self) -> None:
        """Calls every registered function."""
        for waker in [*self.wakers]:
            waker()


class Pending(Watched):
    """One command on its way. Done when it has a reply or an error; `tracks` are the requests it started or reads.

    count: how many requests it starts. resumes: the request whose stream it takes up again, where the session itself
    sent it; else 0. sent: the message, once it was sent: it is sent again where the connection is lost before its
    answer comes. keyed: it was sent with a key, so that it can be asked for again. resent: the answer may have been
    given before. abandoned: nobody waits for it any more, but what it starts is to be cancelled.
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
        self.tracks: tuple[Track, ...] = ()
        self.error: KvforgeError | None = None

    @property
    def repeatable(self) -> bool:
        """Whether it may be done a second time."""
        return self.keyed or isinstance(self.sent, REPEATABLE)

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None

    def answer(self, expects: type[M]) -> M:
        """The reply, which must be an `expects`. Raises the error that came instead."""
        if self.error is not None:
            raise again(self.error)
        assert isinstance(self.reply, expects), "asked for before it was done, or as something else"
        return self.reply


class Track(Watched):
    """The stream of one request, kept from its token `start` on. logprobs are in nats.

    tops: for each token the most likely ones at its place, as (token id, log-probability); empty unless asked for.
    kept: it goes on though nobody here reads it any more. readers: who does now.
    """

    __slots__ = ("ended", "error", "kept", "logprobs", "readers", "request_id", "seed", "start", "tokens", "tops")

    def __init__(self, request_id: int, seed: int, start: int = 0) -> None:
        super().__init__()
        self.request_id = request_id
        self.seed = seed
        self.start = start
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[tuple[tuple[int, float], ...]] = []
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None
        self.kept = True
        self.readers = 0

    @property
    def done(self) -> bool:
        return self.ended is not None or self.error is not None

    @property
    def reach(self) -> int:
        """The offset of the token that is due next."""
        return self.start + len(self.tokens)

    def settle(self) -> None:
        """Forgets a token that was not taken in whole: a signal's handler may have broken that off."""
        columns: tuple[list[Any], ...] = (self.tokens, self.logprobs, self.tops)
        whole = min(map(len, columns))
        for column in columns:
            del column[whole:]

    def end(self, ended: Ended, anew: int | None = None) -> None:
        """The request has ended: with what the coordinator says, or with an error where its tokens did not all come.

        anew: up to where a stream came that began anew; None: it did not. What is taken back by then is not in it.
        """
        streamed = ended.generated_tokens + ended.cut_tokens
        # A track that starts behind the last token has no tokens, and lacks none.
        whole = max(streamed, self.start) == self.reach or (anew == streamed and streamed < self.reach)
        if ended.cut_tokens < 0 or not whole:
            self.error = self.gap(f"it ended after {ended.generated_tokens} tokens and {self.reach} came")
            return
        for column in (self.tokens, self.logprobs, self.tops):
            del column[max(0, ended.generated_tokens - self.start) :]
        self.ended = ended

    def gap(self, problem: str) -> ProtocolError:
        """What is wrong with this stream."""
        return ProtocolError(f"the stream of request {self.request_id} has a gap: {problem}")

    def failure(self) -> KvforgeError | None:
        """The error this request ended with; None while it runs, or when it ended well or was cancelled."""
        if self.error is not None:
            return again(self.error)
        if self.ended is None:
            return None
        if self.ended.error is not None and self.ended.reason != "cancelled":
            info = self.ended.error
            return restore(info.code, info.message, info.fields)
        if self.ended.reason == "failed":
            return InternalError(f"request {self.request_id} failed; the coordinator did not say why")
        if self.ended.reason == "expired":
            return DeadlineExceeded(f"request {self.request_id} ran out of time in the coordinator")
        return None
