"""The sentence at the top of the page: text and severity by state."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvforge.coordinator.core.events import WorkerGone
from kvforge.coordinator.core.reporting.spent import QUEUED_FOR
from kvforge.gateway.page.disconnected_workers import (
    GONE,
    STARTING,
    STARTS_AGAIN_S,
    DisconnectedWorker,
    DisconnectedWorkers,
)
from kvforge.gateway.page.view import BAD, CEILING, GOOD, NOTICE, WAITS_FOR, ServiceState, Waiting, summary
from kvforge.gateway.storage.totals import StorageTotals
from kvforge.protocol.messages import GetHealth, Health, RequestStats, Stats, WorkerHealth
from tests.coordinator.driver import Driver

ZERO = RequestStats(**dict.fromkeys(RequestStats.__struct_fields__, 0))
STATS = Stats(rid=0, boot="b", uptime_us=0, clients=1, sequences=0, requests=ZERO, pools=(), tenants=())
READY = WorkerHealth(name="w0", pid=1, state="ready")
BACK = DisconnectedWorker("w1", STARTING, "was lost, process 4")
LOST = DisconnectedWorker("w2", GONE, "was lost, process 5")
LOADING = WorkerHealth(name="w1", pid=2, state="loading", phase="weights", progress=0.4)


def view(
    running: int = 0,
    pending: int = 0,
    waiting: tuple[Waiting, ...] = (),
    absent: tuple[DisconnectedWorker, ...] = (),
    **health: Any,
) -> ServiceState:
    told = {"live": True, "ready": True, "reason": "", "workers": (READY,)} | health
    stats = replace(STATS, requests=replace(ZERO, pending=pending))
    return ServiceState(running, pending, absent, stats=stats, health=Health(rid=0, **told), waiting=waiting)


@pytest.mark.parametrize(
    ("seen", "level", "sentence"),
    [
        (ServiceState(), NOTICE, "Looking for the coordinator …"),
        (ServiceState(problem="nobody listens"), BAD, "No coordinator answers."),
        (view(), GOOD, "All is well: nothing runs and nothing waits."),
        (view(running=12), GOOD, "All is well: 12 running, nothing waits."),
        (
            view(12, 3, (Waiting("a", 3, "tenant ceiling"),)),
            NOTICE,
            "12 running, 3 waiting for room below tenant a's ceiling.",
        ),
        (
            view(12, 9, (Waiting("a", 3, "tenant ceiling"), Waiting("b", 5, "blocks"))),
            NOTICE,
            "12 running, 9 waiting: 5 for free blocks, 3 for room below tenant a's ceiling.",
        ),
        (view(1, 2, (Waiting("a", 1, "blocks"),)), NOTICE, "1 running, 2 waiting: 1 for free blocks."),
        (view(1, 2, (Waiting("a", 2, "something new"),)), NOTICE, "1 running, 2 waiting for something new."),
        (view(0, 2), NOTICE, "0 running, 2 waiting."),
        (view(3, draining=True, ready=False), NOTICE, "Draining, no new requests: 3 running, nothing waits."),
        (view(ready=False, reason="no worker is ready", workers=()), BAD, "Not ready: no worker is ready."),
        (view(ready=False, reason="no worker is ready", workers=(LOADING,)), NOTICE, "Not ready: no worker is ready."),
        (view(2, absent=(BACK,)), NOTICE, "w1 is starting again; 2 running, nothing waits."),
        (view(2, absent=(LOST,)), NOTICE, "w2 is gone; 2 running, nothing waits."),
        (view(2, absent=(BACK, BACK)), NOTICE, "2 workers are starting again; 2 running, nothing waits."),
        (view(2, absent=(BACK, LOST)), NOTICE, "w1 is starting again, w2 is gone; 2 running, nothing waits."),
        (view(ready=False, reason="no worker", workers=(), absent=(BACK,)), NOTICE, "Not ready: no worker."),
        (view(ready=False, reason="no worker", workers=(), absent=(LOST,)), BAD, "Not ready: no worker."),
        (view(gone={"w1": "left, process 4"}), GOOD, "All is well: nothing runs and nothing waits."),
    ],
)  # fmt: skip
def test_what_is_said(seen: ServiceState, level: str, sentence: str) -> None:
    said = summary(seen)
    assert (said.level, said.sentence) == (level, sentence)


def test_a_coordinator_that_is_gone_or_silent_goes_before_what_it_said_last() -> None:
    seen = view(running=3)
    seen.gone_s = 12.4
    said = summary(seen)
    assert (said.level, said.sentence) == (BAD, "The coordinator has been down for 12 s.") and "journal" in said.notes[
        0
    ]
    seen.gone_s, seen.silent_s, seen.problem = None, 200.0, "no answer within 2 s"
    said = summary(seen)
    assert said.sentence == "The coordinator has not answered for 3 min." and said.notes == (seen.problem,)
    seen.silent_s = 1.0
    assert summary(seen).level == GOOD


def test_a_coordinator_that_runs_again_recovers_until_it_answers() -> None:
    seen = view(running=3)
    seen.recovering = True
    found = summary(seen)
    assert (found.level, found.sentence) == (NOTICE, "The coordinator has restarted and recovers its state.")
    assert found.stale
    seen.silent_s = 4.0
    assert summary(seen).sentence == "The coordinator has not answered for 4 s."


def test_who_came_since_it_was_asked_waits_for_the_same() -> None:
    seen = view(12, 3, (Waiting("a", 3, "blocks"),))
    seen.pending = 5
    assert summary(seen).sentence == "12 running, 5 waiting for free blocks."


def test_every_limit_of_the_coordinator_has_words() -> None:
    assert WAITS_FOR.keys() | {CEILING} == QUEUED_FOR.keys()


def test_notes_say_who_is_gone_and_who_loads() -> None:
    said = summary(view(absent=(BACK,), workers=(READY, LOADING)))
    assert said.notes == ("w1 is starting again: was lost, process 4", "w1 is loading: weights 40%")


def test_a_lost_worker_starts_again_for_a_while_and_one_that_left_is_not_shown() -> None:
    seen, gone = DisconnectedWorkers(), {"w1": "was lost, process 4", "w2": "left, process 5"}
    assert seen.look(gone, ["w0"], 100.0) == (BACK,)
    assert seen.look(gone, ["w0"], 99.0 + STARTS_AGAIN_S) == (BACK,)
    assert [one.state for one in seen.look(gone, ["w0"], 100.0 + STARTS_AGAIN_S)] == [GONE]
    assert seen.look(gone, ["w0", "w1"], 500.0) == ()  # connected and loading
    assert seen.look(gone, ["w0"], 600.0) == (BACK,)  # lost again
    assert seen.look({}, ["w0"], 700.0) == ()


def test_what_a_coordinator_says_of_a_worker_that_left_is_known() -> None:
    driver = Driver()
    left, lost = (driver.add_worker(8, name) for name in ("w1", "w2"))
    driver.apply(WorkerGone(left.number, goodbye=True))
    driver.apply(WorkerGone(lost.number))
    gone = driver.ask(GetHealth(rid=1)).gone
    assert list(gone) == ["w1", "w2"]
    assert [(one.name, one.state) for one in DisconnectedWorkers().look(gone, (), 0.0)] == [("w2", STARTING)]


@pytest.mark.parametrize(
    ("stored", "notes"),
    [
        (None, ()),
        (StorageTotals(), ()),
        (StorageTotals(documents=1, size_bytes=1500), ("Stored: 1 object of 1.5 kB, 0 in progress.",)),
        (
            StorageTotals(documents=12, size_bytes=2_340_000, in_progress=3),
            ("Stored: 12 objects of 2.3 MB, 3 in progress.",),
        ),
        (StorageTotals(up=False), ("The database of stored objects does not answer; see the gateway's log.",)),
    ],
)
def test_stored_work_is_a_note(stored: StorageTotals | None, notes: tuple[str, ...]) -> None:
    seen = view()
    seen.stored = stored
    assert summary(seen).notes == notes
