"""durability = "power": acknowledged data survives a power failure at every point of every writing code path."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from kvforge.coordinator.core.events import Boot, ClientCame
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.log import Journal, remove_before
from kvforge.coordinator.journal.recovery import Recovered
from kvforge.coordinator.journal.state_folder import StateFolder
from tests.coordinator.journal.power import LOST, NAMES_KEPT, Disk, PowerCut
from tools.simulation.limits import make_limits

POINTS_MAX = 400
BOOT = Boot("b" * 32, bytes(32), make_limits(sequences_max=2, blocks_max=8, blocks_per_sequence_max=4))


class Host:
    """Successive lives on one disk; `acknowledged` counts the acknowledged arrivals of clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "made" / "state"
        self.acknowledged = self.tried = 0
        self.state_folder: StateFolder | None = None

    def start(self) -> Recovered | None:
        """Start a process, which recovers what is on the disk."""
        self.state_folder = state_folder = StateFolder(self.folder, "power", 1 << 30, 1 << 30)
        found = state_folder.recover()
        journal = state_folder.begin(found, lambda: True)
        if found is None:
            self.machine = Machine(BOOT, 0)
            journal.note(BOOT, 0)
            journal.commit()
        else:
            self.machine = found.machine
            self.tried = self.acknowledged = len(found.machine.clients)
        return found

    @property
    def journal(self) -> Journal:
        assert self.state_folder is not None and self.state_folder.journal is not None
        return self.state_folder.journal

    def accept(self) -> None:
        """Accept a client and acknowledge it."""
        self.tried += 1
        event = ClientCame(self.tried)
        self.machine.apply(event, self.tried)
        self.journal.note(event, self.tried)
        self.journal.commit()
        self.acknowledged = self.tried

    def cut_journal(self) -> None:
        """Write a snapshot as the child process would, and remove what it replaces."""
        number = self.journal.rotate()
        head = snapshot.Head.of(self.journal, self.tried, self.tried)
        snapshot.write(self.folder / snapshot.STATE.format(number), self.machine, head)
        remove_before(self.folder, number, durable=True)

    def die(self) -> None:
        """Kill the process; the host stays up."""
        if self.state_folder is not None:
            self.state_folder.close(keep=True)
            self.state_folder = None

    def live(self) -> None:
        """Run every writing code path twice: start, records, segment, snapshot, death, recovery."""
        for _ in range(2):
            self.start()
            self.accept()
            self.accept()
            self.cut_journal()
            self.accept()
            self.die()


def test_whatever_was_acknowledged_outlives_a_power_cut_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cut in range(POINTS_MAX):
        with monkeypatch.context() as patched:
            root = tmp_path / f"before-{cut}"
            root.mkdir()
            disk, host = Disk(root), Host(root)
            disk.install(patched)
            disk.cut = cut
            with suppress(PowerCut):
                host.live()
        over = disk.points < cut
        host.die()
        for kept in (LOST, NAMES_KEPT):
            then = Host(disk.after(tmp_path / f"after-{cut}-{kept}", kept))
            found = then.start()
            known = len(found.machine.clients) if found is not None else 0
            assert host.acknowledged <= known <= host.tried, f"cut at point {cut}, {kept}"
            then.accept()
            then.die()
        disk.close()
        if over:
            assert cut > 60, "too few points were tested"
            return
    pytest.fail("more writes than the test covers")


def test_what_a_life_read_is_on_the_disk_before_anything_follows_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous life died between write and sync: the record is read and answered, so it must not be lost."""
    root = tmp_path / "before"
    root.mkdir()
    disk, host = Disk(root), Host(root)
    with monkeypatch.context() as patched:
        disk.install(patched)
        host.start()
        host.accept()
        with patched.context() as unsynced:
            unsynced.setattr("os.fdatasync", lambda _descriptor: None)
            host.accept()
        host.die()
        found = host.start()
        assert found is not None and len(found.machine.clients) == 2
        for _ in range(3):
            host.accept()
    host.die()
    then = Host(disk.after(tmp_path / "after"))
    disk.close()
    again = then.start()
    assert again is not None and len(again.machine.clients) == 5
    then.die()
