"""With `zero_on_tenant_change`, no tenant gets another tenant's data in a block; the simulator would notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.cache.zeroing import Zeroing
from tools.simulation.runner import run_seed

EVENTS = 600
SEEDS = 12
real_pop_blocks = Zeroing.pop_blocks


def none_owed(_self: Zeroing, _ids: Any, _tenant: int) -> None:
    """A fault: a block that changes tenant is not recorded."""


def last_one_lost(self: Zeroing) -> Any:
    """A fault: a step omits one of the blocks to zero."""
    return real_pop_blocks(self)[:-1]


def owed_for_ever(self: Zeroing) -> Any:
    """A fault: a block is zeroed again in each later step, whatever its contents."""
    return np.fromiter(self._owed, np.int32, len(self._owed))


@pytest.mark.parametrize(
    ("name", "fault", "seen"),
    [
        ("note_writer", none_owed, "with another's KV"),
        ("pop_blocks", last_one_lost, "with another's KV"),
        ("pop_blocks", owed_for_ever, "garbage"),
    ],
)
def test_the_simulator_sees_a_block_that_changes_tenant(
    name: str, fault: Callable[..., Any], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Zeroing, name, fault)
    errors = (run_seed(seed, EVENTS).error for seed in range(SEEDS))
    first = next((error for error in errors if error), "")
    assert seen in first
