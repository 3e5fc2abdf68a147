"""What the tables do not hold, asked of the coordinator: one round a second at most, in a thread of its own.

A coordinator that hangs, or is away, then holds up neither a key nor the map of blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvforge.client.blocking import Client
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
    """Asks until it is closed; `told` is the newest answer. `selected` is the request that is explained first."""

    def __init__(self, client: Callable[[], Client]) -> None:
        self.told = Told()
        self.selected = 0
        self.paused = False
        self._client = client
        self._end = threading.Event()
        # A daemon: the end of the command does not wait for a coordinator that does not answer.
        self._thread = threading.Thread(target=self._run, name="asking", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join(ROUND_S)

    def _run(self) -> None:
        with self._client() as kv:
            while not self._end.is_set():
                if not self.paused:
                    try:
                        self.told = self._round(kv)
                    except KvforgeError as error:
                        last = self.told
                        self.told = Told(last.stats, last.health, last.requests, last.total, last.why, str(error))
                self._end.wait(ROUND_S)

    def _round(self, kv: Client) -> Told:
        stats, health, listed = kv.stats(), kv.health(), kv.requests(REQUESTS_MAX)
        alive = [row for row in listed.requests if row.state not in ENDED]
        ordered = sorted(alive, key=lambda row: (row.request_id != self.selected, row.state == "running", -row.age_us))
        why = {row.request_id: self.told.why[row.request_id] for row in alive if row.request_id in self.told.why}
        for row in [row for row in ordered if row.request_id == self.selected or row.state != "running"][
            :EXPLAINED_MAX
        ]:
            try:
                why[row.request_id] = " ".join(kv.explain(request=row.request_id).sentences)
            except NotFound:  # it has ended meanwhile
                why.pop(row.request_id, None)
        return Told(stats, health, tuple(listed.requests), listed.total, why)
