"""The replicas together: what a client of one coordinator is for a gateway, for several.

Nothing that it decides by outlives the answers that it asked for: a gateway that starts knows at its first request what
one that has run for a year knows.
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
from kvforge.routing import Router, ask_and_choose

from .replica import Replica
from .stream import MovingStream
from .work import Work


class Fleet:
    """answer_s: so long a replica has to answer what it holds; one that does not is left out until it is heard of.
    lost_s: so long without an answer, its requests are computed elsewhere."""

    def __init__(self, places: Mapping[str, Place], *, answer_s: float, lost_s: float) -> None:
        self._answer_s, self._lost_s = answer_s, lost_s
        self.replicas = [Replica(name, place, lost_s) for name, place in places.items()]
        self._unknown = list(self.replicas)  # who may hold what was asked for before this gateway began
        self._router = Router(places)
        self._watching: asyncio.TaskGroup | None = None
        self._served = -math.inf  # when one did last
        self.news = asyncio.Event()

    @property
    def health(self) -> Health | None:
        """Of the first one that is ready: all that get requests serve the same model."""
        return next((replica.health for replica in self.replicas if replica.ready), None)

    @property
    def reason(self) -> str:
        """Why no request would be served now; "": one would."""
        if any(map(self._serves, self.replicas)):
            return ""
        return "; ".join(f"{replica.name}: {self.why_not(replica)}" for replica in self.replicas)

    @property
    def patient_until(self) -> float:
        """See `Replicas`: who is not heard for a moment may be back in the next."""
        self._note_service()
        return self._served + self._lost_s

    def why_not(self, replica: Replica) -> str:
        """Why it gets nothing; "": it does."""
        if replica.reason:
            return replica.reason
        if not replica.ready:
            return "its connection was lost"
        return "" if self._serves(replica) else "it serves another model than the first that is ready"

    def told(self) -> dict[str, Any]:
        """For /health: each of them."""
        return {
            replica.name: {"ready": not (reason := self.why_not(replica)), "reason": reason}
            for replica in self.replicas
        }

    async def watch(self) -> None:
        """Looks after all of them until it is cancelled."""
        async with asyncio.TaskGroup() as self._watching:
            for replica in self.replicas:
                self._watch(replica)
            await asyncio.Event().wait()  # a group of which all have left is not over: others may come

    def use(self, places: Mapping[str, Place]) -> None:
        """From now on it is these; at least one. Streams on one that is not among them go on there until they end, or
        until it hands them back or is lost: it gets nothing new."""
        assert places, "a gateway of replicas stays one"
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
        if self._watching is not None:  # else `watch` begins with all of them
            self._watching.create_task(replica.watch(self._looked))

    def _looked(self) -> None:
        self._note_service()
        self.news.set()

    def _note_service(self) -> None:
        if any(map(self._serves, self.replicas)):
            self._served = monotonic()

    def of(self, session: str) -> Session:
        """Where the requests of a session are submitted. "": they have nothing to do with each other."""
        return Session(self, session)

    def samples(
        self,
        prompt: Int32Array,
        count: int,
        options: RequestOptions,
        changed: Callable[[], None],
        session: str = "",
    ) -> tuple[MovingStream, ...]:
        """As `AsyncStreams.samples`. session: what goes together."""
        return Work(self, prompt, count, options, changed, session).streams

    async def choose(
        self, prompt: Int32Array, options: RequestOptions, session: str, without: frozenset[str]
    ) -> Replica | None:
        """See `Replicas`."""
        await self._know_all()
        # One with a key may run at who is slow to answer, and to compute it again is dearer than to wait.
        answer_s = max(self._answer_s, self._lost_s) if options.key else self._answer_s
        while True:
            able = {r.name: r for r in self.replicas if self._serves(r) and r.name not in without}
            clients = {name: replica.client for name, replica in able.items()}
            chosen = await ask_and_choose(self._router, clients, prompt, options, answer_s=answer_s, session=session)
            for name in chosen.silent:
                able[name].silent()
            if chosen.name is None:
                return None
            if not (replica := able[chosen.name]).leaving:  # else it was taken off the list meanwhile
                return replica

    async def _know_all(self) -> None:
        """Returns when everybody that was there from the beginning has answered, or has not for too long: a request
        with a key may run where nobody has looked yet, or at who was only slow to be connected."""
        if self._unknown and self._watching is not None:
            with suppress(TimeoutError):
                async with steady_timeout(self._lost_s):
                    for replica in tuple(self._unknown):
                        await replica.answered.wait()
        self._unknown.clear()

    def _serves(self, replica: Replica) -> bool:
        """Whether it is ready, with the model of the first that is."""
        if not replica.ready or replica.health is None or replica.health.model is None:
            return False
        first = self.health
        assert first is not None, "one is ready"
        return first.model is not None and first.model.fingerprint == replica.health.model.fingerprint


class Session:
    """The replicas, for requests that belong together."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def samples(
        self, prompt: Int32Array, count: int, options: RequestOptions, changed: Callable[[], None]
    ) -> tuple[MovingStream, ...]:
        """As `AsyncStreams.samples`."""
        return self._fleet.samples(prompt, count, options, changed, self._name)
