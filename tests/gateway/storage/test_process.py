"""The storage process: calls wait for the commit, and its death loses nothing that was answered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvforge.gateway.serve.process import _loop_factory
from kvforge.gateway.storage import Delete, Get, Put, StorageFailed, Usage
from kvforge.gateway.storage.process import TIDY_S
from kvforge.gateway.storage.remote import RemoteStorage
from kvforge.protocol.errors import Conflict

X = {"tenant": "a", "kind": "thing"}


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[RemoteStorage]:
    storage = RemoteStorage(url, **{"tenant_bytes_max": 1 << 20, "answer_s": 60.0, **options})
    try:
        yield storage
    finally:
        await storage.close()


def with_storage(url: str, work: Callable[[RemoteStorage], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        async with opened(url, **options) as storage:
            await work(storage)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:  # as a gateway runs
        runner.run(run())


def pid(storage: RemoteStorage) -> int:
    assert storage._link is not None
    return storage._link._process.pid


def test_many_calls_at_once_are_answered_each(url: str) -> None:
    async def work(storage: RemoteStorage) -> None:
        puts = [storage.apply(Put(**X, id=str(number), body=bytes([number]), expect=0)) for number in range(100)]
        await asyncio.gather(*puts)
        wrong = storage.apply(Put(**X, id="7", body=b"", expect=0))
        right = storage.apply(Get(**X, id="7"), Usage(tenant="a"))
        failed, found = await asyncio.gather(wrong, right, return_exceptions=True)
        assert isinstance(failed, Conflict) and not isinstance(found, BaseException)
        document, usage = found
        assert document.body == b"\7" and usage[0].documents == 100  # type: ignore[union-attr,index]

    with_storage(url, work)


def test_a_killed_process_is_replaced_and_loses_nothing(tmp_path: Path) -> None:
    async def work(storage: RemoteStorage) -> None:
        await storage.apply(Put(**X, id="x", body=b"kept"))
        assert storage._link is not None
        first = pid(storage)
        reading = asyncio.ensure_future(storage.apply(Get(**X, id="x")))
        writing = asyncio.ensure_future(storage.apply(Put(**X, id="y", body=b"")))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGSTOP)
        await asyncio.sleep(0)
        storage._link.kill()
        assert (await reading)[0].body == b"kept"  # type: ignore[union-attr]
        with suppress(StorageFailed):  # it may have been answered before the death
            await writing
        (found,) = await storage.apply(Get(**X, id="x"))
        assert found.body == b"kept" and pid(storage) != first and not storage.reason  # type: ignore[union-attr]

    with_storage(f"sqlite:{tmp_path}/a.sqlite", work)


def test_a_process_that_does_not_answer_is_replaced(tmp_path: Path) -> None:
    async def work(storage: RemoteStorage) -> None:
        await storage.apply(Get(**X, id="x"))
        os.kill(pid(storage), signal.SIGSTOP)
        storage._answer_s = 0.05
        with pytest.raises(StorageFailed, match="answer_s"):
            await storage.apply(Get(**X, id="x"))
        storage._answer_s = 60.0
        while True:
            try:
                assert await storage.apply(Get(**X, id="x")) == [None]
                break
            except StorageFailed:  # the process has not been reaped yet
                continue

    with_storage(f"sqlite:{tmp_path}/a.sqlite", work)


def test_closing_finishes_the_calls_that_were_made(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/a.sqlite"

    async def work(storage: RemoteStorage) -> None:
        assert not storage.exists
        await storage.apply(Get(**X, id="x"))
        assert storage.exists
        put = asyncio.ensure_future(storage.apply(Put(**X, id="x", body=b"last")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await storage.close()
        await put
        with pytest.raises(StorageFailed, match="stopping"):
            await storage.apply(Get(**X, id="x"))

    async def again(storage: RemoteStorage) -> None:
        (found,) = await storage.apply(Get(**X, id="x"))
        assert found.body == b"last"  # type: ignore[union-attr]

    with_storage(url, work)
    with_storage(url, again)


def test_two_gateways_share_a_database(url: str) -> None:
    async def work(storage: RemoteStorage) -> None:
        async with opened(url) as other:
            for number in range(10):
                await asyncio.gather(
                    storage.apply(Put(**X, id=f"a{number}", body=b"")), other.apply(Put(**X, id=f"b{number}", body=b""))
                )
            races = [one.apply(Put(**X, id="race", body=b"", expect=0)) for one in (storage, other)]
            outcomes = await asyncio.gather(*races, return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict", "list"]
            (usage,) = await other.apply(Usage(tenant="a"))
            assert usage[0].documents == 21  # type: ignore[union-attr,index]

    with_storage(url, work)


def test_a_deleted_document_leaves_the_disk_also_under_load(tmp_path: Path) -> None:
    secret = b"the quick brown secret"

    async def work(storage: RemoteStorage) -> None:
        await storage.apply(Put(**X, id="x", body=secret))
        await storage.apply(Delete(**X, id="x"))
        while any(secret in path.read_bytes() for path in tmp_path.iterdir()):
            await storage.apply(Get(**X, id="x"))
            await asyncio.sleep(TIDY_S / 5)  # it is never idle for long enough

    with_storage(f"sqlite:{tmp_path}/a.sqlite", work)
