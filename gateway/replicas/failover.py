"""One submission: placed on a replica, monitored, and placed again when that replica is lost or drains.

The gateway fixes the seed before the first submission, so every replica draws the same tokens. With an idempotency key
the seed is derived from it: another gateway, or this one after a restart, submits the same request. Without one it is
random.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from kvforge import SamplingParams
from kvforge.client.aio import AsyncStream
from kvforge.client.options import RequestOptions
from kvforge.protocol.errors import (
    CapacityExceeded,
    CoordinatorUnavailable,
    Draining,
    InternalError,
    KvforgeError,
    NotReady,
    QueueFull,
    RequestNotFound,
    StateLost,
)
from kvforge.protocol.messages import Int32Array
from kvforge.protocol.steady_clock import monotonic
from kvforge.routing import seed_of

from .replica import Replica
from .stream import MovingStream

# The replica is lost or drains: another one computes the request.
LOST = (CoordinatorUnavailable, Draining, NotReady, RequestNotFound, StateLost)
# Refused at admission: another replica may have room.
FULL = (*LOST, CapacityExceeded, QueueFull)
MOVES_MAX = 16
WAIT_S, AGAIN_S = 30.0, 0.1


class ReplicaRouter(Protocol):
    """The router."""

    async def choose(
        self, prompt: Int32Array, options: RequestOptions, session: str, without: frozenset[str]
    ) -> Replica | None:
        """Return the replica for a request, to be used before the next `await`; None if no replica is available."""

    @property
    def reason(self) -> str:
        """Why no replica is available."""

    @property
    def patient_until(self) -> float:
        """Until when (monotonic clock) it is worth waiting for a replica."""


class FailoverRequest:
    """The requests of one submission.

    Args:
        replicas: The router.
        prompt: [prompt_tokens] int32.
        count: The number of answers.
        options: The options of the request.
        changed: Called when there is news of an answer, never from within a call.
        session: Requests of one session go to the same replica.
    """

    def __init__(
        self,
        replicas: ReplicaRouter,
        prompt: Int32Array,
        count: int,
        options: RequestOptions,
        changed: Callable[[], None],
        session: str,
    ) -> None:
        self._replicas, self._prompt, self._session = replicas, prompt, session
        self._options, self._changed = seeded(options), changed
        self.streams = tuple(MovingStream(self._given_up) for _ in range(count))
        self._at: Replica | None = None
        self._moves = 0
        self._tried: frozenset[str] = frozenset()
        self._refused: KvforgeError | None = None  # the first refusal
        self._looking: asyncio.Handle | None = None
        self._placing: asyncio.Task[None] | None = None
        self._place(frozenset())

    def evicted(self, reason: str) -> None:
        """Move to another replica; see `RoutedRequest`."""
        self._move(CoordinatorUnavailable(f"replica unreachable: {reason}"))

    # --------------------------------------------------------------------------------------------------------- placing

    def _place(self, without: frozenset[str], in_s: float = 0.0) -> None:
        if self._placing is None:
            self._placing = asyncio.ensure_future(self._placed(without, in_s))

    async def _placed(self, without: frozenset[str], in_s: float) -> None:
        """Submit to some replica. Wait for one if the request already ran, or if one was ready a moment ago."""
        await asyncio.sleep(in_s)
        began = monotonic()
        try:
            while not await self._try(without):
                until = began + WAIT_S if self._accepted else self._replicas.patient_until
                if (self._refused is not None and not self._accepted) or monotonic() >= until:
                    raise self._refused or NotReady(f"no replica is ready: {self._replicas.reason}")
                await asyncio.sleep(AGAIN_S)
                without = frozenset()
        except KvforgeError as failure:
            self._placing = None
            self._fail(failure)
        except Exception as failure:  # noqa: BLE001 - otherwise the reader would wait forever
            self._placing = None
            self._fail(InternalError(f"cannot submit the request to a replica: {failure!r}"))

    async def _try(self, without: frozenset[str]) -> bool:
        replica = await self._replicas.choose(self._prompt, self._options, self._session, without)
        if replica is None:
            return False
        self._placing = None
        if not any(stream.wanted and not stream.done for stream in self.streams) and not self._options.kept:
            return True
        inner = replica.streams.submit_samples(self._prompt, len(self.streams), self._options, self._look_soon)
        self._at = replica
        replica.guests[self] = None
        for stream, own in zip(self.streams, inner, strict=True):
            self._give(stream, own, replica.name)
        self._drop_if_over()
        return True

    def _give(self, stream: MovingStream, own: AsyncStream, replica: str) -> None:
        if stream.wanted and not stream.done:
            stream.follow(own, replica)
        elif self._options.kept:
            own.leave()
        else:
            own.cancel()

    # --------------------------------------------------------------------------------------------------------- reading

    def _look_soon(self) -> None:
        """Schedule one look for all news of this loop iteration."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = None
        news = False
        for stream in self.streams:
            news |= stream.look()
        broken = next((error for stream in self.streams if (error := stream.broken) is not None), None)
        if broken is not None:
            if isinstance(broken, FULL):
                self._move(broken)
            else:
                for stream in self.streams:
                    if (error := stream.broken) is not None:
                        stream.fail(error)
                news = True
        self._drop_if_over()
        if news:
            self._changed()

    def _move(self, error: KvforgeError) -> None:
        """Leave the current replica."""
        if (at := self._at) is None or self._placing is not None:
            return
        at.guests.pop(self, None)
        self._at = None
        if isinstance(error, (Draining, NotReady)):
            at.refused(error.message)
        for stream in self.streams:
            stream.part(kept=self._options.kept)
        # An accepted request is never refused later: if all queues are full, it waits as long as its reader does.
        waits = self._accepted and isinstance(error, QueueFull)
        self._moves += not waits
        if self._moves > MOVES_MAX:
            self._fail(error)
        elif self._accepted:
            self._place(frozenset({at.name}), AGAIN_S if waits else 0.0)
        else:
            self._refused = self._refused or error
            self._tried |= {at.name}
            self._place(self._tried)

    def _fail(self, error: KvforgeError) -> None:
        for stream in self.streams:
            stream.fail(error)
        self._drop_if_over()
        self._changed()

    @property
    def _accepted(self) -> bool:
        return any(stream.accepted for stream in self.streams)

    # ------------------------------------------------------------------------------------------------------------ ends

    def _given_up(self) -> None:
        if not any(stream.wanted for stream in self.streams) and self._placing is not None and not self._options.kept:
            self._placing.cancel()
            self._placing = None
        self._drop_if_over()

    def _drop_if_over(self) -> None:
        if self._at is not None and all(stream.done or not stream.wanted for stream in self.streams):
            self._at.guests.pop(self, None)
            self._at = None


def seeded(options: RequestOptions) -> RequestOptions:
    """Return the options with a fixed seed, the same for every replica."""
    sampling = options.sampling if options.sampling is not None else SamplingParams()
    if sampling.seed is not None:
        return options
    seed = seed_of(options.tenant, options.idempotency_key) if options.idempotency_key else secrets.randbits(64)
    return replace(options, sampling=replace(sampling, seed=seed))
