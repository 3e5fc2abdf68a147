"""Recovery rebuilds the same machine, digest for digest, from events alone and from snapshots."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvforge.coordinator.core.events import Applied, Boot, ClientCame, Event, FromClient, FromWorker
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import FROM_CLIENT, HEAD, STATE_VERSION
from kvforge.coordinator.journal.identity import ACKNOWLEDGED
from kvforge.coordinator.journal.log import SEGMENT, Journal, segments, states
from kvforge.coordinator.journal.records import record
from kvforge.coordinator.journal.recovery import recover
from kvforge.protocol import codec
from kvforge.protocol.errors import InvalidConfiguration, JournalCorrupt
from kvforge.protocol.messages import GetStats
from tests.coordinator.journal.files import acknowledge, head_of, records_of
from tools.simulation.digest import state_digest
from tools.simulation.limits import make_limits
from tools.simulation.runner import drawn
from tools.simulation.world import World

ROOT = Path(__file__).parents[3]
EVENTS = 1200
FINE = GetStats(rid=1)


def boot() -> Boot:
    return Boot("b" * 32, bytes(32), make_limits(blocks_max=64))


class Written:
    """Writes the inputs of a simulated machine, several events per record."""

    def __init__(self, folder: Path, boot: Boot, per_record: int = 3) -> None:
        self.journal = Journal(folder, 1)
        self.journal.note(boot, 0)
        self.journal.commit()
        self._per_record = per_record
        self.events, self.now_us = 0, 0

    def applied(self, _machine: Machine, event: Event, now_us: int, _applied: Applied) -> None:
        self.events, self.now_us = self.events + 1, now_us
        frames: Any = codec.encode(event.message) if isinstance(event, FromClient | FromWorker) else ()
        self.journal.note(event, now_us, frames)
        if self.events % self._per_record == 0:
            self.journal.commit()


def lived(seed: int, folder: Path) -> tuple[World, Written]:
    """A simulated world that writes its events to a journal."""
    settings, drawer = drawn(seed)
    assert not settings.crash_gap_us, "events before a crash may be missing from the journal"
    (folder / "tables").mkdir(parents=True)
    (folder / "journal").mkdir()
    world = World(settings, str(seed), folder / "tables")
    written = Written(folder / "journal", world.boot)
    world.recording = written  # type: ignore[assignment]
    try:
        world.run(drawer.actions(), EVENTS)
    finally:
        world.close()
    written.journal.commit()
    written.journal.close()
    return world, written


def cut_by_a_snapshot(folder: Path, records: int) -> Path:
    """The same journal in another folder, its first records replaced by a snapshot."""
    (path,) = segments(folder).values()
    cut = folder.with_name("cut")
    cut.mkdir()
    found = records_of(path)
    assert records < len(found)
    data = path.read_bytes()
    (cut / path.name).write_bytes(data[: found[records - 1].end])
    acknowledge(cut, found[records - 1])
    early = recover(cut)
    assert early is not None and early.records == records
    (cut / path.name).unlink()
    journal = Journal(cut, early.number, origin=early.origin)
    head = snapshot.Head.of(journal, early.now_us, early.numbers)
    snapshot.write(cut / snapshot.STATE.format(early.number), early.machine, head)
    journal.close()
    with (cut / SEGMENT.format(early.number)).open("ab") as file:
        file.write(data[found[records - 1].end :])
    shutil.copy(folder / ACKNOWLEDGED, cut / ACKNOWLEDGED)
    return cut


@pytest.mark.parametrize("seed", [2, 13])
def test_a_journal_makes_the_same_machine_in_another_interpreter_with_another_hash_seed(
    seed: int, tmp_path: Path
) -> None:
    world, written = lived(seed, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.coordinator.journal.digested", str(tmp_path / "journal")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(1000 + seed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert written.events > EVENTS // 2
    assert done.stdout.split() == [state_digest(world.coordinator.machine), str(written.now_us)]


def test_records_of_a_folder_from_which_a_segment_is_missing_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.note(boot(), 0)
    journal.note(ClientCame(1), 0)
    journal.commit()
    for now_us in (1, 2):
        journal.rotate()
        journal.note(FromClient(1, FINE), now_us, codec.encode(FINE))
        journal.commit()
    journal.close()
    found = recover(tmp_path)
    assert found is not None and (found.number, found.now_us, found.numbers) == (4, 2, 1)
    segments(tmp_path)[2].unlink()
    with pytest.raises(JournalCorrupt, match="record 2 is missing and 3 follows"):
        recover(tmp_path)


def test_a_torn_tail_is_said_and_the_rest_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    for event in (boot(), FromClient(1, FINE)):
        journal.note(event, 5, codec.encode(FINE) if isinstance(event, FromClient) else ())
        journal.commit()
    journal.close()
    path = segments(tmp_path)[1]
    whole = path.stat().st_size
    first, second = records_of(path)
    acknowledge(tmp_path, first)
    for cut in (1, 20, second.end - second.start - 1):
        os.truncate(path, whole - cut)
        found = recover(tmp_path)
        assert found is not None and found.torn is not None
        assert (found.torn[0], found.records, found.number) == (path, 1, 2)
        assert found.torn[1] + found.torn[2] == whole - cut
    (tmp_path / ACKNOWLEDGED).unlink()
    os.truncate(path, 3)
    assert recover(tmp_path) is None, "not even the head was written"


@pytest.mark.parametrize("seed", [2, 30, 43])
def test_a_snapshot_and_what_follows_make_the_same_machine(seed: int, tmp_path: Path) -> None:
    """At any point: objects that two parts of the machine share must be shared again."""
    world, written = lived(seed, tmp_path)
    whole = recover(tmp_path / "journal")
    assert whole is not None and state_digest(whole.machine) == state_digest(world.coordinator.machine)
    for records in (1, 40, 120, whole.records - 1):
        found = recover(cut := cut_by_a_snapshot(tmp_path / "journal", records))
        assert found is not None and found.numbers == whole.numbers
        assert (state_digest(found.machine), found.now_us) == (state_digest(whole.machine), written.now_us)
        found.machine.check_invariants()
        shutil.rmtree(cut)


def test_a_machine_of_a_snapshot_looks_its_attributes_up_as_fast_as_a_new_one(tmp_path: Path) -> None:
    """Python keeps attributes inline until all are set at once, and in a dictionary from then on."""
    machine, head = Machine(boot(), 0), head_of(1)
    names = vars(Machine(boot(), 0)).keys()
    snapshot.write(tmp_path / "state", machine, head)
    restored = snapshot.Snapshot(tmp_path / "state").machine()
    kept = [value.keys() for value in gc.get_referents(restored) if type(value) is dict]
    assert names not in kept
    assert vars(restored).keys() == names


def test_a_damaged_snapshot_is_refused_wherever_it_is_damaged(tmp_path: Path) -> None:
    lived(13, tmp_path)
    (path,) = states(cut_by_a_snapshot(tmp_path / "journal", 100)).values()
    good = path.read_bytes()
    for where in (0, 5, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:where] + bytes([good[where] ^ 1]) + good[where + 1 :])
        with pytest.raises(JournalCorrupt, match=path.name):
            recover(path.parent)
    path.write_bytes(good[:-1])
    with pytest.raises(JournalCorrupt, match=path.name):
        recover(path.parent)


@pytest.mark.parametrize(
    "payload",
    [b"short", HEAD.pack(200, 0, 0, 1, 1, 1), HEAD.pack(FROM_CLIENT, 0, 9, 1, 1, 1)],
    ids=["short", "kind", "frames"],
)
def test_a_record_that_is_as_it_was_written_and_no_event_is_refused(payload: bytes, tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.note(boot(), 0)
    journal.commit()
    journal.close()
    path = segments(tmp_path)[1]
    good = path.stat().st_size
    (first,) = records_of(path)
    path.write_bytes(path.read_bytes() + record(2, [payload], first.crc))
    with pytest.raises(JournalCorrupt, match=f"{path.name} is damaged at byte {good}"):
        recover(tmp_path)


def test_what_other_code_wrote_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, 1)
    journal.note(boot(), 0)
    journal.commit()
    journal.close()
    monkeypatch.setattr("kvforge.coordinator.journal.entries.STATE_VERSION", STATE_VERSION + 1)
    with pytest.raises(InvalidConfiguration, match=f"records of state version {STATE_VERSION}, this kvforge has"):
        recover(tmp_path)
