"""The client for asyncio, against a fake coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import kvforge
from kvforge import (
    AsyncClient,
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
)
from tests.kvforge.client.test_requests import WRONG_OPTIONS
from tests.kvforge.fake_coordinator import Running


def test_asyncio_tasks_share_one_client(fake: Running) -> None:
    async def read(kv: AsyncClient, start: int) -> tuple[int, ...]:
        request = await kv.submit([start], max_tokens=6)
        seen = [token.token_id async for token in request]
        assert (await request.result()).tokens == tuple(seen)
        return tuple(seen)

    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=60) as kv:
            got = await asyncio.gather(*(read(kv, 10 * start) for start in range(1, 30)))
            assert got == [tuple(range(10 * start, 10 * start + 6)) for start in range(1, 30)]
            assert (await kv.wait_ready(timeout_s=10)).ready
            requests = [await kv.submit([start], max_tokens=3) for start in (1, 5)]
            merged = [token.token_id async for _, token in kv.merge(*requests)]
            assert sorted(merged) == [1, 2, 3, 5, 6, 7]
            assert (await kv.stats()).uptime_us == 5_000_000
            assert (await kv.requests(count_max=2)).total == 31
            with pytest.raises(QueueFull):
                await kv.submit([1], tenant="refused")
            await kv.drain()
        fake.expect("Goodbye")

    asyncio.run(main(), debug=True)


def test_asyncio_samples_attach_keys_and_retries(fake: Running) -> None:
    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=60, stream_timeout_s=10) as kv:
            requests = await kv.submit_samples([1, 2], 3, max_tokens=2, deadline_s=5)
            fake.expect("asked count=3 priority=0 deadline_ms=5000 first_token_ms=0 detached=False key=")
            assert [(await request.result()).tokens for request in requests] == [(3, 4)] * 3
            late = await kv.attach(requests[1].id, 1)
            assert [token.offset async for token in late] == [1]
            assert (await late.result()).tokens == (4,)
            # At once, at two places: one stream serves both.
            hanging = await kv.submit([10], max_tokens=9, tenant="hang", detached=True)
            async with AsyncClient(fake.endpoint, timeout_s=60, stream_timeout_s=10) as other:
                readers = await asyncio.gather(other.attach(hanging.id, 1), other.attach(hanging.id, 0))
                with pytest.raises(Conflict):
                    await hanging.result()
                assert [await anext(aiter(reader)) for reader in readers] == [
                    kvforge.Token(offset, 10 + offset, -0.5) for offset in (1, 0)
                ]
                await other.cancel(hanging.id)
                assert [(await reader.result()).reason for reader in readers] == ["cancelled"] * 2
            slow = await kv.submit([10], max_tokens=7, tenant="slow")
            assert [token.token_id async for token in slow] == list(range(10, 17))
            with pytest.raises(QueueFull):
                await kv.submit([1], tenant="busy")
            assert (await (await kv.submit([1], max_tokens=1, tenant="busy", retry_s=20)).result()).tokens == (1,)
            keyed = [await kv.submit([1], max_tokens=2, idempotency_key="k") for _ in range(2)]
            assert keyed[0].id == keyed[1].id
            assert [(await request.result()).tokens for request in keyed] == [(1, 2)] * 2

    asyncio.run(main(), debug=True)


@pytest.mark.parametrize(("field", "options"), WRONG_OPTIONS)
def test_asyncio_names_wrong_options_too(folder: Path, field: str, options: dict[str, Any]) -> None:
    async def main() -> None:
        async with AsyncClient(f"ipc://{folder}/nobody.sock") as kv:
            for call in (
                kv.submit([1], **options),
                kv.submit_samples([1], 2, **options),
                kv.generate("text", **options),
            ):
                with pytest.raises(InvalidRequest) as raised:
                    await call
                assert raised.value.field == field

    asyncio.run(main())


def test_asyncio_hears_that_the_coordinator_died(fake: Running) -> None:
    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=60, stream_timeout_s=60, reconnect_s=0) as kv:
            other = await kv.submit([4], tenant="hang")
            request = await kv.submit([4], max_tokens=9, tenant="hang")
            waits = [asyncio.ensure_future(each.result()) for each in (request, other)]
            async with asyncio.timeout(10):
                while len(request.tokens) < 2:
                    await asyncio.sleep(0)
                fake.kill()
                outcomes = await asyncio.gather(*waits, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [CoordinatorUnavailable] * 2
            assert request.tokens == (4, 5)
            fake.start()
            again = await asyncio.gather(*(kv.submit([8], max_tokens=1) for _ in range(3)))
            assert [(await one.result()).tokens for one in again] == [(8,)] * 3

    asyncio.run(main())


def test_asyncio_timeouts_and_cancelled_tasks(fake: Running, folder: Path) -> None:
    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=60) as kv:
            request = await kv.submit([1], max_tokens=9, tenant="hang")
            with pytest.raises(DeadlineExceeded):
                await request.result(timeout_s=0.05)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await kv.submit([1], tenant="late")
            await kv.health()
            fake.expect("Cancel")
            await kv.cancel(request.id)
            assert (await request.result()).reason == "cancelled"
        async with AsyncClient(f"ipc://{folder}/nobody.sock", timeout_s=0.2) as nobody:
            with pytest.raises(CoordinatorUnavailable):
                await nobody.stats()

    asyncio.run(main())
