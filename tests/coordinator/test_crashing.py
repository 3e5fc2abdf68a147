"""Killed at any instant, a coordinator loses nothing, does nothing twice, and streams no wrong token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.amount import examples
from tests.coordinator.crashing import live

SEEDS = 12


@pytest.mark.parametrize("seed", range(examples(SEEDS)))
def test_whatever_dies_every_request_ends_once_with_its_tokens(seed: int, tmp_path: Path) -> None:
    world = live(seed, tmp_path)
    assert world.crashes >= 5 and len(world.owners) >= 10
