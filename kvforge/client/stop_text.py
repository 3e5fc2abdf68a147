"""Text up to a stop string: `StopText` watches for it, `TextCursor` reads a request's text and ends the request there.

A stop string is found where text is known, in the client. The request is then ended in the coordinator after the token
that completed it (`FinishAt`); what was generated meanwhile does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvforge.protocol.errors import AlreadyFinished, RequestNotFound
from kvforge.protocol.messages import Done, FinishAt

from .results import Finished

if TYPE_CHECKING:
    from .calls import Calls
    from .session import Track


class StopText:
    """Passes text through until one of the stop strings appears; the stop string itself is not passed.

    What might be the beginning of one is held back until it is decided. found: whether one has appeared.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is now certain to come before any stop string; may be empty."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max(_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and is no stop string after all."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class TextCursor:
    """Reads the text of one request from its first token on.

    tokens: how many were read. With a vocabulary whose decoder gives only the whole text (see `TextStream`), a stop
    string is found at the end of the answer: the text is cut there, its tokens are not.
    """

    def __init__(self, calls: Calls, track: Track, stops: Sequence[str]) -> None:
        self._calls, self._track = calls, track
        self._stop = StopText(stops)
        self._whole_only = False
        self._over = False
        self.tokens = 0

    async def next(self, deadline: float | None = None) -> str | None:
        """The next piece of text, never empty, or None at the end. Raises the error that the request ended with.

        deadline: on time.monotonic, for the piece to come; None: the client's own limit for each token.
        """
        if self.tokens == 0 and not self._over:
            tokenizer = await self._calls.tokenizer()
            self._stream, self._whole_only = tokenizer.stream(), tokenizer.pieces is None
        while not self._over:
            token = await self._calls.token(self._track, self.tokens, deadline)
            if token is None:
                self._over = True
                piece = self._stop.push(self._stream.finish()) + self._stop.finish()
            else:
                self.tokens += 1
                piece = self._stop.push(self._stream.push((token.token_id,)))
                if self._stop.found:
                    self._over = True
                    await self._finish()
            if piece:
                return piece
        return None

    async def _finish(self) -> None:
        """The stop string is complete: nothing more is wanted. The request may have ended by itself meanwhile."""
        if self._track.done:
            return
        request_id, tokens = self._track.request_id, self.tokens
        try:
            await self._calls.call(lambda rid: FinishAt(rid=rid, request_id=request_id, tokens=tokens), Done)
        except (AlreadyFinished, RequestNotFound):
            return

    def outcome(self, finished: Finished) -> Finished:
        """The request's end as the reader of the text sees it: stopped after the token that completed the string."""
        if not self._stop.found or finished.reason == "cancelled":
            return finished
        if self._whole_only:
            return replace(finished, reason="stop")
        tokens = self.tokens
        return replace(
            finished,
            reason="stop",
            tokens=finished.tokens[:tokens],
            logprobs=finished.logprobs[:tokens],
            top=finished.top[:tokens],
        )
