"""The common parts of both clients' requests: `Handle` is one request, `MergedStream` the tokens of several."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvforge.protocol.errors import InvalidRequest

from .arguments import stop_strings
from .operations import Operations
from .pending import RequestStream
from .results import Token, token_at

H = TypeVar("H", bound="Handle")


class Handle:
    """One request.

    Attributes:
        id: The coordinator's id of the request.
        seed: The seed that repeats its draws.
        start: The offset of the first token that this handle returns.
    """

    def __init__(self, calls: Operations, track: RequestStream, start: int = 0) -> None:
        self._calls = calls
        self._track = track
        self.id = track.request_id
        self.seed = track.seed
        self.start = max(start, track.start)

    @property
    def done(self) -> bool:
        """Return whether the end has been received. Looks only at messages received so far."""
        return self._track.done

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the token ids received so far, from offset `start` on. They are kept after an error."""
        return tuple(self._track.tokens[self.start - self._track.start :])

    def _text_stops(self, stop: str | Sequence[str]) -> tuple[str, ...]:
        """Return the checked stop strings. Raises InvalidRequest naming `stop` or `offset`."""
        if self.start:
            raise InvalidRequest("offset", f"is {self.start}; text is read from the first token on")
        return stop_strings(stop)

    def __repr__(self) -> str:
        state = "ended" if self.done else "running"
        return f"<{type(self).__name__} {self.id}: {state}, {len(self.tokens)} tokens>"


class MergedStream(Generic[H]):
    """The tokens of several requests in the order of their arrival, without waiting."""

    def __init__(self, requests: Sequence[H]) -> None:
        self._seen = {id(request): request.start for request in requests}
        self._open = list(requests)

    @property
    def tracks(self) -> Sequence[RequestStream]:
        """Return the streams of the requests that have not ended or still hold unread tokens."""
        return [request._track for request in self._open]

    @property
    def ready(self) -> bool:
        """Return whether `arrived` has something to return or to raise."""
        return any(request.done or request._track.reach > self._seen[id(request)] for request in self._open)

    def arrived(self) -> list[tuple[H, Token]]:
        """Return the tokens received since the last call, each with its request.

        Raises:
            KvforgeError: The error that ended a request.
        """
        rows: list[tuple[H, Token]] = []
        for request in tuple(self._open):
            track, seen = request._track, self._seen[id(request)]
            self._seen[id(request)] = max(seen, track.reach)
            rows += [(request, token_at(track, offset)) for offset in range(seen, track.reach)]
            if not track.done:
                continue
            if not rows and (error := track.failure()) is not None:
                raise error
            if track.failure() is None:
                self._open.remove(request)
        rows.sort(key=lambda row: row[1].offset)
        return rows


class MergedCursor(Generic[H]):
    """Reads a feed and waits for its next token."""

    def __init__(self, calls: Operations, feed: MergedStream[H]) -> None:
        self._calls, self._feed = calls, feed
        self._arrived: deque[tuple[H, Token]] = deque()

    async def next(self) -> tuple[H, Token] | None:
        """Return the next token with its request; None once all requests have ended.

        Raises:
            KvforgeError: The error that ended a request.
        """
        feed = self._feed
        while not self._arrived and feed.tracks:
            await self._calls.more(lambda: feed.ready, feed.tracks)
            self._arrived.extend(feed.arrived())
        return self._arrived.popleft() if self._arrived else None
