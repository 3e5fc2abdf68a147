"""The simulator finds what it is there to find: every planted fault, within a bounded number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.faults import FAULTS, plant
from tests.simulation.runner import run_seed

EVENTS = 800
SEEDS_MAX = 30


def found_after(name: str) -> tuple[int, str]:
    """How many seeds it took, and what was seen; (0, "") where nothing was."""
    with plant(name):
        for seed in range(SEEDS_MAX):
            outcome = run_seed(seed, EVENTS, check_every=4)
            if outcome.error:
                return seed + 1, outcome.error
    return 0, ""


@pytest.mark.parametrize("name", FAULTS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    seeds, error = found_after(name)
    assert seeds, f"{name} went unnoticed for {SEEDS_MAX} seeds"
    assert error


def test_the_core_without_faults_passes_the_same_seeds() -> None:
    for seed in range(SEEDS_MAX):
        outcome = run_seed(seed, EVENTS, check_every=4)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"
