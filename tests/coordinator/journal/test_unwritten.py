"""Records that are stored until their turn is over: no death of the process loses one or repeats one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.coordinator.core.events import Boot, ClientCame
from kvforge.coordinator.core.limits import Limits
from kvforge.coordinator.journal import unwritten
from kvforge.coordinator.journal.entries import pack
from kvforge.coordinator.journal.identity import Origin, read_acknowledged_position
from kvforge.coordinator.journal.log import Journal, segments
from kvforge.coordinator.journal.segment_completion import complete_segment
from kvforge.coordinator.journal.unwritten import FILE, FIRST_AT, START, UnwrittenRecords, read_unwritten
from kvforge.coordinator.replay import main as replay
from kvforge.protocol.errors import JournalCorrupt, StateRemoved
from tests.coordinator.journal.files import records_of
from tests.coordinator.journal.test_removed import Lived

ORIGIN = Origin(b"j" * 16)


def commit(journal: Journal, client: int, session: str = "") -> None:
    """Commit one event."""
    journal.note(ClientCame(client, session), client)
    journal.commit()


def payload(client: int) -> bytes:
    """The payload of its record."""
    return b"".join(pack(ClientCame(client), client))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A journal that stores its records."""
    made = Journal(tmp_path, 1, origin=ORIGIN, unwritten=UnwrittenRecords(tmp_path, ORIGIN.journal, 1))
    yield made
    made.close()


def written(folder: Path) -> list[tuple[int, bytes]]:
    """The records of the only segment."""
    (path,) = segments(folder).values()
    return [(found.number, bytes(found.payload)) for found in records_of(path)]


def test_a_record_is_in_its_segment_after_the_turn(journal: Journal, tmp_path: Path) -> None:
    commit(journal, 1)
    assert written(tmp_path) == [] and read_unwritten(tmp_path) == (ORIGIN.journal, 1, [payload(1)])
    journal.flush()
    commit(journal, 2)
    commit(journal, 3)
    assert read_unwritten(tmp_path) == (ORIGIN.journal, 2, [payload(2), payload(3)])
    journal.flush()
    assert written(tmp_path) == [(number, payload(number)) for number in (1, 2, 3)]
    assert read_unwritten(tmp_path) is None
    mark = read_acknowledged_position(tmp_path)
    assert mark is not None and mark.number == journal.number == 4


def test_a_stored_record_needs_no_write(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise AssertionError("a write before the effects of the turn")

    with monkeypatch.context() as patched:
        for call in ("write", "pwrite"):
            patched.setattr(os, call, refuse)
        commit(journal, 1)
    assert journal.number == 2


def test_the_records_of_a_dead_process_are_added_wherever_it_died(journal: Journal, tmp_path: Path) -> None:
    commit(journal, 1)
    journal.flush()
    (path,) = segments(tmp_path).values()
    before = path.read_bytes()
    commit(journal, 2)
    commit(journal, 3)
    stored = (tmp_path / FILE).read_bytes()
    journal.flush()
    after = path.read_bytes()
    for end in range(len(before), len(after) + 1):  # it died while it wrote the records
        path.write_bytes(after[:end])
        (tmp_path / FILE).write_bytes(stored)
        complete_segment(tmp_path)
        assert path.read_bytes() == after, end
        assert read_unwritten(tmp_path) is None
        assert complete_segment(tmp_path) == 0 and path.read_bytes() == after


def test_a_record_whose_end_was_not_stored_does_not_count(journal: Journal, tmp_path: Path) -> None:
    commit(journal, 1)
    data = bytearray((tmp_path / FILE).read_bytes())
    commit(journal, 2)
    found = (tmp_path / FILE).read_bytes()
    data[START:] = found[START:]  # the payload is there, the end in the head is that of the record before
    (tmp_path / FILE).write_bytes(data)
    assert read_unwritten(tmp_path) == (ORIGIN.journal, 1, [payload(1)])


@pytest.mark.parametrize("what", ["journal", "host"])
def test_records_of_another_journal_or_boot_of_the_host_are_not_added(
    what: str, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(journal, 1)
    journal.flush()
    commit(journal, 2)
    stored = (tmp_path / FILE).read_bytes()
    if what == "journal":
        (tmp_path / FILE).write_bytes(stored.replace(ORIGIN.journal, b"k" * 16, 1))
    else:
        monkeypatch.setattr(unwritten, "host_boot", lambda: "another")
    assert complete_segment(tmp_path) == 0
    assert written(tmp_path) == [(1, payload(1))]


def test_damage_of_stored_records_is_refused_by_name(journal: Journal, tmp_path: Path) -> None:
    """Their effects may have left, so no changed byte and no lost end may pass for a record or for none."""
    commit(journal, 1)
    journal.flush()
    commit(journal, 2)
    commit(journal, 3)
    stored = (tmp_path / FILE).read_bytes()
    (path,) = segments(tmp_path).values()
    before, end = path.read_bytes(), START + 2 * (16 + len(payload(2)) + len(payload(3)))
    for at in (*range(4), *range(FIRST_AT, end)):
        damaged = bytearray(stored)
        damaged[at] ^= 0x10
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(JournalCorrupt, match=f"{FILE} is damaged at byte"):
            complete_segment(tmp_path)
    for lost in (range(START, end), range(START + 16, end)):  # a page that reads as zeros
        damaged = bytearray(stored)
        damaged[lost.start : lost.stop] = bytes(len(lost))
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(JournalCorrupt, match=f"{FILE} is damaged at byte"):
            complete_segment(tmp_path)
    for size in (START, end - 1, len(stored) - 1):
        (tmp_path / FILE).write_bytes(stored[:size])
        with pytest.raises(JournalCorrupt, match=f"{FILE} is damaged at byte 0"):
            complete_segment(tmp_path)
    assert path.read_bytes() == before
    for unfinished in (b"", bytes(START), bytes(len(stored))):  # a writer that died while it made the file
        (tmp_path / FILE).write_bytes(unfinished)
        assert complete_segment(tmp_path) == 0


def test_records_behind_a_gap_are_not_added(journal: Journal, tmp_path: Path) -> None:
    """The segment has lost a record that was written: the recovery finds that by its mark."""
    (path,) = segments(tmp_path).values()
    empty = path.read_bytes()
    commit(journal, 1)
    journal.flush()
    commit(journal, 2)
    path.write_bytes(empty)
    assert complete_segment(tmp_path) == 0 and path.read_bytes() == empty


def test_a_record_without_room_is_written_with_those_before_it(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwritten, "SIZE", START + 16 + 2 * len(payload(1)))
    commit(journal, 1)
    assert written(tmp_path) == []
    commit(journal, 2)
    assert written(tmp_path) == [(1, payload(1)), (2, payload(2))]
    commit(journal, 3, "a session that is longer than the file")
    assert journal.number == 4 and len(written(tmp_path)) == 3
    commit(journal, 4)
    monkeypatch.undo()
    assert read_unwritten(tmp_path) == (ORIGIN.journal, 4, [payload(4)])


def test_a_journal_that_is_closed_or_rotated_leaves_no_stored_record(journal: Journal, tmp_path: Path) -> None:
    commit(journal, 1)
    assert journal.rotate() == 2
    commit(journal, 2)
    journal.close()
    found = [record.number for path in segments(tmp_path).values() for record in records_of(path)]
    assert found == [1, 2] and read_unwritten(tmp_path) is None


def test_a_record_is_not_stored_for_a_segment_without_a_name(journal: Journal, tmp_path: Path) -> None:
    (path,) = segments(tmp_path).values()
    path.unlink()
    with pytest.raises(StateRemoved):
        commit(journal, 1)
    assert read_unwritten(tmp_path) is None


def test_a_file_that_was_removed_is_missing(journal: Journal, tmp_path: Path) -> None:
    assert not journal.missing
    (tmp_path / FILE).unlink()
    assert journal.missing


def test_a_coordinator_continues_what_one_accepted_that_was_killed_before_it_wrote_the_record(tmp_path: Path) -> None:
    lived = Lived(tmp_path / "first")
    lived.accept()
    lived.look()
    lived.accept()
    shutil.copytree(tmp_path / "first", tmp_path / "next", ignore=shutil.ignore_patterns("r"))  # as a kill leaves it
    lived.life.close(ended=False)
    again = Lived(tmp_path / "next")
    assert again.life.again and again.clients == lived.clients == 2
    again.life.close(ended=False)


def test_a_replay_says_that_records_are_not_in_a_segment_yet(
    journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.note(Boot("b", b"key", Limits()), 0)
    journal.commit()
    journal.flush()
    assert replay([str(tmp_path)]) == 0
    assert FILE not in capsys.readouterr().out
    commit(journal, 1)
    assert replay([str(tmp_path)]) == 0
    assert f"{FILE} holds 1 of the last turn, from record 2 on" in capsys.readouterr().out
