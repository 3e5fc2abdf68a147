"""Cancellation of requests: by `cancel`, and by cancelling a task while it reads."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge import AsyncClient, AsyncRequest, Client, Finished
from tests.kvforge.fake_coordinator import DEADLINE_S, Running


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    """One fake shared by all of these tests, which leave it intact."""
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as folder, Running(Path(folder)) as running:
        yield running


def test_a_request_is_cancelled_by_its_handle(kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="hang")
    tokens = iter(request)
    assert [next(tokens).token_id, next(tokens).token_id] == [1, 2]
    request.cancel()
    assert (request.result(timeout_s=60).reason, list(tokens)) == ("cancelled", [])
    request.cancel()  # it has ended: nothing to do


def test_cancelling_one_that_has_ended_unseen_changes_nothing(kv: Client) -> None:
    request = kv.submit([1], max_tokens=2)
    kv._calls.session._tracks.clear()  # the client never sees its end
    with Client(kv.endpoint) as other:
        assert other.attach(request.id).result(timeout_s=60).reason == "length"
    request.cancel()


async def iterate(kv: AsyncClient, request: AsyncRequest) -> None:
    async for _ in request:
        pass


async def between_tokens(kv: AsyncClient, request: AsyncRequest) -> None:
    async for _ in request:
        await asyncio.Event().wait()


async def hold_the_iterator(kv: AsyncClient, request: AsyncRequest) -> None:
    tokens = aiter(request)
    while True:
        await anext(tokens)


async def result(kv: AsyncClient, request: AsyncRequest) -> None:
    await request.result()


async def merge(kv: AsyncClient, request: AsyncRequest) -> None:
    async for _ in kv.merge(request):
        pass


async def merged_and_away(kv: AsyncClient, request: AsyncRequest) -> None:
    async for _ in kv.merge(request):
        await asyncio.Event().wait()


READERS = [iterate, between_tokens, hold_the_iterator, result, merge, merged_and_away]
Reader = Callable[[AsyncClient, AsyncRequest], Awaitable[None]]


async def cancelled_while(kv: AsyncClient, reader: Reader, *requests: AsyncRequest) -> None:
    """Run a reader of the first request until it has its tokens, then cancel its task."""
    task = asyncio.ensure_future(reader(kv, requests[0]))
    await asyncio.sleep(0)  # let it start: a task that never started has read nothing
    async with asyncio.timeout(DEADLINE_S):
        while len(requests[0].tokens) < 2:  # all tokens of a request that hangs
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def run(fake: Running, main: Callable[[AsyncClient], Awaitable[Any]]) -> None:
    async def inside() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=60, stream_timeout_s=10) as kv:
            await main(kv)

    gc.disable()  # an immediate effect must not depend on the collector
    try:
        asyncio.run(inside())
    finally:
        gc.enable()


@pytest.mark.parametrize("reader", READERS)
def test_a_cancelled_task_cancels_what_it_read(fake: Running, reader: Reader) -> None:
    async def main(kv: AsyncClient) -> None:
        request = await kv.submit([1], max_tokens=9, tenant="hang")
        await cancelled_while(kv, reader, request)
        done = await request.result(timeout_s=60)
        assert (done.reason, done.tokens) == ("cancelled", (1, 2))

    run(fake, main)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", ["detached", "key", "attached", "two readers"])
def test_what_can_be_asked_for_again_goes_on(fake: Running, reader: Reader, how: str) -> None:
    async def main(kv: AsyncClient) -> None:
        options: dict[str, Any] = {"detached": {"detached": True}, "key": {"idempotency_key": reader.__name__}}.get(
            how, {}
        )
        request = await kv.submit([1], max_tokens=9, tenant="hang", **options)
        async with AsyncClient(fake.endpoint, timeout_s=60) as other:
            if how == "attached":
                request = await other.attach(request.id)
            waiting = [asyncio.ensure_future(request.result())] if how == "two readers" else []
            await asyncio.sleep(0)
            await cancelled_while(other if how == "attached" else kv, reader, request)
            await other.health()  # all earlier commands have been answered
            assert (await other.status(request.id)).reason != "cancelled"
            await other.cancel(request.id)
            for task in waiting:
                done: Finished = await task
                assert done.reason == "cancelled"

    run(fake, main)


def test_leaving_the_loop_is_not_cancelling(fake: Running) -> None:
    async def main(kv: AsyncClient) -> None:
        request = await kv.submit([1], max_tokens=9, tenant="hang")
        async for _ in request:
            break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):  # an unrelated timeout
                await asyncio.Event().wait()
        assert (await kv.status(request.id)).reason != "cancelled"
        await request.cancel()
        assert (await request.result(timeout_s=60)).reason == "cancelled"

    run(fake, main)


def test_a_timeout_around_the_loop_cancels(fake: Running) -> None:
    async def main(kv: AsyncClient) -> None:
        request = await kv.submit([1], max_tokens=9, tenant="hang")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await between_tokens(kv, request)
        assert (await request.result(timeout_s=60)).reason == "cancelled"

    run(fake, main)
