"""Intact files in wrong places: each names its journal and its predecessor, and the acknowledged length is recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvforge.coordinator.core.events import Boot, ClientCame
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.identity import ACKNOWLEDGED
from kvforge.coordinator.journal.log import Journal, remove_before, segments, states
from kvforge.coordinator.journal.recovery import recover
from kvforge.protocol.errors import JournalCorrupt
from tests.coordinator.journal.files import records_of
from tools.simulation.limits import make_limits

SMALL = make_limits(sequences_max=2, blocks_max=8, blocks_per_sequence_max=4)


def written(folder: Path) -> Path:
    """A snapshot, and two segments after it with two records each."""
    folder.mkdir()
    journal = Journal(folder, 1)
    journal.note(Boot("b" * 32, bytes(32), SMALL), 0)
    journal.commit()
    come(journal, 1)
    number = journal.rotate()
    found = recover(folder)
    assert found is not None
    head = snapshot.Head.of(journal, found.now_us, found.numbers)
    snapshot.write(folder / snapshot.STATE.format(number), found.machine, head)
    remove_before(folder, number, durable=False)
    for client in (2, 3, 4, 5):
        come(journal, client)
        if client == 3:
            journal.rotate()
    journal.close()
    found = recover(folder)
    assert found is not None and len(found.machine.clients) == 5
    return folder


def come(journal: Journal, client: int) -> None:
    journal.note(ClientCame(client), client)
    journal.commit()


def last_segment(folder: Path) -> Path:
    return list(segments(folder).values())[-1]


def last_bit(folder: Path, _other: Path) -> None:
    path = last_segment(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def every_bit_of_the_last_header(folder: Path, _other: Path) -> None:
    path = last_segment(folder)
    data = bytearray(path.read_bytes())
    data[records_of(path)[-1].start + 4] ^= 0x80
    path.write_bytes(data)


def last_record_cut(folder: Path, _other: Path) -> None:
    path = last_segment(folder)
    path.write_bytes(path.read_bytes()[: records_of(path)[-1].start])


def last_segment_emptied(folder: Path, _other: Path) -> None:
    last_segment(folder).write_bytes(b"")


def last_segment_headed_only(folder: Path, _other: Path) -> None:
    path = last_segment(folder)
    path.write_bytes(path.read_bytes()[: records_of(path)[0].start])


def last_segment_removed(folder: Path, _other: Path) -> None:
    last_segment(folder).unlink()


def mark_removed(folder: Path, _other: Path) -> None:
    (folder / ACKNOWLEDGED).unlink()


def mark_damaged(folder: Path, _other: Path) -> None:
    path = folder / ACKNOWLEDGED
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def mark_of_another(folder: Path, other: Path) -> None:
    shutil.copy(other / ACKNOWLEDGED, folder / ACKNOWLEDGED)


def snapshot_of_another(folder: Path, other: Path) -> None:
    (path,) = states(other).values()
    shutil.copy(path, folder / path.name)


def segment_of_another(folder: Path, other: Path) -> None:
    path = last_segment(other)
    shutil.copy(path, folder / path.name)


def snapshot_under_a_later_number(folder: Path, _other: Path) -> None:
    (path,) = states(folder).values()
    path.rename(folder / snapshot.STATE.format(5))


def snapshot_removed(folder: Path, _other: Path) -> None:
    (path,) = states(folder).values()
    path.unlink()


def segments_swapped(folder: Path, _other: Path) -> None:
    first, second = segments(folder).values()
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def all_of_another(folder: Path, other: Path) -> None:
    for path in (*segments(other).values(), *states(other).values()):
        shutil.copy(path, folder / path.name)


DAMAGES = [
    last_bit,
    every_bit_of_the_last_header,
    last_record_cut,
    last_segment_emptied,
    last_segment_headed_only,
    last_segment_removed,
    mark_removed,
    mark_damaged,
    mark_of_another,
    snapshot_of_another,
    segment_of_another,
    snapshot_under_a_later_number,
    snapshot_removed,
    segments_swapped,
    all_of_another,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_or_from_elsewhere_is_refused(damage: Callable[[Path, Path], None], tmp_path: Path) -> None:
    folder, other = written(tmp_path / "one"), written(tmp_path / "other")
    damage(folder, other)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(JournalCorrupt):
        recover(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_older_copy_of_a_segment_is_refused(tmp_path: Path) -> None:
    """It belongs to this journal and is intact, but lacks what was acknowledged later."""
    folder = written(tmp_path / "one")
    found = recover(folder)
    assert found is not None
    path = last_segment(folder)
    old = path.read_bytes()
    journal = Journal(folder, found.number, origin=found.origin)
    come(journal, 6)
    journal.close()
    last_segment(folder).unlink()
    path.write_bytes(old)
    with pytest.raises(JournalCorrupt, match="were acknowledged and are missing"):
        recover(folder)


def test_records_that_a_host_lost_with_its_power_are_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """durability = "process" does not survive a host crash: the mark may be on disk without the record."""
    folder = written(tmp_path / "one")
    last_record_cut(folder, folder)
    with pytest.raises(JournalCorrupt):
        recover(folder)
    monkeypatch.setattr("kvforge.coordinator.journal.recovery.host_boot", lambda: "another boot of this host")
    found = recover(folder)
    assert found is not None and len(found.machine.clients) == 4
    assert "were not on its disk" in caplog.text
