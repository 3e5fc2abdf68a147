"""Many seeds of the whole control plane, and checks of the simulator itself.

KVFORGE_SIM_START sets the first seed, KVFORGE_SIM_SEEDS the number of seeds; `make test` simulates an eighth of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.amount import examples
from tools.simulation import calm, workers
from tools.simulation.actions import text
from tools.simulation.digest import digest
from tools.simulation.faults import plant
from tools.simulation.runner import NO_LIMIT, play, run_seed, shrunk, shrunk_text, trace_seed
from tools.simulation.settings import Settings
from tools.simulation.shrink import shrink

START = int(os.environ.get("KVFORGE_SIM_START", "0"))
SEEDS = int(os.environ.get("KVFORGE_SIM_SEEDS", "80"))
PARTS = 8
EVENTS = 2000
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_is_kept(part: int) -> None:
    run_seeds(range(START + part, START + examples(SEEDS // 2), PARTS))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_is_kept_with_more_seeds(part: int) -> None:
    run_seeds(range(START + SEEDS // 2 + part, START + SEEDS, PARTS))


def run_seeds(seeds: Iterable[int]) -> None:
    """Simulate these seeds."""
    for seed in seeds:
        outcome = run_seed(seed, EVENTS)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{shrunk_text(outcome)}"


def test_every_check_after_every_event() -> None:
    for seed in range(START, START + 4):
        outcome = run_seed(seed, 600, check_every=1)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


def test_a_world_leaves_no_file_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for seed in (START, START + 1):
        run_seed(seed, 300)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_seed_replays_exactly() -> None:
    trace = trace_seed(START, 500)
    assert len(trace) > 200
    assert trace == trace_seed(START, 500)


def test_a_seed_replays_exactly_in_another_process() -> None:
    command = [sys.executable, "-m", "tools.simulation", "--seed", str(START), "--trace", "--events", "300"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = [
        subprocess.run(
            command, cwd=ROOT, env={**environment, "PYTHONHASHSEED": salt}, capture_output=True, check=True, timeout=120
        ).stdout
        for salt in ("1", "2")
    ]
    assert told[0] == told[1]
    assert told[0].count(b"turn") > 30


def test_recorded_actions_replay_the_run() -> None:
    outcome = run_seed(START, 500)
    again = play(outcome.seed, outcome.settings, outcome.actions, NO_LIMIT)
    assert (again.events, again.actions, again.error) == (outcome.events, outcome.actions, "")


def test_a_failing_seed_is_shrunk_and_told_as_text() -> None:
    with plant("generation_not_bumped"):
        outcome = run_seed(START, 600)
        assert "generation" in outcome.error
        actions = shrunk(outcome)
        assert len(actions) <= 5 < len(outcome.actions)
        told = shrunk_text(outcome)
    assert all(text(action) in told for action in actions)
    assert "keeps its generation" in told


def test_shrinking_leaves_only_what_is_needed() -> None:
    items = list(range(100))
    assert shrink(items, lambda left: {3, 57} <= set(left), 1000) == [3, 57]


def test_a_standstill_does_not_prolong_the_wait_for_workers_that_were_away_before() -> None:
    settings = Settings(workers=(26, 26, 26), short_us=50, turn_us=20, stand_gap_us=1, crash_gap_us=1, reattach_us=500)
    crash, stand = (10_000, "crash", "k", "after", 1, 100, 0.0), (10_900, "stand", "k", 100_000, (False,))
    outcome = play(0, settings, [crash, stand], NO_LIMIT)
    assert (outcome.error, outcome.actions) == ("", [crash, stand]), outcome.where


def test_a_request_goes_on_behind_a_step_that_read_its_row_though_no_block_was_freed() -> None:
    """Its row lost blocks that others hold too, so that none waits for the step's end."""
    outcome = run_seed(77016, 2000, drafts=1.0)
    assert not outcome.error, f"{outcome.error}\n{outcome.where}"


@pytest.mark.parametrize(("watchdog", "problem"), [(workers.WATCHDOG_TIMEOUTS, ""), (1 << 40, "all workers are ready")])
def test_ranks_that_hang_in_a_step_during_a_restart_are_ended_by_their_watchdogs(
    watchdog: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other and cannot reconnect, so the coordinator cannot end them (seed 454)."""
    monkeypatch.setattr(workers, "WATCHDOG_TIMEOUTS", watchdog)
    monkeypatch.setattr(calm, "CALM_TURNS_MAX", 100 if not problem else 20)  # each of the last 20 takes a second
    settings = Settings(
        workers=(26,),
        ranks=(3,),
        clients=1,
        short_us=50,
        long_share=0.0,
        turn_us=20,
        step_us=2000,
        step_timeout_us=20_000,
        step_tokens_max=4,
        steps_in_flight_max=3,
        crash_gap_us=1,
        reattach_us=20_000,
    )
    outcome = play(
        0,
        settings,
        [
            (0, "connect", "c0", False),
            (11_000, "submit", "c0", ("r1",), tuple(range(12)), 12, 1, (), "ant", ()),
            (11_292, "hang", "w0"),  # rank 0, in a step that the others have not begun
            (19_292, "crash", "k", "after", 1, 1000, 0.0),  # before the step timeout; the others are a step ahead now
            (31_292, "connect", "c0", True),
        ],
        NO_LIMIT,
    )
    assert problem in outcome.error, outcome.where
    assert bool(problem) == bool(outcome.error), outcome.where


def test_a_digest_sees_every_change_but_not_identity() -> None:
    class Box:
        def __init__(self, value: object) -> None:
            self.value, self.changed = value, [1]

    array = np.arange(3)
    one, two = Box({"a": array, "b": [1, 2.5, None]}), Box({"a": array.copy(), "b": [1, 2.5, None]})
    assert digest(one) == digest(two)
    two.changed.append(2)
    assert digest(one) == digest(two), "lists of unpublished changes do not count"
    array[1] = 7
    assert digest(one) != digest(two)
    assert digest(Box(np.array([1], np.int32))) != digest(Box(np.array([1], np.int64)))
    assert digest(Box((1,))) != digest(Box((1.0,)))
