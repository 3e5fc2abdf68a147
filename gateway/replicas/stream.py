"""One answer of a request that may move between replicas, transparently for its reader.

Invariant: tokens that were delivered never change. After a move they stay until the new replica has computed as many.
If it computed different ones, the answer ends with an error instead of different tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvforge.client.aio import AsyncStream
from kvforge.client.prompt_stream import PromptStream
from kvforge.protocol.errors import InternalError, KvforgeError
from kvforge.protocol.messages import Ended


class Stream(Protocol):
    """The interface that a reader needs: an `AsyncStream`, or one that moves."""

    @property
    def request_id(self) -> int:
        """The coordinator's number of the request; 0 until it was accepted."""

    @property
    def tokens(self) -> Sequence[int]:
        """The token ids so far."""

    @property
    def logprobs(self) -> Sequence[float]:
        """The log-probability of each token."""

    @property
    def top_logprobs(self) -> Sequence[tuple[tuple[int, float], ...]]:
        """The most likely alternatives of each token: (token id, log-probability)."""

    @property
    def prompt_logprobs(self) -> PromptStream | None:
        """The log-probabilities of the prompt, complete once the request has ended; None if not wanted."""

    @property
    def ended(self) -> Ended | None:
        """How the request ended; None while it runs."""

    @property
    def error(self) -> KvforgeError | None:
        """The error that ended the request."""

    @property
    def done(self) -> bool:
        """Whether the request has ended."""

    def cancel(self) -> None:
        """Cancel the request."""

    def leave(self) -> None:
        """Stop reading; the request continues."""

    def finish_at(self, tokens: int) -> None:
        """End the request after this many tokens."""


class MovingStream:
    """A `Stream` that can move. `given_up` is called when its reader has left.

    Attributes:
        replica: The name of the replica that it runs on, or ended on.
    """

    def __init__(self, given_up: Callable[[], None]) -> None:
        self._given_up = given_up
        self._inner: AsyncStream | None = None
        self._finish = 0
        self._behind = False  # the new replica has not recomputed the delivered tokens yet
        self.replica = ""
        self.request_id = 0
        self.tokens: Sequence[int] = ()
        self.logprobs: Sequence[float] = ()
        self.top_logprobs: Sequence[tuple[tuple[int, float], ...]] = ()
        self.prompt_logprobs: PromptStream | None = None
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None
        self.wanted = True

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.ended is not None or self.error is not None

    def cancel(self) -> None:
        """Cancel the request."""
        self._end_inner(kept=False)
        self._give_up()

    def leave(self) -> None:
        """Stop reading; the request continues."""
        self._end_inner(kept=True)
        self._give_up()

    def finish_at(self, tokens: int) -> None:
        """End the request after this many tokens, on whichever replica it runs."""
        self._finish = tokens
        if self._inner is not None and not self._behind and not self._inner.done:
            self._inner.finish_at(tokens)

    # ---------------------------------------------------------------------------------------------------------- moving

    def follow(self, inner: AsyncStream, replica: str = "") -> None:
        """Continue with the stream of a new replica."""
        self._inner, self._behind, self.replica = inner, bool(len(self.tokens)), replica

    def part(self, *, kept: bool) -> None:
        """Detach from the replica and keep the delivered tokens. With `kept`, the request on it is not cancelled."""
        if self._inner is not None and not self.done:
            self.tokens, self.logprobs, self.top_logprobs = [*self.tokens], [*self.logprobs], [*self.top_logprobs]
            self._end_inner(kept=kept)
        self._inner = None

    def fail(self, error: KvforgeError) -> None:
        """End with an error: no replica can continue."""
        if not self.done:
            self.error = error

    @property
    def broken(self) -> KvforgeError | None:
        """The error of the current replica, not yet visible to the reader."""
        return self._inner.error if self._inner is not None and not self.done else None

    @property
    def accepted(self) -> bool:
        """Whether a replica has accepted the request."""
        return bool(self.request_id)

    def look(self) -> bool:
        """Take over new tokens. Return whether there is news."""
        inner = self._inner
        if inner is None or self.done or inner.error is not None:
            return False
        news = bool(inner.request_id) and not self.request_id
        self.request_id = self.request_id or inner.request_id
        if self._behind:
            if not self._caught_up(inner):
                return self.error is not None
            news = True
        if self.tokens is not inner.tokens and inner.request_id:
            self.tokens, self.logprobs, self.top_logprobs = inner.tokens, inner.logprobs, inner.top_logprobs
            if self._finish and not inner.done:
                inner.finish_at(self._finish)
        self.prompt_logprobs, self.ended = inner.prompt_logprobs, inner.ended
        return news or self.done or bool(len(self.tokens))

    def _caught_up(self, inner: AsyncStream) -> bool:
        have = len(self.tokens)
        if len(inner.tokens) < have and inner.ended is None:
            return False
        if list(inner.tokens[:have]) != self.tokens:
            problem = "after failover the new replica computed different tokens than those already delivered"
            self.error = InternalError(f"{problem}: the replicas do not serve the same model with the same settings")
            inner.cancel()
            return False
        self._behind = False
        return True

    def _end_inner(self, *, kept: bool) -> None:
        inner = self._inner
        if inner is not None and not inner.done:
            inner.leave() if kept else inner.cancel()

    def _give_up(self) -> None:
        if self.wanted:
            self.wanted = False
            self._given_up()
