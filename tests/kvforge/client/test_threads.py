"""A client belongs to the first thread or event loop that uses it; others get an error at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvforge import AsyncClient, Client, Conflict
from tests.kvforge.fake_coordinator import DEADLINE_S, Running


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        yield pool


CALLS: list[Callable[[Client], Any]] = [
    lambda kv: kv.submit([1], max_tokens=1),
    lambda kv: kv.health(),
    lambda kv: kv.attach(1),
    lambda kv: kv.wait_ready(timeout_s=1),
    lambda kv: kv.cancel(1),
    lambda kv: kv.tables(),
    lambda kv: kv.generate("text"),
    lambda kv: kv.append(1, [1]),
]


def test_every_call_of_another_thread_is_refused_and_the_first_ones_go_on(
    kv: Client, other: ThreadPoolExecutor
) -> None:
    running = kv.submit([1], max_tokens=9, tenant="hang")
    for call in CALLS:
        with pytest.raises(Conflict, match="belongs to thread 'MainThread', and this is 'other_0'"):
            other.submit(call, kv).result(DEADLINE_S)
    for read in (lambda: running.result(), lambda: next(iter(kv.merge(running)))):
        with pytest.raises(Conflict, match="one thread"):
            other.submit(read).result(DEADLINE_S)
    running.cancel()
    assert running.result(timeout_s=60).reason == "cancelled"


def test_a_client_that_nobody_has_used_yet_may_be_given_to_a_thread(kv: Client, other: ThreadPoolExecutor) -> None:
    assert other.submit(lambda: kv.submit([3], max_tokens=2).result().tokens).result(DEADLINE_S) == (3, 4)
    with pytest.raises(Conflict, match="belongs to thread 'other_0'"):
        kv.health()


def test_one_whose_thread_has_ended_may_be_used_on(kv: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(lambda: kv.submit([3], max_tokens=2)).result(DEADLINE_S)
    assert request.result(timeout_s=60).tokens == (3, 4)


def test_two_threads_that_come_at_once_do_not_both_get_it(kv: Client) -> None:
    start = threading.Barrier(8)

    def use() -> bool:
        start.wait(DEADLINE_S)
        try:
            kv.health()
        except Conflict:
            start.wait(DEADLINE_S)
            return False
        start.wait(DEADLINE_S)  # no thread ends before all have tried
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(future.result(DEADLINE_S) for future in [pool.submit(use) for _ in range(8)]) == 1


def test_closing_is_refused_only_while_the_other_thread_waits(fake: Running, kv: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(lambda: kv.submit([1], max_tokens=9, tenant="hang")).result(DEADLINE_S)
        waiting = pool.submit(request.result)
        while not kv._calls._waiting:
            assert not waiting.done()
        with pytest.raises(Conflict, match="close it there"):
            kv.close()
        with Client(fake.endpoint) as third:
            third.cancel(request.id)
        assert waiting.result(DEADLINE_S).reason == "cancelled"
        kv.close()  # nothing is pending now
    with pytest.raises(Conflict, match="closed"):
        kv.health()


def test_an_asyncio_client_belongs_to_one_loop(fake: Running) -> None:
    kv = AsyncClient(fake.endpoint, timeout_s=60)

    async def use() -> None:
        await kv.stats()

    asyncio.run(use())
    with pytest.raises(Conflict, match="another event loop"):
        asyncio.run(use())
    asyncio.run(kv.close())
