"""Worlds in which most requests are of batches: the next step of one alone is sent before the one in flight ends."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.cache.pauses import Pauses
from tests.amount import examples
from tools.simulation.faults import plant
from tools.simulation.runner import run_seed

EVENTS, SEEDS, LIKELY = 800, 8, 0


@pytest.mark.parametrize("drafts", [0.0, 1.0])
def test_every_promise_is_kept(drafts: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, add = list[bool](), Pauses.add

    def seen(self: Pauses, idle_us: int, duration_us: int, *, with_result: bool, in_time: bool) -> None:
        ahead.append(in_time and not with_result)
        add(self, idle_us, duration_us, with_result=with_result, in_time=in_time)

    monkeypatch.setattr(Pauses, "add", seen)
    for seed in range(examples(SEEDS)):
        outcome = run_seed(seed, EVENTS, check_every=16, drafts=drafts, batches=1.0)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"
    assert sum(ahead) > 10, "steps were sent before a result"


def test_a_step_that_makes_no_turn_due_is_found() -> None:
    with plant("next_step_of_a_batch_not_due"):
        assert run_seed(LIKELY, EVENTS, check_every=16, batches=1.0).error
