"""The benchmark of a turn terminates, whatever makes its turns due."""

from __future__ import annotations

import pytest

from benchmarks import control_plane


def test_a_turn_that_comes_before_the_workers_answer_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat can make a turn due that sends no step; the benchmark must not wait for a step then."""
    monkeypatch.setattr(control_plane, "WARM_STEPS", 2)
    turn, early = control_plane.Shell.turn, iter(range(1 << 20))

    def sometimes_early(shell: control_plane.Shell) -> float:
        return 0.0 if next(early) % 3 == 2 else turn(shell)

    monkeypatch.setattr(control_plane.Shell, "turn", sometimes_early)
    taken, *_ = control_plane.whole(4, 8)
    assert len(taken) == 8
    assert min(taken) > 0, "the benchmark must measure the turn that handled the answer"
