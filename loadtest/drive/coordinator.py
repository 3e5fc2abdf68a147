"""The target for a coordinator over ZeroMQ. Requests survive a restart of the coordinator, as for any client."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import lru_cache
from time import monotonic

from kvforge import AsyncClient, SamplingParams
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
from .target import TargetRequest

# Errors that count as a refusal at admission; any other error is a failure.
DOOR = (CapacityExceeded, InvalidRequest, Draining, NotReady)
READY_S = 30.0
# How long to wait for a restarting coordinator; requests also have their own time limit.
RECONNECT_S = 60.0
# Requests with equal options share their validation and encoding, which takes 20 us each.
OPTIONS_MAX = 4096


class CoordinatorTarget:
    """A `Target` for one coordinator.

    Args:
        endpoint: As for `kvforge.Client`.
        clients: The number of connections of this process.
        server_key: As for `kvforge.Client`.
        key_file: As for `kvforge.Client`.
    """

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
        """Connect each client and wait until the coordinator is ready. Raises what `AsyncClient.wait_ready` raises."""
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
        """Disconnect; the coordinator cancels running requests."""
        await self._stack.aclose()

    def send(
        self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
    ) -> Callable[[], None]:
        """Send a request; see `Target`."""
        streams = self._streams[ask.client % len(self._streams)]
        one = StreamFollower(outcome, start, ended, streams, self._deadlines)
        try:
            options = options_of(ask.output_tokens, ask.tenant, ask.temperature, ask.seed if ask.temperature else 0)
            one.follow(streams.submit(ask.prompt, options, one.changed), ask.until)
        except KvforgeError as error:
            one.failed(error)
        return one.interrupt


class StreamFollower:
    """A request in flight; it fills in its outcome."""

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
        """Read the stream of a submitted request until its end or `until`."""
        self._stream = stream
        self._entry = self._deadlines.add(until, self._late)

    def changed(self) -> None:
        """Record an acceptance, new tokens or the end."""
        stream, outcome = self._stream, self._outcome
        assert stream is not None, "follow comes first"
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
        """Record the error that ended the request or prevented it."""
        late, refused = isinstance(error, DeadlineExceeded), not self._outcome.request_id and isinstance(error, DOOR)
        state = TIMED_OUT if late else REFUSED if refused else FAILED
        self._end(state, error.code, error.message, monotonic() - self._start)

    def interrupt(self) -> None:
        """Cancel the request."""
        self._give_up(INTERRUPTED, "", "")

    def _late(self) -> None:
        self._give_up(TIMED_OUT, DeadlineExceeded.code, "the request exceeded the driver's time limit")

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
    """Return the options of a request.

    Raises:
        InvalidRequest: An option is invalid.
    """
    sampling = SamplingParams(temperature=temperature, seed=seed, ignore_eos=True)
    return RequestOptions(max_tokens=output_tokens, sampling=sampling, tenant=tenant)
