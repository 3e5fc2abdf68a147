"""A real coordinator with workers that have no model."""

from __future__ import annotations

import asyncio

import pytest

from kvforge import AsyncClient, AsyncRequest, Sampling
from kvforge.protocol.errors import InvalidRequest, Unavailable
from loadtest.fleet.fleet import Fleet

GREEDY = Sampling(temperature=0.0)
REQUESTS, TOKENS = 8, 300
QUOTAS = {"quotas": {"default": {"ceiling": 500}}}


async def _submit(kv: AsyncClient) -> list[AsyncRequest]:
    return [await kv.submit([1, 2, 3 + i], max_tokens=TOKENS, sampling=GREEDY) for i in range(REQUESTS)]


async def _answers(requests: list[AsyncRequest]) -> list[tuple[int, ...]]:
    return [(await request.result(timeout_s=30)).tokens for request in requests]


def test_a_fleet_answers_the_same_when_a_worker_and_the_coordinator_die_meanwhile() -> None:
    async def run() -> None:
        async with Fleet("h200-8b", workers=2, blocks=512, time_scale=0.1, coordinator_settings=QUOTAS) as fleet:
            assert list(fleet.pids()) == ["coordinator", "worker-0", "worker-1"]
            async with AsyncClient(fleet.endpoint, timeout_s=30) as kv:
                quiet = await _answers(await _submit(kv))
                assert all(len(answer) == TOKENS for answer in quiet) and len(set(quiet)) == REQUESTS
                for name in ("worker", "coordinator"):
                    requests = await _submit(kv)
                    await anext(aiter(requests[-1]))
                    pid = fleet.kill(name)
                    assert await _answers(requests) == quiet
                    await fleet.wait_ready()
                    assert len(fleet.pids()) == 3 and pid not in fleet.pids().values()
            with pytest.raises(InvalidRequest, match="no 'worker-7' runs"):
                fleet.kill("worker-7")
            runtime = fleet.runtime
        assert not runtime.exists()

    asyncio.run(run())


def test_a_fleet_that_cannot_start_says_why() -> None:
    async def run() -> None:
        settings = {"schedule": {"no_such_setting": 1}}
        async with Fleet("h200-70b", coordinator_settings=settings):
            pass

    with pytest.raises(Unavailable, match="no_such_setting"):
        asyncio.run(run())
    with pytest.raises(InvalidRequest, match="--workers: is 0"):
        Fleet(workers=0)
    with pytest.raises(InvalidRequest, match="--config: has a section 'journal'"):
        Fleet(coordinator_settings={"journal": {}})
