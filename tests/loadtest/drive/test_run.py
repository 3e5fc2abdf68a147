"""A complete run with real processes: a null server, driver processes, the observer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter

import pytest

from kvforge.loadtest.drive import driver_check, observer
from kvforge.loadtest.drive.driver_check import check_driver, null_server
from kvforge.loadtest.drive.outcome import FINISHED, INTERRUPTED, TIMED_OUT, RunResult
from kvforge.loadtest.drive.progress import Progress
from kvforge.loadtest.drive.run import measure
from kvforge.loadtest.drive.spec import HTTP, KVFORGE, RunSpec
from kvforge.protocol.errors import CoordinatorUnavailable, InternalError, InvalidRequest, KvforgeError

TOKENS = 5
SESSIONS = 40


def test_two_processes_drive_a_server_that_is_watched() -> None:
    seen: list[Progress] = []
    began: list[float] = []

    async def main() -> RunResult:
        async with null_server(KVFORGE, 100.0) as where:
            load = {"arrivals": "fixed:80", "requests": SESSIONS, "output": str(TOKENS), "input": "9"}
            spec = RunSpec(load=load, endpoint=where, processes=2, clients=3, proof_s=0.2)
            assert RunSpec(**spec.json()) == spec
            return await measure(spec, watch=seen.append, began=began.append)

    found = asyncio.run(main())
    assert [outcome.session for outcome in found.outcomes] == list(range(SESSIONS))
    for outcome in found.outcomes:
        assert (outcome.state, outcome.code, outcome.prompt_tokens) == (FINISHED, "", 9)
        assert outcome.due_s <= outcome.awake_s <= outcome.sent_s <= outcome.accepted_s <= outcome.tokens_s[0]
        assert list(outcome.tokens_s) == sorted(outcome.tokens_s)
        assert list(outcome.tokens) == [outcome.request_id + offset for offset in range(TOKENS)]
        assert outcome.timings.ended_us > 0
    assert len({outcome.request_id for outcome in found.outcomes}) == SESSIONS
    assert len(found.drivers) == 2 and all(len(drove.late_s) for drove in found.drivers)
    assert len(found.null_late_s) and found.samples and not found.interrupted
    assert found.before is not None and found.after is not None
    assert found.after.requests.finished_total - found.before.requests.finished_total == SESSIONS
    assert len(began) == 1 and seen and seen[-1].due <= SESSIONS


def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    async def main() -> RunResult:
        async with null_server(KVFORGE, 0.1) as where:
            stop = asyncio.Event()
            spec = RunSpec(load={"closed": 3, "duration_s": 60.0}, endpoint=where, proof_s=0)
            return await measure(spec, stop, began=lambda _: asyncio.get_running_loop().call_later(0.5, stop.set))

    found = asyncio.run(main())
    assert found.interrupted and not len(found.null_late_s)
    assert Counter(outcome.state for outcome in found.outcomes) == {INTERRUPTED: 3}
    assert found.after is not None and found.after.requests.cancelled_total == 3


def test_a_request_that_takes_too_long_is_cancelled() -> None:
    async def main() -> RunResult:
        async with null_server(KVFORGE, 0.1) as where:
            load = {"arrivals": "fixed:100", "requests": 3}
            return await measure(RunSpec(load=load, endpoint=where, timeout_s=0.3, proof_s=0))

    found = asyncio.run(main())
    assert Counter((outcome.state, outcome.code) for outcome in found.outcomes) == {(TIMED_OUT, "deadline_exceeded"): 3}
    assert found.after is not None and found.after.requests.cancelled_total == 3


def test_what_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "READY_S", 0.2)
    for spec, error in (
        (RunSpec(load={"arrivals": "fixed:1", "requests": 1}, endpoint="ipc:///nobody/here"), CoordinatorUnavailable),
        (RunSpec(load={"arrivals": "never"}, endpoint="ipc:///nobody/here"), InvalidRequest),
    ):
        with pytest.raises(error):
            asyncio.run(measure(spec))
    with pytest.raises(InvalidRequest, match="clients"):
        RunSpec(load={}, clients=0)


def test_the_error_of_a_driver_is_the_error_of_the_run() -> None:
    async def main() -> None:
        async with null_server(KVFORGE) as where:
            spec = RunSpec(load={"arrivals": "fixed:10", "requests": 2}, endpoint=where, processes=2, proof_s=0)
            object.__setattr__(spec, "load", {"arrivals": "fixed:10", "requests": 2, "tenant": "a:0"})
            await measure(spec)

    with pytest.raises(KvforgeError):
        asyncio.run(main())


def test_a_proof_whose_null_server_dies_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    says_its_id = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    monkeypatch.setattr(driver_check, "child_command", lambda *_: [sys.executable, "-c", says_its_id])

    async def main() -> None:
        async with null_server(HTTP) as pid:
            os.kill(int(pid), signal.SIGKILL)

    with pytest.raises(InternalError, match="ended early with status -9"):
        asyncio.run(main())


def test_the_clock_is_proved_where_nothing_is_due_at_first() -> None:
    load = {"arrivals": "fixed:0.05", "requests": 2, "duration_s": 60.0}
    spec = RunSpec(load=load, proof_s=0.2)
    # The first of a fixed process is due at once; the next one long after the test.
    late_s = asyncio.run(check_driver(spec, 1, asyncio.Event()))
    assert len(late_s) > 10
    sparse = {**load, "arrivals": "poisson:0.001", "requests": None, "duration_s": 10_000.0}
    late_s = asyncio.run(check_driver(RunSpec(load=sparse, proof_s=0.2), 1, asyncio.Event()))
    assert len(late_s) > 10
