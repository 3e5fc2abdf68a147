"""One answer of a request that may move from one replica to another. Who reads it does not see that.

Law: what was given out never changes. After a move the tokens that were given out stay as they are until the new
replica has computed as many; where it computed others, the answer ends with an error and not with other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvforge.client.aio import AsyncStream
from kvforge.protocol.errors import InternalError, KvforgeError
from kvforge.protocol.messages import Ended


class Stream(Protocol):
    """What reads an answer needs of it: an `AsyncStream`, or one that moves."""

    @property
    def request_id(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def tops(self) -> Sequence[tuple[tuple[int, float], ...]]: ...
    @property
    def ended(self) -> Ended | None: ...
    @property
    def error(self) -> KvforgeError | None: ...
    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def leave(self) -> None: ...
    def finish_at(self, tokens: int) -> None: ...


class MovingStream:
    """A `Stream`. given_up: is called when nobody wants it any more."""

    def __init__(self, given_up: Callable[[], None]) -> None:
        self._given_up = given_up
        self._inner: AsyncStream | None = None
        self._finish = 0
        self._behind = False  # the replica has not computed again what was given out
        self.request_id = 0
        self.tokens: Sequence[int] = ()
        self.logprobs: Sequence[float] = ()
        self.tops: Sequence[tuple[tuple[int, float], ...]] = ()
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None
        self.wanted = True

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.ended is not None or self.error is not None

    def cancel(self) -> None:
        """Gives it up."""
        self._end_inner(kept=False)
        self._give_up()

    def leave(self) -> None:
        """Stops reading; the request goes on."""
        self._end_inner(kept=True)
        self._give_up()

    def finish_at(self, tokens: int) -> None:
        """As `AsyncStream.finish_at`; wherever it goes on."""
        self._finish = tokens
        if self._inner is not None and not self._behind and not self._inner.done:
            self._inner.finish_at(tokens)

    # ---------------------------------------------------------------------------------------------------------- moving

    def follow(self, inner: AsyncStream) -> None:
        """It goes on there."""
        self._inner, self._behind = inner, bool(len(self.tokens))

    def part(self, *, kept: bool) -> None:
        """It goes on elsewhere: what was given out stays as it is. kept: what it leaves is not cancelled."""
        if self._inner is not None and not self.done:
            self.tokens, self.logprobs, self.tops = [*self.tokens], [*self.logprobs], [*self.tops]
            self._end_inner(kept=kept)
        self._inner = None

    def fail(self, error: KvforgeError) -> None:
        """There is nowhere to go on."""
        if not self.done:
            self.error = error

    @property
    def broken(self) -> KvforgeError | None:
        """The error that its replica ended it with, and that was not given out."""
        return self._inner.error if self._inner is not None and not self.done else None

    @property
    def accepted(self) -> bool:
        """Whether a replica has taken it on."""
        return bool(self.request_id)

    def look(self) -> bool:
        """Takes over what has come. Returns whether that is news."""
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
            self.tokens, self.logprobs, self.tops = inner.tokens, inner.logprobs, inner.tops
            if self._finish and not inner.done:
                inner.finish_at(self._finish)
        self.ended = inner.ended
        return news or self.done or bool(len(self.tokens))

    def _caught_up(self, inner: AsyncStream) -> bool:
        have = len(self.tokens)
        if len(inner.tokens) < have and inner.ended is None:
            return False
        if list(inner.tokens[:have]) != self.tokens:
            problem = "another replica took the request over and computed other tokens than those that were given out"
            self.error = InternalError(f"{problem}: the replicas do not serve the same model in the same way")
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
