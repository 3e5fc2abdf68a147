"""Kills of real processes in the middle of a load, and options refused before any kill."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from time import monotonic

import pytest

from kvforge import AsyncClient
from kvforge.loadtest.chaos.durability import check
from kvforge.loadtest.chaos.fault_effects import fault_effects
from kvforge.loadtest.chaos.kill import Killer, KillRecord, ProcessHandle
from kvforge.loadtest.chaos.plan import parse
from kvforge.loadtest.fleet.simulated import SimulatedFleet
from kvforge.protocol.errors import CoordinatorUnavailable, InvalidRequest
from tests.loadtest.chaos.sessions import Sessions, draw, drive

LOAD = Sessions(6, 3, output_tokens=200)
TEMPERATURE = 0.8


def refused(endpoint: str, *kills: str) -> InvalidRequest:
    async def enter() -> None:
        async with Killer(endpoint, parse(kills)):
            pass

    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(enter())
    assert caught.value.field == "kill"
    return caught.value


def test_a_server_of_another_machine_is_left_alone() -> None:
    assert "not tcp://host:7000" in refused("tcp://host:7000", "worker:1s").message


def test_a_process_that_is_not_here_or_not_ours_is_left_alone() -> None:
    with pytest.raises(InvalidRequest, match="not visible here"):
        ProcessHandle.of("w0", 99_999_999)
    if os.geteuid():
        with pytest.raises(InvalidRequest, match="belongs to user 0"):
            ProcessHandle.of("w0", 1)


def test_a_number_that_another_process_has_by_now_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = ProcessHandle.of("w0", child.pid)
        with pytest.raises(ProcessLookupError):
            ProcessHandle(found.pid, found.started - 1).kill()
        assert child.poll() is None
        found.kill()
        assert child.wait(10) == -9
    with pytest.raises(OSError):
        found.kill()


def test_a_strike_is_told_in_a_sentence() -> None:
    assert KillRecord(name="w0", at_s=10.0, pid=7, ready_s=11.5).sentence() == (
        "w0 (process 7) was killed at 10 s; all processes served again after 1.5 s"
    )
    assert (
        KillRecord(name="w0", at_s=10.0, pid=7, problem="not within 60 s")
        .sentence()
        .endswith("did not recover: not within 60 s")
    )
    assert KillRecord(name="w0", at_s=30.0, problem="the run had ended").sentence() == (
        "w0 was not killed at 30 s: the run had ended"
    )


def test_a_load_in_which_a_worker_and_the_coordinator_die_keeps_the_promise() -> None:
    async def run() -> None:
        async with SimulatedFleet("h200-8b", workers=2, blocks=512, time_scale=0.5) as fleet:
            async with (
                AsyncClient(fleet.endpoint, timeout_s=60, reconnect_s=60) as kv,
                Killer(fleet.endpoint, parse(["worker:0.2s,coordinator:1s", "worker-1:900s"])) as killer,
            ):
                killer.begin(monotonic())
                outcomes = await drive(kv, LOAD, TEMPERATURE)
                strikes = await killer.end()
                promise = await check(outcomes, LOAD, kv, draw=draw, temperature=TEMPERATURE)
                assert promise.kept, promise.sentences()
                assert (promise.finished, promise.compared, promise.compared_tokens) == (18, 18, 18 * 200)

                told = fault_effects(strikes, promise)
                assert told["kept"] and told["faults"] == 2
                assert [(one["name"], one["ready_s"] > one["at_s"]) for one in told["kills"]] == [
                    ("worker-0", True),
                    ("coordinator", True),
                    ("worker-1", False),
                ]
                assert json.loads(json.dumps(told)) == told
                assert told["sentences"][-1] == "worker-1 was not killed at 900 s: the run had ended"

                outcomes[7].tokens[100] ^= 1
                broken = await check(outcomes[:9], LOAD, kv, draw=draw, temperature=TEMPERATURE)
                assert [(one.request_id, one.offset) for one in broken.differences][:1] == [
                    (outcomes[7].request_id, 100)
                ]
            with pytest.raises(InvalidRequest, match="unknown process 'worker-7'"):
                async with Killer(fleet.endpoint, parse(["worker-7:1s"])):
                    pass
            endpoint = fleet.endpoint
        with pytest.raises(CoordinatorUnavailable):
            async with Killer(endpoint, parse(["worker:1s"])):
                pass

    asyncio.run(run())
