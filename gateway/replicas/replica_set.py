"""The replicas, behind the interface of a single coordinator's client.

Routing state is derived from the replicas' recent answers alone: a new gateway routes its first request as one that has
run for a year.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvforge.client.options import RequestOptions
from kvforge.gateway.config import Replica as Place
from kvforge.protocol.messages import Health, Int32Array
from kvforge.protocol.steady_clock import monotonic
from kvforge.protocol.steady_timeout import steady_timeout
from kvforge.routing import Router, choose_replica

from .failover import FailoverRequest
from .replica import Replica
from .stream import MovingStream


class ReplicaSet:
    """The replicas of a gateway.

    Args:
        places: The replicas by name.
        answer_s: How long a replica may take to report its cached prefix; a slower one is skipped until it answers
            again.
        lost_s: How long a replica may be unreachable before its requests move to another one.
    """

    def __init__(self, places: Mapping[str, Place], *, answer_s: float, lost_s: float) -> None:
        self._answer_s, self._lost_s = answer_s, lost_s
        self.replicas = [Replica(name, place, lost_s) for name, place in places.items()]
        self._unknown = list(self.replicas)  # may run requests from before this gateway started
        self._router = Router(places)
        self._watching: asyncio.TaskGroup | None = None
        self._served = -math.inf  # when a replica was last ready
        self.news = asyncio.Event()

    @property
    def health(self) -> Health | None:
        """The health of the first ready replica; all replicas that get requests serve its model."""
        return next((replica.health for replica in self.replicas if replica.ready), None)

    @property
    def reason(self) -> str:
        """Why every replica is unavailable; "" if one is ready."""
        if any(map(self._serves, self.replicas)):
            return ""
        return "; ".join(f"{replica.name}: {self.why_not(replica)}" for replica in self.replicas)

    @property
    def patient_until(self) -> float:
        """Return until when to wait for a replica: one that is unreachable may soon be back. See `ReplicaRouter`."""
        self._note_service()
        return self._served + self._lost_s

    def why_not(self, replica: Replica) -> str:
        """Return why a replica gets no requests; "" if it does."""
        if replica.reason:
            return replica.reason
        if not replica.ready:
            return "connection lost"
        return "" if self._serves(replica) else "serves a different model than the first ready replica"

    def states(self) -> dict[str, Any]:
        """Return the state of each replica, for /health."""
        return {
            replica.name: {"ready": not (reason := self.why_not(replica)), "reason": reason}
            for replica in self.replicas
        }

    async def watch(self) -> None:
        """Monitor the replicas until cancelled."""
        async with asyncio.TaskGroup() as self._watching:
            for replica in self.replicas:
                self._watch(replica)
            await asyncio.Event().wait()  # keep the task group open when all replicas were removed: others may be added

    def use(self, places: Mapping[str, Place]) -> None:
        """Replace the set of replicas by a non-empty one.

        A removed replica gets no new requests. Its streams continue until they end, or until it drains or is lost.
        """
        assert places, "at least one replica"
        staying = {replica.name: replica for replica in self.replicas if places.get(replica.name) == replica.place}
        for replica in self.replicas:
            if replica.name not in staying:
                replica.leave()
        coming = {name: Replica(name, place, self._lost_s) for name, place in places.items() if name not in staying}
        self.replicas = [(staying | coming)[name] for name in places]
        self._router.use(places)
        for replica in coming.values():
            self._watch(replica)
        self.news.set()

    def _watch(self, replica: Replica) -> None:
        if self._watching is not None:  # otherwise `watch` starts with all replicas
            self._watching.create_task(replica.watch(self._looked))

    def _looked(self) -> None:
        self._note_service()
        self.news.set()

    def _note_service(self) -> None:
        if any(map(self._serves, self.replicas)):
            self._served = monotonic()

    def of(self, session: str) -> ReplicaSession:
        """Return the submission interface of a session; "" if the requests are unrelated."""
        return ReplicaSession(self, session)

    def submit_samples(
        self,
        prompt: Int32Array,
        count: int,
        options: RequestOptions,
        changed: Callable[[], None],
        session: str = "",
    ) -> tuple[MovingStream, ...]:
        """Submit a prompt, as `AsyncStreams.submit_samples` does. Requests of one session go to the same replica."""
        return FailoverRequest(self, prompt, count, options, changed, session).streams

    async def choose(
        self, prompt: Int32Array, options: RequestOptions, session: str, without: frozenset[str]
    ) -> Replica | None:
        """Choose a replica; see `ReplicaRouter`."""
        await self._wait_for_first_answers()
        # A request with a key may already run on a slow replica; waiting is cheaper than computing it again.
        answer_s = max(self._answer_s, self._lost_s) if options.idempotency_key else self._answer_s
        while True:
            able = {r.name: r for r in self.replicas if self._serves(r) and r.name not in without}
            clients = {name: replica.client for name, replica in able.items()}
            chosen = await choose_replica(self._router, clients, prompt, options, answer_s=answer_s, session=session)
            for name in chosen.silent:
                able[name].silent()
            if chosen.name is None:
                return None
            if not (replica := able[chosen.name]).leaving:  # otherwise it was removed while we asked
                return replica

    async def _wait_for_first_answers(self) -> None:
        """Wait until each initial replica has answered or timed out.

        A request with a key may run on a replica that was not asked yet, or was slow to connect.
        """
        if self._unknown and self._watching is not None:
            with suppress(TimeoutError):
                async with steady_timeout(self._lost_s):
                    for replica in tuple(self._unknown):
                        await replica.answered.wait()
        self._unknown.clear()

    def _serves(self, replica: Replica) -> bool:
        """Return whether a replica is ready with the model of the first ready one."""
        if not replica.ready or replica.health is None or replica.health.model is None:
            return False
        first = self.health
        assert first is not None, "one is ready"
        return first.model is not None and first.model.fingerprint == replica.health.model.fingerprint


class ReplicaSession:
    """The replicas, for the requests of one session."""

    def __init__(self, fleet: ReplicaSet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def submit_samples(
        self, prompt: Int32Array, count: int, options: RequestOptions, changed: Callable[[], None]
    ) -> tuple[MovingStream, ...]:
        """Submit a prompt, as `AsyncStreams.submit_samples` does."""
        return self._fleet.submit_samples(prompt, count, options, changed, self._name)
