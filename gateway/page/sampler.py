"""Samples the service for all viewers of this process together, while there are any.

It reads the shared tables twice a second, at no cost to the coordinator, and queries the rest once a second. Each
viewer waits for the next sample and takes what is new to it. A slow viewer gets larger updates less often, and nothing
queues up in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import msgspec

from kvforge import AsyncClient, Tables
from kvforge.gateway.storage import Storage
from kvforge.gateway.storage.totals import storage_totals
from kvforge.protocol.errors import InvalidRequest, KvforgeError, NotFound, QueueFull, Unavailable
from kvforge.protocol.messages import RequestList, RequestRow

from . import documents
from .blocks import BLOCKS_MAX, BlockMap
from .disconnected_workers import DisconnectedWorkers
from .document_store import DocumentStore, event
from .event_log import EventLog
from .history import EVERY_S, History, Point
from .latency import Latencies
from .view import SILENT_S, ServiceState, Waiting, summary

LOOK_S, ASK_S, STORED_S = 0.5, 1.0, 5.0
LARGE, LARGE_LOOK_S = 32_768, 1.0  # larger maps are sampled less often
VIEWERS_MAX = 32
AGAIN_MS = 5000  # Retry-After of a refused viewer
LISTED_MAX = 1000
EXPLAINED_MAX = 2
ANSWER_S = 2.0
GAP_S = 10.0  # a reloaded page is no gap in the log of events
RATE_LOOKS = 5  # rates cover this many samples
LIVES = ("journal_bytes", "journal_records_total", "restarts_total", "workers_lost_total", "workers_returned_total")
log = logging.getLogger("kvforge.gateway.page")


@dataclass(slots=True)
class ViewerPosition:
    """The last board change, frame and point that a viewer has."""

    document: int = 0
    frame: int = 0
    point: int = 0


class Viewer:
    """The event stream of one page, a `http.stream.Taken`.

    It ends if sampling fails or the process shuts down; the page then reconnects and sampling starts anew.
    """

    def __init__(self, sampler: Sampler, work: asyncio.Task[None], hello: bytes) -> None:
        self._sampler, self._work, self._hello, self._seen = sampler, work, hello, ViewerPosition()

    @property
    def over(self) -> bool:
        """Whether the stream has ended."""
        return not self._sampler.works(self._work) or self._sampler.ending()

    def pop_events(self) -> bytes:
        """Return the events that are new to this viewer."""
        hello, self._hello = self._hello, b""
        return hello + self._sampler.news(self._seen)

    async def more(self) -> None:
        """Wait for the next sample."""
        await self._sampler.sampled()


class Sampler:
    """The sampler of a process.

    Args:
        client: Returns the client of the displayed coordinator.
        ending: Whether this process shuts down.
        storage: The storage, if there is one.
    """

    def __init__(
        self, client: Callable[[], AsyncClient], ending: Callable[[], bool], storage: Storage | None = None
    ) -> None:
        self._storage = storage
        self._client, self.ending = client, ending
        self._tables: Tables | None = None
        self._map, self._documents, self._history = BlockMap(), DocumentStore(), History()
        self._event_log, self._latencies, self._view = EventLog(), Latencies(), ServiceState()
        self._disconnected = DisconnectedWorkers()
        self._came_ms: dict[int, int] = {}
        self._counts: deque[tuple[float, int, int]] = deque(maxlen=RATE_LOOKS)
        self._gauges: dict[str, int] = {}
        self._map_problem, self._listed_max = "", LISTED_MAX
        self._upto = 0  # the number of blocks in all pools
        self._looked_at = (-1, -1)  # turns and blocks when the map was last read
        self._map_due = self._point_due = self._gone_since = self._asked = 0.0
        self._looked = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self.viewers = 0

    @contextmanager
    def watching(self, hello: dict[str, Any]) -> Iterator[Viewer]:
        """Register a viewer within a `with` block.

        Args:
            hello: An event for this viewer alone.

        Raises:
            QueueFull: There are too many viewers.
        """
        if self.viewers >= VIEWERS_MAX:
            raise QueueFull(VIEWERS_MAX, AGAIN_MS, "the live page")
        self.viewers += 1
        if self._work is None:
            self._work = asyncio.create_task(self._run())
        try:
            yield Viewer(self, self._work, event("hello", msgspec.json.encode(hello)))
        finally:
            self.viewers -= 1
            if not self.viewers and self._work is not None:
                self._work.cancel()
                self._work = None

    def works(self, work: asyncio.Task[None]) -> bool:
        """Return whether `work` is still the sampling task."""
        return self._work is work

    async def sampled(self) -> None:
        """Wait for the next sample."""
        await self._looked.wait()

    def news(self, seen: ViewerPosition) -> bytes:
        """Return the events since `seen`, and advance it."""
        news = self._documents.since(seen.document)
        if cells := self._map.since(seen.frame, monotonic()):
            news += event("blocks", cells)
        if points := self._history.since(seen.point):
            news += event("points", msgspec.json.encode(points))
        seen.document, seen.frame, seen.point = self._documents.number, self._map.number, self._history.number
        return news

    # ------------------------------------------------------------------------------------------------------- the work

    async def _run(self) -> None:
        if self._counts and monotonic() - self._counts[-1][0] > GAP_S:
            self._event_log.resume()
        self._counts.clear()
        asking = asyncio.create_task(self._ask_on())
        storing = asyncio.create_task(self._ask_storage_on())
        try:
            while not asking.done():
                self._look()
                self._looked.set()
                self._looked = asyncio.Event()
                await asyncio.wait((asking,), timeout=LOOK_S)
            asking.result()
        except Exception:
            log.exception("sampling for the live page failed")
        finally:
            asking.cancel()
            storing.cancel()
            if self._work is asyncio.current_task():
                self._work = None
                self._looked.set()

    async def _ask_on(self) -> None:
        while True:
            self._asked = self._asked or monotonic()
            try:
                await self._ask()
            except KvforgeError as error:
                self._view.problem = error.message
            else:
                self._view.problem, self._asked = "", 0.0
                self._view.recovering = False
            await asyncio.sleep(ASK_S)

    async def _ask_storage_on(self) -> None:
        while self._storage is not None:
            self._view.stored = await storage_totals(self._storage)
            await asyncio.sleep(STORED_S)

    async def _ask(self) -> None:
        """Query what the tables do not hold. Raises what the client raises."""
        kv, view = self._client(), self._view
        health = await kv.health(timeout_s=ANSWER_S)
        stats = await kv.stats(timeout_s=ANSWER_S)
        listed = await self._list()
        now_s, now_ms = monotonic(), _now_ms()
        if self._tables is None or self._tables.boot != stats.boot:
            await self._open_tables()
        view.waiting = await self._why(listed.requests, {row.tenant: row.pending for row in stats.tenants})
        view.stats, view.health, view.listed = stats, health, listed
        view.absent = self._disconnected.look(health.gone, [worker.name for worker in health.workers], monotonic())
        self._upto = max((pool.base + pool.blocks for pool in stats.pools), default=0)
        self._event_log.answered(stats, health, now_ms)
        self._latencies.look(listed.requests, now_s)
        self._came_ms = {
            row.request_id: self._came_ms.get(row.request_id) or now_ms - row.age_us // 1000 for row in listed.requests
        }
        put = self._documents.put
        put("about", documents.about(stats, health, round((now_ms - stats.uptime_us / 1e3) / 1e4) * 10_000))
        put("pools", documents.pools(stats))
        put("tenants", documents.tenants(stats))
        put("workers", documents.workers(health, view.absent))
        put("totals", documents.totals(stats))
        put("requests", documents.requests(listed, self._came_ms))
        put("latency", self._latencies.by_tenant())

    async def _list(self) -> RequestList:
        """List as many of the newest requests as the coordinator's `limits.list_max` allows."""
        while True:
            try:
                return await self._client().requests(self._listed_max, timeout_s=ANSWER_S)
            except InvalidRequest:
                if self._listed_max == 1:
                    raise
                self._listed_max //= 2

    async def _open_tables(self) -> None:
        self._tables, self._map_problem = None, ""
        try:
            self._tables = await self._client().tables(timeout_s=ANSWER_S)
        except Unavailable as error:
            self._map_problem = error.message

    async def _why(self, rows: tuple[RequestRow, ...], pending: dict[str, int]) -> tuple[Waiting, ...]:
        """Return what the oldest waiting request of the busiest tenants waits for."""
        oldest: dict[str, int] = {row.tenant: row.request_id for row in rows if row.state in documents.WAITING}
        most = sorted(oldest, key=lambda tenant: -pending.get(tenant, 0))[:EXPLAINED_MAX]
        found = []
        for tenant in most:
            with suppress(NotFound):  # it ended in the meantime
                explanation = await self._client().explain(request=oldest[tenant], timeout_s=ANSWER_S)
                if "limit" in explanation.facts:
                    found.append(Waiting(tenant, pending.get(tenant, 0), str(explanation.facts["limit"])))
        return tuple(found)

    # ------------------------------------------------------------------------------------------------------- one look

    def _look(self) -> None:
        now_s, now_ms, view = monotonic(), _now_ms(), self._view
        running = self._read_tables(now_s)
        if running:
            self._gone_since = 0.0
        else:
            self._gone_since = self._gone_since or now_s
            self._asked = self._asked and now_s  # an answer can be late only while the process runs
            view.recovering = True
        if self._tables is not None:
            self._event_log.process(self._tables.pid if running else 0, now_ms)
        view.gone_s = None if running else now_s - self._gone_since
        view.silent_s = now_s - self._asked if self._asked else 0.0
        now = self._now(now_s, now_ms)
        view.running, view.pending = now.get("running", 0), now.get("waiting", 0)
        self._documents.put("now", now)
        self._documents.put("summary", summary(view))
        self._documents.put("happenings", self._event_log.entries())
        if now_s >= self._point_due:
            self._point_due = now_s + EVERY_S
            self._history.add(self._point(now, known=running and view.silent_s < SILENT_S))

    def _read_tables(self, now_s: float) -> bool:
        """Read gauges and map. Return whether the coordinator's process runs, as far as that is visible."""
        tables = self._tables
        if tables is None:
            return True
        try:
            if tables.ended():
                return False
            self._gauges = tables.gauges()
        except KvforgeError as error:  # killed within a write, or a different layout now
            log.warning("cannot read the shared tables: %s", error)
            return True
        upto, at = self._upto, (self._gauges["turns"], self._upto)
        if at != self._looked_at and now_s >= self._map_due:
            if upto > BLOCKS_MAX:
                self._map_problem = f"too many blocks for the map: {upto} (limit {BLOCKS_MAX})"
            else:
                self._map.look(tables.blocks(upto), now_s)
            self._looked_at = at
            self._map_due = now_s + (LARGE_LOOK_S if upto > LARGE else 0.0)
        return True

    def _now(self, now_s: float, now_ms: int) -> dict[str, Any]:
        """Return the numbers that change constantly, from the tables or else from the last answer."""
        gauges, stats = self._gauges if self._tables is not None else {}, self._view.stats
        tokens_per_s = steps_per_s = None
        if gauges:
            count = (now_s, gauges["generated_tokens_total"], gauges["steps_total"])
        elif stats is not None:
            count = (now_s, stats.requests.generated_tokens_total, sum(pool.steps for pool in stats.pools))
        else:
            return {"at_ms": now_ms, "map": self._map_problem}
        if self._counts and (passed_s := now_s - self._counts[0][0]) > 0:
            tokens_per_s = round(max(0, count[1] - self._counts[0][1]) / passed_s, 1)
            steps_per_s = round(max(0, count[2] - self._counts[0][2]) / passed_s, 1)
        self._counts.append(count)
        sample = {"at_ms": now_ms, "tokens_per_s": tokens_per_s, "steps_per_s": steps_per_s, "map": self._map_problem}
        if gauges:
            names = ("total", "free", "cached", "referenced", "quarantined")
            blocks = {name: gauges[f"blocks_{name}"] for name in names}
            requests = {"running": gauges["requests_running"], "waiting": gauges["requests_pending"]}
            return {**sample, **requests, **blocks, "lives": {name: gauges[name] for name in LIVES}}
        assert stats is not None, "checked above"
        sums = {name: sum(getattr(pool, name) for pool in stats.pools) for name in
                ("free", "cached", "referenced", "quarantined")}  # fmt: skip
        total = {"total": sum(pool.blocks for pool in stats.pools)}
        return {**sample, "running": stats.requests.running, "waiting": stats.requests.pending, **total, **sums}

    def _point(self, now: dict[str, Any], *, known: bool) -> Point:
        if not known or "running" not in now:
            return Point(now["at_ms"], *[None] * 8)
        total = now["total"] or 1
        latest = self._latencies.by_tenant()[0]
        return Point(
            now["at_ms"],
            now["tokens_per_s"],
            now["steps_per_s"],
            now["running"],
            now["waiting"],
            round(now["referenced"] / total, 4),
            round(now["cached"] / total, 4),
            latest.first_ms,
            latest.between_ms,
        )


def _now_ms() -> int:
    return round(time() * 1000)
