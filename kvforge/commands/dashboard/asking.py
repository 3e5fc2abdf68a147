"""Queries the coordinator for data that the tables do not hold, at most one round a second, beside the drawing loop.

Each round also asks why a few requests wait, in turn. A reason is shown for a few seconds while the request is in the
same state; an older one may be outdated.

A coordinator that hangs or is away therefore delays neither keys nor the map of blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic

from kvforge.client.aio import AsyncClient
from kvforge.protocol.errors import KvforgeError, NotFound
from kvforge.protocol.messages import Health, RequestRow, Stats

ROUND_S = 1.0
REQUESTS_MAX = 200
EXPLAINED_MAX = 2
STALE_S = 10.0
ENDED = ("finished", "failed", "cancelled", "expired")


@dataclass(frozen=True)
class Told:
    """The answers of one round.

    Attributes:
        why: The explanations of requests, by id.
        problem: Why there are no newer answers.
    """

    stats: Stats | None = None
    health: Health | None = None
    requests: tuple[RequestRow, ...] = ()
    total: int = 0
    why: dict[int, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a request waits: the sentences, the request's state, and the time of the query."""

    text: str
    state: str
    asked_s: float


class Asking:
    """Queries the coordinator in rounds.

    Attributes:
        told: The newest answers.
        selected: The request to explain first.
        paused: Whether to skip rounds.
    """

    def __init__(self, kv: AsyncClient, clock: Callable[[], float] = monotonic) -> None:
        """Create it without answers.

        Args:
            kv: The client.
            clock: The time in seconds.
        """
        self.told = Told()
        self.selected = 0
        self.paused = False
        self._kv, self._clock = kv, clock
        self._reasons: dict[int, Reason] = {}

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            if not self.paused:
                try:
                    self.told = await self._round()
                except KvforgeError as error:
                    self.told = replace(self.told, problem=str(error))
            await asyncio.sleep(ROUND_S)

    async def _round(self) -> Told:
        kv = self._kv
        stats, health, listed = await kv.stats(), await kv.health(), await kv.requests(REQUESTS_MAX)
        alive = {row.request_id: row for row in listed.requests if row.state not in ENDED}
        known, now_s = self._reasons, self._clock()
        self._reasons = {
            request: reason
            for request, reason in known.items()
            if request in alive and alive[request].state == reason.state and now_s - reason.asked_s < STALE_S
        }
        asked = [row for row in alive.values() if row.request_id == self.selected or row.state != "running"]
        asked.sort(key=lambda row: (row.request_id != self.selected, self._asked_s(row.request_id), -row.age_us))
        for row in asked[:EXPLAINED_MAX]:
            try:
                explained = await kv.explain(request=row.request_id)
            except NotFound:  # the request has ended meanwhile
                self._reasons.pop(row.request_id, None)
            else:
                self._reasons[row.request_id] = Reason(" ".join(explained.sentences), row.state, now_s)
        why = {request: reason.text for request, reason in self._reasons.items()}
        return Told(stats, health, tuple(listed.requests), listed.total, why)

    def _asked_s(self, request: int) -> float:
        """Return the time of the last query for a request, before all others if there was none."""
        return self._reasons[request].asked_s if request in self._reasons else -1.0
