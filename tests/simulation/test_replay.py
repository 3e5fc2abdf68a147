"""Everything that enters the core is an event, and a list of events rebuilds the same machine in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.simulation.replay import Recording
from tools.simulation.runner import drawn
from tools.simulation.world import World

ROOT = Path(__file__).parents[2]
EVENTS = 1000
SEEDS = {13: "no drain", 2: "by a client", 30: "by a signal"}


@pytest.mark.parametrize("seed", SEEDS)
def test_recorded_events_make_the_same_effects_and_the_same_state_in_another_process(seed: int, tmp_path: Path) -> None:
    settings, drawer = drawn(seed)
    by = "by a signal" if settings.drain_by_signal else "by a client"
    assert SEEDS[seed] == ("no drain" if settings.drain_ms < 0 else by)
    world = World(settings, str(seed), tmp_path)
    world.recording = Recording(world.boot, 0)
    try:
        world.run(drawer.actions(), EVENTS)
    finally:
        world.close()
    world.recording.write(world.coordinator.machine, tmp_path / "events")
    done = subprocess.run(
        [sys.executable, "-m", "tools.simulation.replay", str(tmp_path / "events")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(1000 + seed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(world.recording.lines) > 10
    assert done.stdout.split("\n")[:-1] == world.recording.lines
