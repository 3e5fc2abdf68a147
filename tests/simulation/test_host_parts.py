"""Worlds with host files and models with windows or states: every promise is kept, and planted faults are found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.amount import examples
from tools.simulation.actions import ActionDrawer
from tools.simulation.draws import Draws
from tools.simulation.faults import plant
from tools.simulation.faults_of_parts import FAULTS_OF_PARTS, OF_RANKS, OF_STATES, ON_DISK
from tools.simulation.runner import Outcome, play, run_seed
from tools.simulation.settings import Settings

from .test_hosts import EVENTS, HOSTED, SEEDS_MAX

SEEDS = 6
WINDOWED = msgspec.structs.replace(HOSTED, window=3, window_pages=2, workers=(26,), host_blocks=96, quotas={})
STATEFUL = msgspec.structs.replace(
    HOSTED, kinds=True, state_blocks=2, prompt_chunk=2, checkpoint_tokens=2, workers=(20,), host_blocks=96, quotas={}
)
RANKED = msgspec.structs.replace(HOSTED, ranks=(2,))
ABOVE_A_DISK = msgspec.structs.replace(
    WINDOWED,
    window_pages=1,
    workers=(20,),
    host_blocks=14,
    disk_blocks=120,
    step_us=400,
    wipe_gap_us=0,
    flip_share=0.02,
)
WORLDS = dict.fromkeys(OF_STATES, STATEFUL) | dict.fromkeys(OF_RANKS, RANKED) | dict.fromkeys(ON_DISK, ABOVE_A_DISK)
# Seeds to try first; see test_bites.
LIKELY = {
    "host_hit_without_its_windows": 6,
    "window_blocks_on_the_disk_of_the_block_before": 25,
    "checkpoint_on_the_host_of_another_position": 2,
    "checkpoint_on_the_host_of_any_position": 1,
}

# In `make test` one seed of each world; the others beside the planted faults.
SOUND: list[Any] = [(0, settings) for settings in (WINDOWED, STATEFUL, RANKED, ABOVE_A_DISK)]
MORE = [(seed, settings) for seed in (1, 2) for settings in (WINDOWED, STATEFUL, RANKED, ABOVE_A_DISK)]
MORE += [(seed, WORLDS.get(name, WINDOWED)) for name, seed in LIKELY.items() if seed >= 3]
SOUND += [pytest.param(*each, marks=pytest.mark.soak) for each in MORE]


def run_mixed(seed: int, settings: Settings) -> Outcome:
    """Run a crowded world with actions drawn from the seed."""
    return play(seed, settings, ActionDrawer(settings, Draws(f"mixed/{seed}")).actions(), EVENTS, check_every=4)


@pytest.mark.parametrize(("states", "windows"), [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_every_promise_is_kept(states: float, windows: float) -> None:
    for seed in range(examples(SEEDS)):
        outcome = run_seed(seed, EVENTS, check_every=16, states=states, windows=windows, hosts=1.0, disks=0.5)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


@pytest.mark.parametrize(("seed", "settings"), SOUND)
def test_a_crowded_world_without_faults_passes(seed: int, settings: Settings) -> None:
    outcome = run_mixed(seed, settings)
    assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


@pytest.mark.parametrize("name", FAULTS_OF_PARTS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    likely, settings = LIKELY.get(name, 0), WORLDS.get(name, WINDOWED)
    with plant(name, FAULTS_OF_PARTS):
        for seed in (likely, *(seed for seed in range(SEEDS_MAX) if seed != likely)):
            if run_mixed(seed, settings).error:
                break
        else:
            pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")
    if seed != likely:
        print(f'faster with LIKELY["{name}"] = {seed}')
