"""A real coordinator with workers that have no model."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import pytest

from kvforge import AsyncClient, AsyncRequest, SamplingParams
from kvforge.loadtest.command.main import main
from kvforge.loadtest.fleet.simulated import SimulatedFleet
from kvforge.protocol.errors import InvalidRequest, Unavailable
from kvforge.routing import PREFIX, ROUND_ROBIN

GREEDY = SamplingParams(temperature=0.0)
REQUESTS, TOKENS = 8, 300
QUOTAS = {"quotas": {"default": {"ceiling": 500}}}


async def _submit(kv: AsyncClient) -> list[AsyncRequest]:
    return [await kv.submit([1, 2, 3 + i], max_tokens=TOKENS, sampling=GREEDY) for i in range(REQUESTS)]


async def _answers(requests: list[AsyncRequest]) -> list[tuple[int, ...]]:
    return [(await request.result(timeout_s=30)).tokens for request in requests]


def test_a_fleet_answers_the_same_though_processes_die() -> None:
    async def run() -> None:
        async with SimulatedFleet(
            "h200-8b", workers=2, blocks=512, time_scale=0.1, coordinator_settings=QUOTAS
        ) as fleet:
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
            with pytest.raises(InvalidRequest, match="unknown process 'worker-7'"):
                fleet.kill("worker-7")
            runtime = fleet.runtime
        assert not runtime.exists()

    asyncio.run(run())


def test_a_fleet_that_cannot_start_says_why() -> None:
    async def run() -> None:
        settings = {"schedule": {"no_such_setting": 1}}
        async with SimulatedFleet("h200-70b", coordinator_settings=settings):
            pass

    with pytest.raises(Unavailable, match="no_such_setting"):
        asyncio.run(run())
    with pytest.raises(InvalidRequest, match="--workers: is 0"):
        SimulatedFleet(workers=0)
    with pytest.raises(InvalidRequest, match="--config: unknown section 'journal'"):
        SimulatedFleet(coordinator_settings={"journal": {}})


# What round robin chooses is a unit test of the router.
@pytest.mark.parametrize("policy", [PREFIX, pytest.param(ROUND_ROBIN, marks=pytest.mark.soak)])
def test_several_replicas_are_chosen_from(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests share a prefix and arrive one by one: a router that queries finds the replica with the prefix, round
    robin only after visiting all."""
    monkeypatch.setattr("kvforge.loadtest.report.folder.pictures", lambda found: [])
    command = ["--no-model", "h200-8b", "--time-scale", "0", "--blocks", "512", "--replicas", "3", "--policy", policy]
    command += ["--closed", "1", "--requests", "9", "--prefix", "64", "--input", "20", "--output", "4"]
    main([*command, "--quiet", "--no-proof", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["all"]["requests"]["finished"] == 9
    assert found["model"]["replicas"] == 3 and found["model"]["policy"] == policy
    rows = csv.DictReader((tmp_path / "requests.csv").read_text().splitlines())
    missed = sum(not int(row["cached_tokens"]) for row in rows)
    assert missed == (1 if policy == PREFIX else 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--replicas", "2", "--rate", "1"], "replicas: requires --no-model"),
        (["--no-model", "--replicas", "2", "--kill", "worker:1s"], "kill: supports one coordinator"),
    ],
)
def test_replicas_are_of_fleets_that_nobody_kills(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert why in capsys.readouterr().err
