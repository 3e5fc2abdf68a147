"""A gateway's connection to a replica: a stand-in for `AsyncClient` and `AsyncStreams` with delayed messages.

Messages of one direction arrive in order. Messages in transit to a process that dies are lost. An unanswered submit is
repeated over the next connection and is not executed twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from kvforge.client.options import RequestOptions
from kvforge.protocol.errors import CoordinatorUnavailable, DeadlineExceeded, KvforgeError, StateLost
from kvforge.protocol.messages import Ended, Health, Int32Array, PrefixFound, Timings

from .replica import Job, SimulatedReplica

T = TypeVar("T")
GONE_S = 0.05  # delay until a lost connection is noticed
CLIENT_S = 1.0


class Stream:
    """A stand-in for `AsyncStream`; `job` is the replica's job once the request is accepted."""

    def __init__(self, connection: Connection, prompt: tuple[int, ...], options: RequestOptions, changed: Any) -> None:
        self._connection, self._changed = connection, changed
        self.prompt, self.options = prompt, options
        self.request_id, self.ended, self.error = 0, None, None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.prompt_logprobs: None = None
        self.wanted = True
        self.job: Job | None = None

    ended: Ended | None
    error: KvforgeError | None

    @property
    def done(self) -> bool:
        """Return whether the stream has ended or failed."""
        return self.ended is not None or self.error is not None

    def cancel(self) -> None:
        """Cancel the request."""
        self.wanted = False
        self._connection.gives_up(self)

    def leave(self) -> None:
        """Stop reading without cancelling the request."""
        self.wanted = False
        if self.job is not None:
            self.job.on_change = None

    def came(self, job: Job, tokens: list[int], ended: str) -> None:
        """Receive the replica's tokens, from the first one on."""
        if self.done:
            return
        self.job, self.request_id = job, job.number
        self.tokens.extend(tokens[len(self.tokens) :])
        if ended:
            self.ended = Ended(
                request_id=job.number,
                reason=ended,
                generated_tokens=len(tokens),
                prompt_tokens=len(self.prompt),
                cached_tokens=0,
                timings=Timings(),
            )
        if self.wanted:
            self._changed()

    def fails(self, error: KvforgeError) -> None:
        """End the stream with an error."""
        if not self.done:
            self.error = error
            if self.wanted:
                self._changed()


class Connection:
    """A gateway's connection for the gateway's lifetime; it is its own `streams`."""

    def __init__(self, replica: SimulatedReplica, lost_s: float, random: Random) -> None:
        self.replica, self._lost_s, self._random = replica, lost_s, random
        self.connected, self.closed = True, False
        self._life = replica.life
        self._to_s = self._from_s = 0.0
        self._open: dict[Stream, None] = {}
        self.stuck: list[Callable[[], None]] = []
        self._giving_up: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------------- client interface

    async def health(self) -> Health:
        """See `AsyncClient.health`."""
        return await self._ask(self.replica.health, max(self._lost_s, CLIENT_S))

    async def find_prefix(
        self, prompt: Int32Array, *, tenant: str, cache_salt: str, idempotency_key: str, timeout_s: float
    ) -> PrefixFound:
        """See `AsyncClient.find_prefix`."""
        tokens = tuple(prompt.tolist())
        return await self._ask(lambda: self.replica.find(tokens, tenant, idempotency_key), timeout_s)

    async def _ask(self, question: Callable[[], T], timeout_s: float) -> T:
        if not self.connected:
            raise CoordinatorUnavailable("the replica is down")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answered() -> None:
            found = question()
            self._reply(lambda: None if answer.done() else answer.set_result(found))

        self._send(answered)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s") from None

    def submit_samples(
        self, prompt: Int32Array, count: int, options: RequestOptions, changed: Any
    ) -> tuple[Stream, ...]:
        """See `AsyncStreams.submit_samples`."""
        streams = tuple(Stream(self, tuple(prompt.tolist()), options, changed) for _ in range(count))
        for stream in streams:
            self._open[stream] = None
            self._submit(stream)
        return streams

    def close(self) -> asyncio.Future[None]:
        """Close the client and its streams; return a completed future, which a caller may await."""
        self.closed = True
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        over.set_result(None)
        return over

    # --------------------------------------------------------------------------------------------------------- messages

    def _submit(self, stream: Stream) -> None:
        def arrives() -> None:
            if stream.job is None:
                try:
                    stream.job = self.replica.submit(stream.prompt, stream.options, self, lambda: self._deliver(stream))
                except KvforgeError as error:
                    refused = error
                    self._reply(lambda: self._ends(stream, refused))
                    return
            stream.job.owner, stream.job.on_change = self, lambda: self._deliver(stream)
            self._deliver(stream)

        self._send(arrives)

    def _deliver(self, stream: Stream) -> None:
        job = stream.job
        assert job is not None
        tokens, ended, error = [*job.tokens], job.ended, job.error
        if error is not None:
            self._reply(lambda: self._ends(stream, error))
            return
        self._reply(lambda: stream.came(job, tokens, ended))

    def gives_up(self, stream: Stream) -> None:
        """Cancel the request of a stream."""
        self._open.pop(stream, None)

        def arrives() -> None:
            if stream.job is not None:
                self.replica.cancel(stream.job)

        self._send(arrives)

    def _ends(self, stream: Stream, error: KvforgeError) -> None:
        self._open.pop(stream, None)
        stream.fails(error)

    def _send(self, arrives: Callable[[], None]) -> None:
        life = self.replica.life

        def there() -> None:
            if self.closed or not self.replica.up or self.replica.life != life:
                return
            if self.replica.hung:
                self.stuck.append(there)
            else:
                arrives()

        loop = asyncio.get_running_loop()
        self._to_s = max(self._to_s, loop.time() + self._delay())
        loop.call_at(self._to_s, there)

    def _reply(self, arrives: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        life = self.replica.life
        self._from_s = max(self._from_s, loop.time() + self._delay())
        loop.call_at(self._from_s, lambda: None if self.closed or life != self._life else arrives())

    def _delay(self) -> float:
        return self._random.uniform(0.0, self.replica.settings.delay_s)

    # ---------------------------------------------------------------------------------------------------- replica
    # faults

    def died(self) -> None:
        """Handle the death of the replica's process."""
        asyncio.get_running_loop().call_later(GONE_S, self._noticed)

    def _noticed(self) -> None:
        if self.closed or self._life == self.replica.life:
            return
        self.connected = False
        self.stuck.clear()
        if self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(self._lost_s, self._given_up)

    def _given_up(self) -> None:
        self._giving_up = None
        for stream in tuple(self._open):
            self._ends(stream, CoordinatorUnavailable("the replica has died"))

    def rose(self, journal_lost: bool) -> None:
        """Reconnect to the replica's next process."""
        asyncio.get_running_loop().call_later(GONE_S + self._delay(), self._again, self.replica.life, journal_lost)

    def _again(self, life: int, journal_lost: bool) -> None:
        if self.closed or life != self.replica.life or not self.replica.up:
            return
        self._life, self.connected = life, True
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        for stream in tuple(self._open):
            if stream.done:
                self._open.pop(stream)
            elif journal_lost and stream.request_id:
                self._ends(stream, StateLost("the replica's journal is lost", ""))
            else:
                if journal_lost:
                    stream.job = None
                self._submit(stream)
        self.replica.forget(self, {stream.job for stream in self._open})

    def free(self) -> None:
        """Deliver the messages that waited while the replica hung."""
        stuck, self.stuck = self.stuck, []
        for arrives in stuck:
            arrives()
