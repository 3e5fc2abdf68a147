"""What the tables do not hold, asked of the coordinator: one round a second at most, beside the loop that draws.

Why a request waits is asked for a few requests each round in turn. An answer is shown while the request is in the same
state, and for a few seconds: an older one may be wrong by now.

A coordinator that hangs, or is away, then holds up neither a key nor the map of blocks.
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
    """One round's answers. why: what `explain` says of requests, by their ids. problem: why there are no newer ones."""

    stats: Stats | None = None
    health: Health | None = None
    requests: tuple[RequestRow, ...] = ()
    total: int = 0
    why: dict[int, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a request waits: the sentences, the state that it was in, and when it was asked."""

    text: str
    state: str
    asked_s: float


class Asking:
    """`told` is the newest answer. `selected` is the request that is explained first."""

    def __init__(self, kv: AsyncClient, clock: Callable[[], float] = monotonic) -> None:
        """clock: in seconds."""
        self.told = Told()
        self.selected = 0
        self.paused = False
        self._kv, self._clock = kv, clock
        self._reasons: dict[int, Reason] = {}

    async def run(self) -> None:
        """Asks until it is cancelled."""
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
            except NotFound:  # it has ended meanwhile
                self._reasons.pop(row.request_id, None)
            else:
                self._reasons[row.request_id] = Reason(" ".join(explained.sentences), row.state, now_s)
        why = {request: reason.text for request, reason in self._reasons.items()}
        return Told(stats, health, tuple(listed.requests), listed.total, why)

    def _asked_s(self, request: int) -> float:
        """When it was asked for last; before all others where it never was."""
        return self._reasons[request].asked_s if request in self._reasons else -1.0
