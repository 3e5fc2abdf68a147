"""Many seeds of a fleet, and that its simulator finds what it is there to find.

KVFORGE_SIM_START chooses other seeds than the fixed ones; KVFORGE_FLEET_SEEDS how many.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tools.simulation.fleet.faults import FAULTS, planted
from tools.simulation.fleet.world import World

START = int(os.environ.get("KVFORGE_SIM_START", "0"))
SEEDS = int(os.environ.get("KVFORGE_FLEET_SEEDS", "16"))
SEEDS_MAX = 30
# What found it before is tried first.
LIKELY = {"a_key_is_not_looked_for": 18, "the_accepted_are_refused": 5}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each replica that goes and comes is a line."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def broken(seed: int) -> str:
    """What promise is broken in a seed's world; "": none."""
    try:
        World(seed).run()
    except BaseExceptionGroup as several:
        return str(several.exceptions[0])
    except AssertionError as one:
        return str(one)
    return ""


@pytest.mark.parametrize("part", range(4))
def test_every_promise_is_kept(part: int) -> None:
    for seed in range(START + part, START + SEEDS, 4):
        World(seed).run()


def test_a_seed_replays_exactly() -> None:
    first, second = World(START), World(START)
    first.run()
    second.run()
    assert len(first.told) > 30
    assert first.told == second.told


@pytest.mark.parametrize("name", FAULTS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    likely = LIKELY.get(name, 0)
    with planted(name):
        found = next((s for s in (likely, *(s for s in range(SEEDS_MAX) if s != likely)) if broken(s)), None)
    assert found is not None, f"{name} went unnoticed for {SEEDS_MAX} seeds"
    assert not broken(found), "it is the fault that is found"
