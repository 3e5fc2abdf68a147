"""Reasons for slow requests: the coordinator's explanations of the slowest, and the tail's time by phase."""

from __future__ import annotations

import asyncio
from array import array
from itertools import pairwise
from typing import Any

import pytest

from kvforge.loadtest.drive.outcome import FAILED, FINISHED, TIMED_OUT, UNSENT, Outcome
from kvforge.loadtest.measure.tail import PHASES, breakdown, phases_s, slowest
from kvforge.protocol.errors import CoordinatorUnavailable, RequestNotFound
from kvforge.protocol.messages import Explanation, Timings
from tests.loadtest.synthetic import finished


def told(**us: int) -> Timings:
    """Return a coordinator's timings with the given time in each phase."""
    return Timings(first_scheduled_us=0, first_token_us=0, ended_us=sum(us.values()), **us)


def request(latency_s: float, request_id: int = 0, **values: Any) -> Outcome:
    """Return a request due at 1 s that ended the given time later."""
    return finished(1.0, 1.0 + latency_s / 2, 1.0 + latency_s, request_id=request_id, **values)


class Coordinator:
    """Answers and counts queries."""

    def __init__(self, error: Exception | None = None, takes_s: float = 0.0) -> None:
        self.error, self.takes_s = error, takes_s
        self.asked: list[int] = []

    async def explain(self, *, request: int, timeout_s: float) -> Explanation:
        self.asked.append(request)
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return Explanation(rid=1, subject=f"request {request}", sentences=("it has ended", f"why of {request}"))


def test_the_phases_of_a_request_add_up_to_its_latency() -> None:
    outcome = finished(
        1.0,
        2.0,
        4.0,
        awake_s=1.1,
        sent_s=1.25,
        accepted_s=1.25,
        timings=told(queue_us=500_000, prefill_us=200_000, decode_us=1_000_000, preempted_us=800_000),
    )
    found = phases_s(outcome)
    assert tuple(found) == PHASES
    assert found["driver"] == pytest.approx(0.25) and found["queue"] == 0.5 and found["preempted"] == 0.8
    assert found["delivery"] == pytest.approx(3.0 - 0.25 - 2.5)
    assert sum(found.values()) == pytest.approx(3.0)


def test_a_coordinator_that_was_away_and_a_stream_that_stood_still_are_told_apart() -> None:
    timings = Timings(ended_us=1_000_000, decode_us=1_000_000, paused_us=500_000)
    found = phases_s(finished(0.0, 3.0, sent_s=0.0, accepted_s=0.8, timings=timings))
    told_s = {phase: s for phase, s in found.items() if s}
    assert told_s == pytest.approx({"accepting": 0.8, "decode": 1.0, "paused": 0.5, "delivery": 0.7})


def test_a_server_that_says_nothing_has_one_phase() -> None:
    found = phases_s(finished(0.0, 2.0, sent_s=0.5))
    assert {phase: s for phase, s in found.items() if s} == {"driver": 0.5, "served": 1.5}


def test_two_clocks_never_make_more_of_a_request_than_it_took() -> None:
    found = phases_s(finished(0.0, 1.0, timings=told(queue_us=600_000, decode_us=600_000)))
    assert found["queue"] == found["decode"] == pytest.approx(0.5)
    assert found["delivery"] == 0.0


@pytest.mark.parametrize("state", [FAILED, TIMED_OUT])
def test_one_that_was_never_sent_waited_for_the_driver(state: str) -> None:
    outcome = Outcome(session=0, due_s=1.0, state=state, ended_s=3.0)
    assert {phase: s for phase, s in phases_s(outcome).items() if s} == {"driver": 2.0}


def test_the_tail_is_told_apart_from_the_rest_and_by_tenant() -> None:
    quick = [request(0.1, timings=told(decode_us=100_000), tenant="a") for _ in range(95)]
    slow = [request(10.0, timings=told(queue_us=9_000_000, decode_us=1_000_000), tenant="b") for _ in range(5)]
    found = breakdown([*quick, *slow, Outcome(session=1, due_s=2.0)])
    assert found["all"]["requests"] == 100
    assert found["all"]["share"]["queue"] == pytest.approx(0.05 * 0.9)
    assert found["all"]["tenants"]["a"]["share"]["decode"] == pytest.approx(1.0)
    assert found["p99"]["requests"] == 5 and found["p99"]["at_least_ms"] == pytest.approx(10_000)
    assert found["p99"]["share"]["queue"] == pytest.approx(0.9)
    assert list(found["p99"]["tenants"]) == ["b"], "all of the tail is of one tenant"
    assert found["all"]["kinds"] == {}, "all are of one kind"
    for part in found.values():
        assert sum(part["share"].values()) == pytest.approx(1.0)


def test_nothing_is_said_of_nothing() -> None:
    assert breakdown([Outcome(session=0, due_s=0.0)]) == {}
    assert asyncio.run(slowest(Coordinator(), [Outcome(session=0, due_s=0.0, state=UNSENT)])) == []


def test_the_slowest_come_with_the_coordinators_sentence() -> None:
    kv = Coordinator()
    outcomes = [request(float(latency), request_id=latency) for latency in (3, 9, 1, 7)]
    outcomes.append(Outcome(session=8, due_s=0.0, state=FAILED, ended_s=8.0, message="the server went away"))
    found = asyncio.run(slowest(kv, outcomes, 3))
    assert [one["latency_ms"] for one in found] == [9000, 8000, 7000]
    assert [one["sentence"] for one in found] == [
        "it has ended; why of 9",
        "the server went away",
        "it has ended; why of 7",
    ]
    assert kv.asked == [9, 7], "one without an id is not asked about"


@pytest.mark.parametrize("error", [RequestNotFound(9), CoordinatorUnavailable("gone")])
def test_one_that_is_forgotten_keeps_its_times(error: Exception) -> None:
    (found,) = asyncio.run(slowest(Coordinator(error), [request(2.0, 9, timings=told(queue_us=2_000_000))]))
    assert found["sentence"] == "" and found["phases_ms"] == {"queue": 2000.0}


def test_a_coordinator_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvforge.loadtest.measure.tail.ASK_S", 0.01)
    found = asyncio.run(slowest(Coordinator(takes_s=60), [request(2.0, 1), request(3.0, 2)]))
    assert [one["sentence"] for one in found] == ["", ""]


def test_a_server_that_cannot_be_asked_is_not() -> None:
    (found,) = asyncio.run(slowest(None, [request(2.0, 9)]))
    assert (found["sentence"], found["segments"]) == ("", [{"state": "served", "from_s": 1.0, "to_s": 3.0}])


def test_segments_fill_the_time_and_what_held_it_up_is_where_no_token_came() -> None:
    outcome = Outcome(
        session=0,
        due_s=1.0,
        sent_s=1.0,
        ended_s=9.0,
        state=FINISHED,
        tokens_s=array("d", [3.0, 4.0, 8.0, 9.0]),
        timings=told(queue_us=1_000_000, prefill_us=1_000_000, decode_us=3_000_000, recovering_us=3_000_000),
    )
    (found,) = asyncio.run(slowest(None, [outcome]))
    segments = found["segments"]
    assert [one["state"] for one in segments] == ["queue", "prefill", "decode", "recovering", "decode"]
    assert [one["from_s"] for one in segments] == pytest.approx([1.0, 2.0, 3.0, 4.0, 7.0])
    assert segments[-1]["to_s"] == outcome.ended_s
    assert all(one["to_s"] == other["from_s"] for one, other in pairwise(segments))
