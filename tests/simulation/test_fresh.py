"""Simulated worlds of seeds that no earlier day had: see tests/fresh.py."""

from __future__ import annotations

import os

import pytest

from tests.fresh import DAY, seeds_of
from tools.simulation.runner import run_seed, shrunk_text

PARTS = 4
EVENTS = 2000


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_is_kept(part: int) -> None:
    for seed in seeds_of(os.environ[DAY])[part::PARTS]:
        outcome = run_seed(seed, EVENTS)
        assert not outcome.error, (
            f"python -m tools.simulation --seed {seed} --events {EVENTS}\n{outcome.error}\n{shrunk_text(outcome)}"
        )
