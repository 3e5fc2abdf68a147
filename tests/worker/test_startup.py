"""The phases of a worker's start."""

from __future__ import annotations

import time

import pytest

from kvforge.worker import startup
from kvforge.worker.startup import StartupTimeline, process_began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the timeline reads; the test sets it."""
    now = [100.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: now[0])
    return now


def test_phases_are_named_in_order_and_the_same_phase_adds_up(clock: list[float]) -> None:
    timeline = StartupTimeline(began=98.0)
    for at, phase in ((99.0, "imports"), (101.0, "reading"), (102.5, "reading"), (103.0, "imports"), (103.5, "end")):
        clock[0] = at
        timeline.enter(phase)
    clock[0] = 103.51
    assert timeline.finish() == "started in 5.51 s: process start 1.00, imports 2.50, reading 2.00"


def test_a_start_is_over_once(clock: list[float]) -> None:
    timeline, ended = StartupTimeline(began=98.0), list[str]()
    timeline.at_end(lambda: ended.append("its threads"))
    assert timeline.finish()
    timeline.finish()
    assert ended == ["its threads"]
    clock[0] = 200.0
    timeline.enter("loading again for another coordinator")
    assert timeline.finish() == ""


def test_the_process_began_before_now() -> None:
    began = process_began()
    assert began < time.monotonic()
    assert process_began() == pytest.approx(began, abs=0.5)
