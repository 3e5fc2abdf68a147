"""Many requests of one client without a task for each: a callback per request reports its events.

`AsyncRequest` costs a future per wait and an iteration per token. Here, a message with the tokens of two thousand
requests is two thousand plain calls. It serves programs with thousands of requests in flight, such as the load harness.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvforge.client.pending import PendingCommand, RequestStream, again
from kvforge.client.prompt_stream import PromptStream
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Accepted, Done, Ended, FinishAt, Int32Array, Submit

from ..arguments import answer_count
from ..options import RequestOptions
from ..reconnector import ROOM_POLL_S
from .client import AsyncClient
from .waiting import AsyncCalls

NOTHING: Sequence[int] = ()
NO_LOGPROBS: Sequence[float] = ()
NO_TOP_LOGPROBS: Sequence[tuple[tuple[int, float], ...]] = ()


class AsyncStream:
    """One request.

    Attributes:
        request_id: The coordinator's id; 0 until the request is accepted.
        ended: Its end; None before it, or after an error.
        error: The error that refused or ended it.
        tokens: The tokens received so far. Like `logprobs` and `top_logprobs`, this is the live list: it grows, and
            shrinks only at an end that takes tokens back.
        logprobs: Their log-probabilities in nats.
        top_logprobs: The `Token.top_logprobs` of each token.
        prompt_logprobs: The log-probabilities of its prompt so far, complete before the first token. None if they are
            not wanted, or before the request is accepted.
    """

    __slots__ = (
        *("_changed", "_kept", "_streams", "_submission", "_track", "ended", "error", "logprobs", "request_id"),
        *("prompt_logprobs", "tokens", "top_logprobs"),
    )

    def __init__(self, streams: AsyncStreams, changed: Callable[[], None], kept: bool) -> None:
        self._streams = streams
        self._changed: Callable[[], None] | None = changed
        self._kept = kept
        self._submission: _Submission | None = None
        self._track: RequestStream | None = None
        self.request_id = 0
        self.tokens: Sequence[int] = NOTHING
        self.logprobs: Sequence[float] = NO_LOGPROBS
        self.top_logprobs: Sequence[tuple[tuple[int, float], ...]] = NO_TOP_LOGPROBS
        self.prompt_logprobs: PromptStream | None = None
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None

    @property
    def done(self) -> bool:
        """Return whether the request has ended or failed."""
        return self.ended is not None or self.error is not None

    @property
    def given_up(self) -> bool:
        """Return whether its callback is no longer called."""
        return self._changed is None

    def cancel(self) -> None:
        """Give the request up: its callback is not called again, and the coordinator cancels it."""
        if self._changed is None:
            return
        self._changed = None
        link, session = self._streams.calls.link, self._streams.calls.session
        if self._track is not None:
            self._track.wakers.discard(self._moved)
            link.send_soon(session.cancel((self.request_id,)))
        elif self._submission is not None:
            self._submission.given_up()
        self._streams.pump_soon()

    def leave(self) -> None:
        """Stop reading without cancelling: the request goes on and can be found by its key."""
        self._changed = None
        if self._track is not None:
            self._track.wakers.discard(self._moved)

    def finish_at(self, tokens: int) -> None:
        """End the request after its first `tokens` tokens, which have been received.

        Later tokens are taken back, unless the request has ended meanwhile.
        """
        link, session = self._streams.calls.link, self._streams.calls.session
        command = FinishAt(rid=session.new_rid(), request_id=self.request_id, tokens=tokens)
        session.expect(command.rid, Done, "FinishAt").sent = command
        link.send_soon((command,))
        self._streams.pump_soon()

    def _refused(self, error: KvforgeError) -> None:
        self.error, self._submission = error, None
        changed, self._changed = self._changed, None
        if changed is not None:
            changed()

    def _accepted(self, track: RequestStream) -> None:
        self._track, self._submission = track, None
        track.kept = self._kept
        self.request_id, self.prompt_logprobs = track.request_id, track.prompt
        self.tokens, self.logprobs, self.top_logprobs = track.tokens, track.logprobs, track.top_logprobs
        if self._changed is not None:
            track.wakers.add(self._moved)
            if track.done:  # the tokens of a repeated key may be complete already
                self._moved()
            else:
                self._changed()

    def _moved(self) -> None:
        """Handle new tokens or the end."""
        changed, track = self._changed, self._track
        if changed is None or track is None:
            return
        if track.ended is not None or track.error is not None:
            track.wakers.discard(self._moved)
            self.ended, self.error = track.ended, track.failure()
            self._changed = None  # breaks the reference cycle with the callback
        changed()


class _Submission:
    """One Submit on its way, and the streams of its requests."""

    __slots__ = ("_calls", "_pending", "_streams")

    def __init__(self, calls: AsyncCalls, pending: PendingCommand, streams: tuple[AsyncStream, ...]) -> None:
        self._calls, self._pending, self._streams = calls, pending, streams
        pending.wakers.add(self._answered)
        for stream in streams:
            stream._submission = self

    def given_up(self) -> None:
        """Drop the submission if all its streams were given up."""
        if all(stream.given_up for stream in self._streams):
            self._pending.wakers.clear()
            self._calls.link.send_soon(self._calls.session.forget(self._pending))

    def _answered(self) -> None:
        """Handle the acceptance or the refusal."""
        pending = self._pending
        pending.wakers.clear()
        if pending.error is not None:
            for stream in self._streams:
                stream._refused(again(pending.error))
            return
        pending.answer(Accepted)
        unwanted: list[int] = []
        for stream, track in zip(self._streams, pending.tracks, strict=True):
            if stream.given_up:
                unwanted.append(track.request_id)
            stream._accepted(track)
        if unwanted and not pending.keyed:
            self._calls.link.send_soon(self._calls.session.cancel(unwanted))


class AsyncStreams:
    """Submits requests over a client's connection, which is kept open and restored after a loss until `close`.

    Requests submitted during a loss are sent on the next connection. Create it in the client's loop once the client is
    connected (`await client.wait_ready()`), so that the first request does not wait for the connection.

    Raises:
        Conflict: The client cannot be used here.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.calls = client._calls
        self.calls._check_usable()
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[PendingCommand, Submit]] = deque()
        self._pumping: asyncio.Handle | None = None
        self._polling: asyncio.Handle | None = None
        self._held = ExitStack()
        self._held.enter_context(self.calls.link.reconnector.wanting())
        self._held.enter_context(self.calls.link.reconnector.waiting())
        self.calls.link.wakers.add(self._flush)

    @property
    def connected(self) -> bool:
        """Return whether there is a connection now; if not, submitted requests wait for one."""
        return self.calls.session.welcome is not None

    @property
    def came_at(self) -> float:
        """Return when the current message was received, on time.monotonic.

        All streams with tokens in the message have the same time.
        """
        return self.calls.link.came_at

    def submit(self, prompt: Int32Array, options: RequestOptions, changed: Callable[[], None]) -> AsyncStream:
        """Send a request now, or as soon as there is room, without waiting.

        Args:
            prompt: [prompt_tokens] int32, not checked here.
            options: The options of the request.
            changed: Called when the request is accepted, when tokens arrive, and last at its end or error. Never called
                from within this call.

        Raises:
            KvforgeError: The error with which the coordinator refused this client.
        """
        return self._submit(prompt, 1, options, changed)[0]

    def submit_samples(
        self, prompt: Int32Array, count: int, options: RequestOptions, changed: Callable[[], None]
    ) -> tuple[AsyncStream, ...]:
        """Submit one prompt for `count` answers, which share its blocks; `changed` is called for each request."""
        return self._submit(prompt, answer_count(count), options, changed)

    def _submit(
        self, prompt: Int32Array, count: int, options: RequestOptions, changed: Callable[[], None]
    ) -> tuple[AsyncStream, ...]:
        link, session = self.calls.link, self.calls.session
        if (refused := link.reconnector.refused) is not None:
            raise again(refused)
        message = options.command(session.new_rid(), prompt, 0, count)
        pending = session.expect(message.rid, Accepted, "Submit", count)
        pending.keyed = bool(options.idempotency_key)
        streams = tuple(AsyncStream(self, changed, options.kept) for _ in range(count))
        _Submission(self.calls, pending, streams)
        self._unsent.append((pending, message))
        self._flush()
        self.pump_soon()  # sending may have swallowed the edge of an arrived message
        return streams

    def close(self) -> None:
        """Stop keeping the connection open. Running streams are no longer followed: cancel them first."""
        self.calls.link.wakers.discard(self._flush)
        for handle in (self._pumping, self._polling):
            if handle is not None:
                handle.cancel()
        self._held.close()

    def pump_soon(self) -> None:
        """Schedule one pump after the current callback."""
        if self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = None
        self.calls._pump()

    def _poll(self) -> None:
        self._polling = None
        self.calls._pump()

    def _flush(self) -> None:
        """Send unsent requests as far as there is room. Also called whenever the link makes progress."""
        unsent, link, session = self._unsent, self.calls.link, self.calls.session
        while unsent:
            pending, message = unsent[0]
            if pending.wakers:  # else the request was given up or has failed
                if not (session.has_room(pending.rid) and link.send(message)):
                    if self._polling is None and session.welcome is not None:  # new room is not signalled
                        self._polling = self._loop.call_later(ROOM_POLL_S, self._poll)
                    return
                pending.sent = message
            unsent.popleft()
