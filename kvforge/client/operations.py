"""Client calls of more than one step: submit with retries, follow a stream, wait for an outcome, read text.

As in `connection`, the code serves both clients. Calls of one message and its reply are in `exchanges`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvforge.protocol.errors import (
    AlreadyFinished,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidRequest,
    KvforgeError,
    QueueFull,
    RequestNotFound,
)
from kvforge.protocol.messages import Accepted, Attach, Attached, Health, Submit
from kvforge.protocol.steady_clock import monotonic
from kvforge.text.stop import StopText

from . import exchanges
from .arguments import answer_count, prompt_array, request_number
from .connection import Connection, seconds
from .options import RequestOptions
from .pending import RequestStream
from .reconnector import RETRY_PAUSE_S
from .results import Completion, Finished, Token, finished, token_at
from .sequences import SequenceRef, sequence_id
from .tables import Tables
from .values import INT32_MAX, whole

if TYPE_CHECKING:
    from kvforge.text.tokenizer import Tokenizer

Prompt = str | Sequence[dict[str, str]]

TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
STREAM_TIMEOUT_S = 600.0
READY_TIMEOUT_S = 120.0
READY_POLL_S = 0.1
READY_CONNECT_S = 0.5
MOMENT_S = 0.1


class Operations(Connection):
    """The operations of one client. `kvforge.Client` documents them."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        stream_timeout_s: float,
        reconnect_s: float,
        tokenizer: str | os.PathLike[str] | None,
        server_key: str | None,
        key_file: str | os.PathLike[str] | None,
    ) -> None:
        super().__init__(
            endpoint,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            stream_timeout_s=stream_timeout_s,
            reconnect_s=reconnect_s,
            server_key=server_key,
            key_file=key_file,
        )
        self._tokenizer_source = tokenizer
        self._tokenizer: Tokenizer | None = None

    def _awaiting(self, tracks: Sequence[RequestStream]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Mark the requests as awaited while the caller is in this context."""
        return nullcontext()

    async def submit(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        options: RequestOptions,
        timeout_s: float | None = None,
        sequence: SequenceRef | None = None,
    ) -> RequestStream:
        """Submit one request; see `Client.submit`."""
        ids = prompt_array(prompt, empty=sequence is not None)
        continued = sequence_id(sequence) if sequence is not None else 0
        tracks = await self._admit(lambda rid: options.command(rid, ids, continued, 1), timeout_s, options.retry_s)
        return _owned(tracks, options)[0]

    async def submit_samples(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        n: int,
        options: RequestOptions,
        timeout_s: float | None = None,
    ) -> tuple[RequestStream, ...]:
        """Submit one prompt for several answers; see `Client.submit_samples`."""
        ids = prompt_array(prompt)
        several = answer_count(n)
        tracks = await self._admit(lambda rid: options.command(rid, ids, 0, several), timeout_s, options.retry_s)
        return _owned(tracks, options)

    async def _admit(
        self, build: Callable[[int], Submit], timeout_s: float | None, retry_s: float | None
    ) -> tuple[RequestStream, ...]:
        """Submit, and retry for `retry_s` seconds while the queue is full."""
        deadline = monotonic() + (retry_s or 0.0)
        while True:
            try:
                pending = await self._ask(build, Accepted, timeout_s)
                pending.answer(Accepted)
            except QueueFull as full:
                if monotonic() >= deadline:
                    raise
                await self._pause(max(full.retry_after_ms / 1000, RETRY_PAUSE_S), deadline)
            else:
                return pending.tracks

    async def attach(self, request_id: int, offset: int, timeout_s: float | None) -> RequestStream:
        """Attach to a request; see `Client.attach`."""
        wanted, start = request_number(request_id), whole("offset", offset, 0, INT32_MAX)
        self._check_usable()
        track = self.session.tracked(wanted, start)
        if track is not None:
            return track
        pending = await self._ask(lambda rid: Attach(rid=rid, request_id=wanted, offset=start), Attached, timeout_s)
        pending.answer(Attached)
        return pending.tracks[0]

    async def tables(self, timeout_s: float | None) -> Tables:
        """Open the shared tables; see `Client.tables`."""
        await self._connect(monotonic() + (self.timeout_s if timeout_s is None else seconds(timeout_s)))
        if self.session.welcome is None:
            raise self._unavailable("hung up at once")
        return Tables.of(self.session.welcome, self.endpoint)

    async def wait_ready(self, timeout_s: float, progress: Callable[[Health], None] | None) -> Health:
        """Wait until the service is ready; see `Client.wait_ready`."""
        deadline = monotonic() + seconds(timeout_s)
        while True:
            try:
                await self._connect(min(deadline, monotonic() + READY_CONNECT_S))
                left_s = max(deadline - monotonic(), READY_CONNECT_S)
                health = await self.call(exchanges.health(), min(left_s, self.timeout_s))
            except (CoordinatorUnavailable, DeadlineExceeded) as unavailable:
                error: KvforgeError = unavailable
            else:
                if progress is not None:
                    progress(health)
                if health.ready:
                    return health
                error = DeadlineExceeded(
                    f"{self.endpoint} is not ready to serve after {timeout_s:g} s: {health.reason}"
                )
            if not await self._pause(READY_POLL_S, deadline):
                raise error

    async def result(self, track: RequestStream, timeout_s: float | None, start: int = 0) -> Finished:
        """Wait for the end of a request; see `Request.result`."""
        with self._awaiting((track,)):
            if not track.done:
                wait_s = self.stream_timeout_s if timeout_s is None else seconds(timeout_s)
                self._check_usable()
                if not await self._until(lambda: track.done, (track,), monotonic() + wait_s):
                    raise _not_ended(track, wait_s)
            return finished(track, start)

    async def cancel(self, track: RequestStream, timeout_s: float | None) -> None:
        """Cancel a request, unless it has ended."""
        if track.done:
            return
        try:
            await self.call(exchanges.cancel(track.request_id), timeout_s)
        except AlreadyFinished:  # its end is on the way
            return

    async def token(self, track: RequestStream, offset: int, deadline: float | None = None) -> Token | None:
        """Return the token at `offset`, None if the request ended before it.

        Args:
            track: The stream of the request.
            offset: The offset of the token.
            deadline: On steady_clock.monotonic; None: the client's limit for each token.

        Raises:
            KvforgeError: The error that ended the request.
            DeadlineExceeded: The token did not arrive in time.
        """
        if offset >= track.reach and not track.done:
            what = f"request {track.request_id}"
            await self._move(lambda: track.reach > offset or track.done, (track,), what, deadline)
        if offset < track.reach:
            return token_at(track, offset)
        if (error := track.failure()) is not None:
            raise error
        return None

    async def text(self, track: RequestStream, stops: Sequence[str], timeout_s: float | None) -> Completion:
        """Wait for the end or for a stop string, and return the text with the outcome."""
        wait_s = self.stream_timeout_s if timeout_s is None else seconds(timeout_s)
        with self._awaiting((track,)):
            if not stops:
                done = await self.result(track, wait_s)
                return Completion((await self.tokenizer()).decode(done.tokens), done)
            deadline = monotonic() + wait_s
            cursor, pieces = TextCursor(self, track, stops), []
            try:
                while (piece := await cursor.next(deadline)) is not None:
                    pieces.append(piece)
            except DeadlineExceeded:
                if track.done:  # the request itself expired
                    raise
                raise _not_ended(track, wait_s) from None
            done = await self.result(track, max(deadline - monotonic(), MOMENT_S))
            return Completion("".join(pieces), cursor.outcome(done))

    async def text_so_far(self, track: RequestStream, stops: Sequence[str]) -> str:
        """Return the text of the tokens received so far, up to a stop string."""
        stream, stop = (await self.tokenizer()).stream(), StopText(stops)
        text = stop.push(stream.push(track.tokens)) + stop.push(stream.finish())
        return text + stop.finish()

    async def more(self, ready: Callable[[], bool], tracks: Sequence[RequestStream]) -> None:
        """Wait until `ready`, which one of these streams makes true."""
        await self._move(ready, tracks, "any of the requests")

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loaded at first use.

        Raises:
            InvalidConfiguration: No tokenizer can be found.
        """
        if self._tokenizer is None:
            source = self._tokenizer_source or os.environ.get("KVFORGE_TOKENIZER")
            if not source:
                health = await self.call(exchanges.health())
                source = health.model.source if health.model is not None else None
            if not source:
                problem = "no worker has reported its model yet; name one with Client(tokenizer=...)"
                raise InvalidConfiguration("tokenizer", f"{problem} or KVFORGE_TOKENIZER")
            from kvforge.text.tokenizer import Tokenizer  # here, because it imports transformers

            self._tokenizer = Tokenizer.load(os.fspath(source))
        return self._tokenizer

    async def encode(self, prompt: Prompt, raw: bool) -> list[int]:
        """Return the token ids of a text or of a chat. Without `raw`, a text is sent as a user's message."""
        if not prompt:
            raise InvalidRequest("prompt", "is empty")
        tokenizer = await self.tokenizer()
        if not raw:
            return tokenizer.chat(prompt if isinstance(prompt, str) else list(prompt))
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt", "is a chat; with raw=True it must be one text")
        return tokenizer.encode(prompt)


class TokenCursor:
    """Reads the tokens of one request from `offset` on."""

    def __init__(self, calls: Operations, track: RequestStream, offset: int) -> None:
        self._calls, self._track, self._offset = calls, track, offset

    async def next(self) -> Token | None:
        """Return the next token, or None at the end.

        Raises:
            KvforgeError: The error that ended the request.
        """
        token = await self._calls.token(self._track, self._offset)
        self._offset += 1
        return token


class TextCursor:
    """Reads the text of one request from its first token on.

    With a vocabulary that can only decode the whole text (see `TextStream`), a stop string is found at the end of the
    answer. The text is then cut there, but its tokens are not.

    Attributes:
        tokens: The number of tokens read so far.
    """

    def __init__(self, calls: Operations, track: RequestStream, stops: Sequence[str]) -> None:
        self._calls, self._track = calls, track
        self._stop = StopText(stops)
        self._whole_only = False
        self._over = False
        self.tokens = 0

    async def next(self, deadline: float | None = None) -> str | None:
        """Return the next piece of text, never empty, or None at the end.

        Args:
            deadline: For the piece, on steady_clock.monotonic; None: the client's own limit for each token.

        Raises:
            KvforgeError: The error that ended the request.
            DeadlineExceeded: The piece did not arrive in time.
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
        """End the request at the stop string. It may have ended by itself meanwhile."""
        if self._track.done:
            return
        try:
            await self._calls.call(exchanges.finish_at(self._track.request_id, self.tokens))
        except (AlreadyFinished, RequestNotFound):
            return

    def outcome(self, finished: Finished) -> Finished:
        """Return the outcome for a reader of the text: stopped after the token that completed the stop string."""
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
            top_logprobs=finished.top_logprobs[:tokens],
        )


def _owned(tracks: tuple[RequestStream, ...], options: RequestOptions) -> tuple[RequestStream, ...]:
    """Mark requests of this client: its options decide whether these outlast their readers."""
    for track in tracks:
        track.kept = options.kept
    return tracks


def _not_ended(track: RequestStream, wait_s: float) -> DeadlineExceeded:
    problem = f"request {track.request_id} has not ended within {wait_s:g} s"
    return DeadlineExceeded(f"{problem}; it goes on: wait again, or cancel it")
