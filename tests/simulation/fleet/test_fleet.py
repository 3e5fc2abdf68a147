"""Many seeds of a fleet, and proof that its simulator finds planted faults.

KVFORGE_SIM_START sets the first seed, KVFORGE_FLEET_SEEDS the number of seeds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.amount import examples
from tools.simulation.fleet.faults import FAULTS, planted
from tools.simulation.fleet.world import World

START = int(os.environ.get("KVFORGE_SIM_START", "0"))
SEEDS = int(os.environ.get("KVFORGE_FLEET_SEEDS", "16"))
SEEDS_MAX = 30
# Seeds that found the fault before are tried first.
LIKELY = {"a_key_is_not_looked_for": 18, "the_accepted_are_refused": 5}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Suppress the log lines about replicas that leave and return."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def broken(seed: int) -> str:
    """Return the promise that is broken in a seed's world, or ""."""
    try:
        World(seed).run()
    except BaseExceptionGroup as several:
        return str(several.exceptions[0])
    except AssertionError as one:
        return str(one)
    return ""


@pytest.mark.parametrize("part", range(4))
def test_every_promise_is_kept(part: int) -> None:
    for seed in range(START + part, START + examples(SEEDS), 4):
        World(seed).run()


def test_a_seed_replays_exactly() -> None:
    first, second = World(START), World(START)
    first.run()
    second.run()
    assert len(first.events) > 30
    assert first.events == second.events


@pytest.mark.parametrize("name", FAULTS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    likely = LIKELY.get(name, 0)
    with planted(name):
        found = next((s for s in (likely, *(s for s in range(SEEDS_MAX) if s != likely)) if broken(s)), None)
    assert found is not None, f"{name} was not found in {SEEDS_MAX} seeds"
    assert not broken(found), "the seed must pass without the fault"
