"""Worlds in which workers have disk tiers: every promise is kept, and planted faults of the disk tier are found."""

from __future__ import annotations

import msgspec
import pytest

from tests.amount import examples
from tests.simulation.test_hosts import HOSTED
from tools.simulation.actions import ActionDrawer
from tools.simulation.draws import Draws
from tools.simulation.faults import plant
from tools.simulation.faults_of_disks import FAULTS_OF_DISKS
from tools.simulation.runner import Outcome, play, run_seed

EVENTS, SEEDS, SEEDS_MAX = 800, 6, 30
# A small host tier above a large disk, so that much comes from there, and steps short enough for orders to end.
WITH_DISKS = msgspec.structs.replace(
    HOSTED, workers=(12,), host_blocks=6, disk_blocks=60, step_us=1000, late_share=0.3, stuck_share=0.005
)
LIKELY = {
    "announced_entries_of_any_prefix": 13,
    "entries_of_wiped_tenants_are_announced": 6,
    "loads_believed_when_they_are_ordered": 3,
    "orders_that_failed_count": 5,
}


def run_crowded(seed: int) -> Outcome:
    """Run the crowded world with actions drawn from the seed."""
    return play(seed, WITH_DISKS, ActionDrawer(WITH_DISKS, Draws(f"disks/{seed}")).actions(), EVENTS, check_every=4)


def test_every_promise_is_kept() -> None:
    for seed in range(examples(SEEDS)):
        outcome = run_seed(seed, EVENTS, check_every=16, states=0.0, windows=0.0, hosts=1.0, disks=1.0)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


@pytest.mark.parametrize("seed", sorted({0, *LIKELY.values()}))
def test_a_crowded_world_without_faults_passes(seed: int) -> None:
    outcome = run_crowded(seed)
    assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


@pytest.mark.parametrize("name", FAULTS_OF_DISKS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    likely = LIKELY.get(name, 0)
    with plant(name, FAULTS_OF_DISKS):
        for seed in (likely, *(seed for seed in range(SEEDS_MAX) if seed != likely)):
            if run_crowded(seed).error:
                break
        else:
            pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")
    if seed != likely:
        print(f'faster with LIKELY["{name}"] = {seed}')
