"""Snapshots keep the host tier, with copies that are pending and in flight, for models of each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from tests.coordinator import test_host_states, test_host_tier, test_host_windows
from tests.coordinator.test_host_tier import HostDriver, HostWorker
from tools.simulation.digest import state_digest


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("kind", [test_host_tier, test_host_states, test_host_windows])
def test_a_snapshot_keeps_entries_and_copies(kind: Any, answered: bool, tmp_path: Path) -> None:
    hosted: Callable[[], tuple[HostDriver, HostWorker]] = kind.hosted
    driver, worker = hosted()
    for prompt in (kind.FIRST, kind.SECOND):
        assert driver.serve(prompt) == 0
    driver.submit(kind.FIRST, 2)
    driver.turn()
    assert worker.inbox[0].host_reads.size and worker.inbox[0].host_writes.size
    if answered:
        driver.answer(worker)
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    machine.check_invariants()
    assert state_digest(machine) == state_digest(driver.machine)
    (group,) = machine.cache.groups.values()
    assert group.host is not None and group.pool.eviction.host is group.host
    assert group.host.tier is machine.cache.host_tiers.tiers["file"]
    assert len(group.host.sent) == (0 if answered else 1)
