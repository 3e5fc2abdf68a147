"""A coordinator over ZeroMQ, as its clients reach it; killed and started again it goes on, as it does for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import lru_cache
from time import monotonic

from kvforge import AsyncClient, Sampling
from kvforge.client.aio import AsyncStream, AsyncStreams
from kvforge.client.options import RequestOptions
from kvforge.protocol.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvforgeError,
    NotReady,
)

from .deadlines import Deadlines
from .outcome import FAILED, FINISHED, INTERRUPTED, REFUSED, TIMED_OUT, Outcome
from .target import Ask

# What a request is refused with at the door; anything else that goes wrong is a failure.
DOOR = (CapacityExceeded, InvalidRequest, Draining, NotReady)
READY_S = 30.0
# A coordinator that was killed is looked for so long; requests have their own time beside that.
RECONNECT_S = 60.0
# Requests that differ in their prompts alone share what is checked and packed: 20 us each.
OPTIONS_MAX = 4096


class CoordinatorTarget:
    """A `Target`. endpoint, server_key, key_file: as for `kvforge.Client`. clients: connections of this process."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        clients: int = 1,
        server_key: str | None = None,
        key_file: str | None = None,
    ) -> None:
        self._clients = [
            AsyncClient(endpoint, reconnect_s=RECONNECT_S, server_key=server_key, key_file=key_file)
            for _ in range(clients)
        ]
        self._streams: list[AsyncStreams] = []
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        """Connects each client and waits until a request would be served. Raises what `AsyncClient.wait_ready` does."""
        try:
            self._deadlines = Deadlines()
            self._stack.callback(self._deadlines.close)
            for client in self._clients:
                await self._stack.enter_async_context(client)
                await client.wait_ready(READY_S)
                streams = AsyncStreams(client)
                self._stack.callback(streams.close)
                self._streams.append(streams)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """The coordinator cancels what still runs."""
        await self._stack.aclose()

    def send(self, ask: Ask, outcome: Outcome, start: float, ended: Callable[[Outcome], None]) -> Callable[[], None]:
        """See `Target`."""
        streams = self._streams[ask.client % len(self._streams)]
        one = Following(outcome, start, ended, streams, self._deadlines)
        try:
            options = options_of(ask.output_tokens, ask.tenant, ask.temperature, ask.seed if ask.temperature else 0)
            one.follow(streams.submit(ask.prompt, options, one.changed), ask.until)
        except KvforgeError as error:
            one.failed(error)
        return one.interrupt


class Following:
    """One request under way; it writes its outcome."""

    __slots__ = ("_deadlines", "_ended", "_entry", "_outcome", "_seen", "_start", "_stream", "_streams")

    def __init__(
        self,
        outcome: Outcome,
        start: float,
        ended: Callable[[Outcome], None],
        streams: AsyncStreams,
        deadlines: Deadlines,
    ) -> None:
        self._outcome, self._start, self._streams, self._deadlines = outcome, start, streams, deadlines
        self._ended: Callable[[Outcome], None] | None = ended
        self._stream: AsyncStream | None = None
        self._entry = (-1, -1)
        self._seen = 0

    def follow(self, stream: AsyncStream, until: float) -> None:
        self._stream = stream
        self._entry = self._deadlines.add(until, self._late)

    def changed(self) -> None:
        """Accepted, tokens or the end."""
        stream, outcome = self._stream, self._outcome
        assert stream is not None, "never called before it is returned"
        now_s, count, seen = self._streams.came_at - self._start, len(stream.tokens), self._seen
        self._seen = count
        if count == seen + 1:
            outcome.tokens_s.append(now_s)
        elif count > seen:
            outcome.tokens_s.extend([now_s] * (count - seen))
        if not outcome.request_id and stream.request_id:
            outcome.request_id, outcome.accepted_s = stream.request_id, now_s
        if stream.error is not None:
            self.failed(stream.error)
        elif (done := stream.ended) is not None:
            outcome.cached_tokens, outcome.timings = done.cached_tokens, done.timings
            whole = count == outcome.asked_tokens
            self._end(FINISHED if whole else FAILED, "" if whole else done.reason, "", now_s)

    def failed(self, error: KvforgeError) -> None:
        """It ended with this error, or never began."""
        late, refused = isinstance(error, DeadlineExceeded), not self._outcome.request_id and isinstance(error, DOOR)
        state = TIMED_OUT if late else REFUSED if refused else FAILED
        self._end(state, error.code, error.message, monotonic() - self._start)

    def interrupt(self) -> None:
        """Gives it up."""
        self._give_up(INTERRUPTED, "", "")

    def _late(self) -> None:
        self._give_up(TIMED_OUT, DeadlineExceeded.code, "it had not ended in the time that the driver gave it")

    def _give_up(self, state: str, code: str, message: str) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._end(state, code, message, monotonic() - self._start)

    def _end(self, state: str, code: str, message: str, ended_s: float) -> None:
        ended, self._ended = self._ended, None
        if ended is None:
            return
        outcome, stream = self._outcome, self._stream
        self._deadlines.remove(self._entry)
        if stream is not None:
            outcome.tokens = array("i", stream.tokens)
            self._stream = None
        outcome.state, outcome.code, outcome.message = state, code, message
        outcome.ended_s = ended_s
        ended(outcome)


@lru_cache(OPTIONS_MAX)
def options_of(output_tokens: int, tenant: str, temperature: float, seed: int) -> RequestOptions:
    """Everything but the prompt. Raises InvalidRequest."""
    sampling = Sampling(temperature=temperature, seed=seed, ignore_eos=True)
    return RequestOptions(max_tokens=output_tokens, sampling=sampling, tenant=tenant)
