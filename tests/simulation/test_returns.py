"""Worlds in which idle sequences come back before their requests: every promise is kept, and planted faults are found.

Idle times are known after two there, and a step carries one block, so that most sequences are on their way when
something else happens.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvforge.coordinator.core.cache import idle_times, idle_tracker, paced_reads
from kvforge.coordinator.core.cache.idle_tracker import IdleTracker
from kvforge.coordinator.core.scheduling import returning
from tests.amount import examples
from tests.simulation.test_hosts import HOSTED
from tools.simulation.actions import ActionDrawer
from tools.simulation.draws import Draws
from tools.simulation.faults import plant
from tools.simulation.faults_of_returns import FAULTS_OF_RETURNS
from tools.simulation.runner import Outcome, play
from tools.simulation.settings import Settings

EVENTS, SEEDS, SEEDS_MAX = 1200, 6, 30
# Conversations that keep their sequences, with time between the turns, in a pool with room for some.
RETURNING = msgspec.structs.replace(
    HOSTED,
    kinds=True,
    workers=(24,),
    sequences_max=16,
    gap_us=1500,
    half_share=0.01,
    flip_share=0.05,
    wipe_gap_us=0,
    quotas={},
)
WORLDS = {
    "one process": RETURNING,
    "two ranks": msgspec.structs.replace(RETURNING, ranks=(2,)),
}
OTHERS = {
    "wipes": msgspec.structs.replace(RETURNING, wipe_gap_us=20_000, half_share=0.05),
    "deaths of the coordinator": msgspec.structs.replace(RETURNING, crash_gap_us=30_000),
    "a disk": msgspec.structs.replace(RETURNING, host_blocks=20, disk_blocks=60, order_us=200),
    "windows": msgspec.structs.replace(RETURNING, window=6, window_pages=1, workers=(40,)),
    "states": msgspec.structs.replace(
        RETURNING, state_blocks=1, prompt_chunk=4, checkpoint_tokens=8, step_tokens_max=16, workers=(40,)
    ),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sequences come back as often as possible."""
    for module, name, value in (
        (idle_times, "LEARN_MIN", 2),
        (idle_times, "WORTH", 64),
        (idle_tracker, "RETRY_US", 300),
        (paced_reads, "BLOCKS_MIN", 1),
        (paced_reads, "IDLE_BLOCKS", 1),
        (returning, "SHARE", 2),
    ):
        monkeypatch.setattr(module, name, value)


def run_returning(seed: int, settings: Settings = RETURNING) -> Outcome:
    """Run a world with actions drawn from the seed."""
    return play(seed, settings, ActionDrawer(settings, Draws(f"returns/{seed}")).actions(), EVENTS, check_every=4)


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_every_promise_is_kept_in_other_worlds(settings: Settings) -> None:
    for seed in range(examples(SEEDS // 3)):
        outcome = run_returning(seed, settings)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


@pytest.mark.parametrize("settings", WORLDS.values(), ids=WORLDS)
def test_every_promise_is_kept_while_sequences_come_back(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    came_back, continued = IdleTracker.came_back, IdleTracker.continued

    def counted(self: IdleTracker, slot: int, late_us: int) -> None:
        counts["came back"] += 1
        came_back(self, slot, late_us)

    def used(self: IdleTracker, slot: int) -> None:
        counts["used"] += bool(self._sequences.returned[slot])
        continued(self, slot)

    monkeypatch.setattr(IdleTracker, "came_back", counted)
    monkeypatch.setattr(IdleTracker, "continued", used)
    for seed in range(examples(SEEDS)):
        outcome = run_returning(seed, settings)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"
    assert counts["came back"] > counts["used"] > 0, counts


@pytest.mark.parametrize("name", FAULTS_OF_RETURNS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    with plant(name, FAULTS_OF_RETURNS):
        for seed in range(SEEDS_MAX):
            if run_returning(seed).error:
                break
        else:
            pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")
