"""Outcomes of requests to a coordinator with scripted behaviour: refused, failed, lost and found again."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from kvforge.loadtest.drive.coordinator import CoordinatorTarget
from kvforge.loadtest.drive.outcome import FAILED, FINISHED, INTERRUPTED, REFUSED, TIMED_OUT, Outcome
from kvforge.loadtest.drive.target import TargetRequest
from tests.kvforge.fake_coordinator import DEADLINE_S, Running


@pytest.fixture
def fake() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as folder, Running(Path(folder)) as running:
        yield running


class One:
    """A request; its tenant selects the behaviour."""

    def __init__(self, target: CoordinatorTarget, tenant: str, *, output: int = 4, timeout_s: float = 60.0) -> None:
        self.start = monotonic()
        self.outcome = Outcome(session=0, due_s=0.0, tenant=tenant, asked_tokens=output, prompt_tokens=2)
        self.over = asyncio.Event()
        self.ends = 0
        ask = TargetRequest(
            prompt=np.array([1, 2], np.int32), output_tokens=output, tenant=tenant, until=self.start + timeout_s
        )
        self.give_up = target.send(ask, self.outcome, self.start, self.ended)

    def ended(self, outcome: Outcome) -> None:
        assert outcome is self.outcome
        self.ends += 1
        self.over.set()


def ends(fake: Running, *tenants: str, timeout_s: float = 60.0, output: int = 4) -> list[Outcome]:
    async def main() -> list[Outcome]:
        target = CoordinatorTarget(fake.endpoint)
        await target.open()
        async with asyncio.timeout(DEADLINE_S):
            several = [One(target, tenant, timeout_s=timeout_s, output=output) for tenant in tenants]
            for one in several:
                await one.over.wait()
        await target.close()
        assert [one.ends for one in several] == [1] * len(tenants)
        return [one.outcome for one in several]

    return asyncio.run(main())


def test_each_end_is_told_apart(fake: Running) -> None:
    found = ends(fake, "default", "refused", "fails", "gap", "expires")
    assert [(outcome.state, outcome.code) for outcome in found] == [
        (FINISHED, ""),
        (REFUSED, "queue_full"),
        (FAILED, "worker_error"),
        (FAILED, "protocol_error"),
        (TIMED_OUT, "deadline_exceeded"),
    ]
    finished, refused, failed = found[:3]
    assert finished.tokens.tolist() == [3, 4, 5, 6] and len(finished.tokens_s) == 4
    assert finished.timings.ended_us == 30 and finished.request_id > 0
    assert 0 <= finished.accepted_s <= finished.tokens_s[0] <= finished.ended_s
    assert refused.accepted_s == -1 and not refused.request_id and refused.message
    assert failed.message and len(failed.tokens) == 4


def test_what_cannot_be_asked_for_is_refused_here(fake: Running) -> None:
    (outcome,) = ends(fake, "default", output=0)
    assert (outcome.state, outcome.code) == (REFUSED, "invalid_request")


def test_a_request_whose_time_is_over_is_cancelled_with_its_tokens_kept(fake: Running) -> None:
    (outcome,) = ends(fake, "hang", timeout_s=0.3)
    assert outcome.state == TIMED_OUT and outcome.tokens.tolist() == [3, 4]
    fake.expect("Cancel")


def test_one_that_is_given_up_is_interrupted_once(fake: Running) -> None:
    async def main() -> None:
        target = CoordinatorTarget(fake.endpoint)
        await target.open()
        one = One(target, "hang")
        one.give_up()
        one.give_up()
        assert one.ends == 1 and one.outcome.state == INTERRUPTED
        await target.close()

    asyncio.run(main())


def test_a_coordinator_that_was_away_loses_no_stream(fake: Running) -> None:
    async def main() -> None:
        target = CoordinatorTarget(fake.endpoint, clients=2)
        await target.open()
        async with asyncio.timeout(DEADLINE_S):
            one = One(target, "waits")
            while len(one.outcome.tokens_s) < 2:
                await asyncio.sleep(0.01)
            fake.signal(signal.SIGHUP, "away")
            meanwhile = One(target, "default")
            await asyncio.sleep(0.1)
            fake.signal(signal.SIGHUP, "back")
            await one.over.wait()
            await meanwhile.over.wait()
        for request in (one, meanwhile):
            assert request.outcome.state == FINISHED and request.outcome.tokens.tolist() == [3, 4, 5, 6]
        await target.close()

    asyncio.run(main())
