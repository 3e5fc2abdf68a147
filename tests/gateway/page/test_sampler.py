"""The sampler shared by all viewers: limits, polling times, and tolerated failures."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from kvforge.gateway.page import sampler
from kvforge.gateway.page.sampler import Sampler
from kvforge.gateway.storage import Operation, Result, TenantUsage
from kvforge.protocol.errors import DeadlineExceeded, InvalidRequest, QueueFull
from kvforge.protocol.messages import Health, RequestList, RequestStats, Stats

LIMIT_S = 30.0
ZERO = RequestStats(**dict.fromkeys(RequestStats.__struct_fields__, 0))


class Silent:
    """A client of a coordinator that never answers."""

    def __init__(self) -> None:
        self.count, self.asked = 0, asyncio.Event()

    async def health(self, **_options: Any) -> Health:
        self.count += 1
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


class Torn:
    """A client and the tables of a coordinator that was stopped during a write and lists few requests."""

    boot, pid, failed = "b", 7, 0

    async def health(self, **_options: Any) -> Health:
        return Health(rid=0, live=True, ready=True, reason="", workers=())

    async def stats(self, **_options: Any) -> Stats:
        requests = msgspec.structs.replace(ZERO, failed_total=self.failed)
        return Stats(rid=0, boot="b", uptime_us=0, clients=1, sequences=0, requests=requests, pools=(), tenants=())

    async def requests(self, count: int, **_options: Any) -> RequestList:
        if count > 100:
            raise InvalidRequest("count_max", "must be 1 to 100")
        return RequestList(rid=0, requests=(), total=0)

    async def tables(self, **_options: Any) -> Torn:
        return self

    def ended(self) -> bool:
        return False

    def gauges(self) -> dict[str, int]:
        raise DeadlineExceeded("the gauges of the shared tables are being written without end")


def test_viewers_are_bounded_ask_once_and_the_last_one_ends_the_looking() -> None:
    async def run() -> None:
        client, ending = Silent(), list[int]()
        looking = Sampler(lambda: client, lambda: bool(ending))  # type: ignore[arg-type]
        with ExitStack() as viewers:
            first, *_ = [viewers.enter_context(looking.watching({})) for _ in range(sampler.VIEWERS_MAX)]
            with pytest.raises(QueueFull) as full, looking.watching({}):
                pass
            assert full.value.retry_after_ms == sampler.AGAIN_MS and looking.viewers == sampler.VIEWERS_MAX
            await asyncio.wait_for(client.asked.wait(), LIMIT_S)
            await asyncio.wait_for(first.more(), LIMIT_S)
            assert b"event: hello" in first.pop_events() and b"event: hello" not in first.pop_events()
            assert client.count == 1 and not first.over
            ending.append(1)
            assert first.over
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            assert tasks
        await asyncio.wait(tasks, timeout=LIMIT_S)
        assert looking.viewers == 0 and all(task.done() for task in tasks)

    asyncio.run(run())


class Restarted(Torn):
    """A client and the tables of a coordinator that answers, is gone, and runs again."""

    def __init__(self) -> None:
        self.gone, self.answers = False, asyncio.Event()
        self.answers.set()

    async def health(self, **options: Any) -> Health:
        await self.answers.wait()
        return await super().health(**options)

    def ended(self) -> bool:
        return self.gone


def test_time_without_a_process_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(sampler, "monotonic", lambda: clock[0])
    for name in ("LOOK_S", "ASK_S"):
        monkeypatch.setattr(sampler, name, 0.005)

    async def run() -> None:
        client = Restarted()
        looking = Sampler(lambda: client, lambda: False)  # type: ignore[arg-type]

        async def sentence() -> bytes:
            """Return the next summary that differs."""
            while b"event: summary" not in (came := viewer.pop_events()):
                await asyncio.wait_for(viewer.more(), LIMIT_S)
            return came.partition(b"event: summary")[2]

        with looking.watching({}) as viewer:
            while b"All is well" not in await sentence():
                pass
            client.answers.clear()
            client.gone = True
            assert b"has been down for 0 s" in await sentence()
            clock[0] += 10.0
            assert b"has been down for 10 s" in await sentence()
            client.gone = False
            assert b"has restarted and recovers" in await sentence()
            clock[0] += 4.0
            assert b"has not answered for 4 s" in await sentence()
            client.answers.set()
            assert b"All is well" in await sentence()

    asyncio.run(run())


@pytest.mark.parametrize(("gap_s", "recorded"), [(1.0, True), (sampler.GAP_S + 1.0, False)])
def test_the_log_of_events_begins_anew_after_a_gap(
    gap_s: float, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(sampler, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sampler, "LOOK_S", 0.005)

    async def run() -> None:
        client = Restarted()
        looking = Sampler(lambda: client, lambda: False)  # type: ignore[arg-type]

        async def events(words: bytes) -> bytes:
            """Return the events of a new viewer up to these words."""
            came = b""
            with looking.watching({}) as viewer:
                while words not in came:
                    await asyncio.wait_for(viewer.more(), LIMIT_S)
                    came += viewer.pop_events()
                await asyncio.wait_for(viewer.more(), LIMIT_S)
                return came + viewer.pop_events()

        await events(b'"failed":0')
        clock[0] += gap_s
        client.failed = 5
        assert (b"5 requests failed" in await events(b'"failed":5')) is recorded

    asyncio.run(run())


class Stored:
    """A storage with three objects."""

    exists, reason = True, ""

    async def apply(self, *operations: Operation) -> list[Result]:
        return [[TenantUsage("a", 3, 4000, 1)]]

    async def close(self) -> None: ...


def test_stored_work_is_shown() -> None:
    async def run() -> None:
        torn = Torn()
        looking = Sampler(lambda: torn, lambda: False, Stored())  # type: ignore[arg-type]
        with looking.watching({}) as viewer:
            came = b""
            while b"Stored: 3 objects of 4.0 kB, 1 in progress." not in came:
                await asyncio.wait_for(viewer.more(), LIMIT_S)
                came += viewer.pop_events()

    asyncio.run(run())


def test_tables_that_cannot_be_read_end_nothing() -> None:
    async def run() -> None:
        torn = Torn()
        looking = Sampler(lambda: torn, lambda: False)  # type: ignore[arg-type]
        with looking.watching({}) as viewer:
            told = b""
            while told.count(b"event: summary") < 1 or b"All is well" not in told:
                await asyncio.wait_for(viewer.more(), LIMIT_S)
                told += viewer.pop_events()
                assert not viewer.over

    asyncio.run(run())
