"""What the tables do not hold, asked of the coordinator: one round a second at most, beside the loop that draws.

A coordinator that hangs, or is away, then holds up neither a key nor the map of blocks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from kvforge.client.aio import AsyncClient
from kvforge.protocol.errors import KvforgeError, NotFound
from kvforge.protocol.messages import Health, RequestRow, Stats

ROUND_S = 1.0
REQUESTS_MAX = 200
EXPLAINED_MAX = 2
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


class Asking:
    """`told` is the newest answer. `selected` is the request that is explained first."""

    def __init__(self, kv: AsyncClient) -> None:
        self.told = Told()
        self.selected = 0
        self.paused = False
        self._kv = kv

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
        alive = [row for row in listed.requests if row.state not in ENDED]
        ordered = sorted(alive, key=lambda row: (row.request_id != self.selected, row.state == "running", -row.age_us))
        asked = [row for row in ordered if row.request_id == self.selected or row.state != "running"]
        why = {row.request_id: self.told.why[row.request_id] for row in alive if row.request_id in self.told.why}
        for row in asked[:EXPLAINED_MAX]:
            try:
                why[row.request_id] = " ".join((await kv.explain(request=row.request_id)).sentences)
            except NotFound:  # it has ended meanwhile
                why.pop(row.request_id, None)
        return Told(stats, health, tuple(listed.requests), listed.total, why)
