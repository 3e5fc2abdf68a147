"""A message that crashes the coordinator is not retried forever, neither on arrival nor in recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.events import ClientCame, CommandRefused, FromClient, ToClient
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.journal.log import Journal, segments
from kvforge.coordinator.journal.poison_detector import FILE, SUSPECTS_MAX, PoisonDetector, fingerprint
from kvforge.coordinator.journal.recovery import recover
from kvforge.coordinator.journal.state_folder import DEATHS_MAX, StateFolder
from kvforge.coordinator.turn import _refused
from kvforge.protocol import codec
from kvforge.protocol.errors import JournalCorrupt, MessageRefused
from kvforge.protocol.messages import CreateSequence, GetStats, Refused, Submit
from tests.coordinator.journal.files import records_of
from tests.coordinator.journal.test_recovery import boot
from tools.simulation.digest import state_digest

POISON = CreateSequence(rid=7, tokens=np.arange(5, dtype=np.int32))
FINE = GetStats(rid=8)


class Dead(BaseException):
    """The process died."""


def frames_of(message: Any) -> list[Any]:
    return codec.encode(message)


def begun(folder: Path) -> PoisonDetector:
    return PoisonDetector(folder, DEATHS_MAX)


def test_a_message_that_ends_its_reader_is_refused_after_so_many_deaths(tmp_path: Path) -> None:
    poison = frames_of(POISON)
    for _ in range(DEATHS_MAX):
        begun(tmp_path).begin(poison)  # the process handles nothing more
    again = begun(tmp_path)
    with pytest.raises(MessageRefused, match=f"{DEATHS_MAX} coordinators died while handling this message"):
        again.begin(poison)
    again.begin(frames_of(FINE))
    again.message_applied()
    again.turn_written()
    with pytest.raises(MessageRefused):
        begun(tmp_path).begin(poison)


def test_a_message_that_was_handled_once_is_not_suspected(tmp_path: Path) -> None:
    """Only deaths in a row count: a process that is killed always has some message in hand."""
    poison = frames_of(POISON)
    for _ in range(DEATHS_MAX - 1):
        begun(tmp_path).begin(poison)
    handled = begun(tmp_path)
    handled.begin(poison)
    handled.message_applied()
    handled.turn_written()
    begun(tmp_path).begin(poison)
    begun(tmp_path).begin(poison)


def test_the_largest_message_of_a_turn_is_suspected_while_it_is_written(tmp_path: Path) -> None:
    for _ in range(DEATHS_MAX):
        life = begun(tmp_path)
        for message in (POISON, FINE):
            life.begin(frames_of(message))
            life.message_applied()
    with pytest.raises(MessageRefused):
        begun(tmp_path).begin(frames_of(POISON))
    begun(tmp_path).begin(frames_of(FINE))


def test_what_is_kept_is_bounded_and_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    for rid in range(3 * SUSPECTS_MAX):
        begun(tmp_path).begin(frames_of(GetStats(rid=rid)))
    size = (tmp_path / FILE).stat().st_size
    assert size < 1000
    for damage in (b"", b"kvfH", b"\xff" * size, b"\0" * 5000):
        (tmp_path / FILE).write_bytes(damage)
        begun(tmp_path).begin(frames_of(FINE))
        assert (tmp_path / FILE).stat().st_size == size


def test_messages_are_told_apart_by_their_size_and_edges() -> None:
    large = bytes(100_000)
    assert fingerprint([large]) != fingerprint([large[:-1]]) != fingerprint([large[:-2] + b"x"])
    assert fingerprint([b"a", b"b"]) == fingerprint([memoryview(b"a"), b"b"]) != 0
    assert codec.rid_of(frames_of(POISON)) == 7
    assert codec.rid_of([b"\xff"]) == codec.rid_of([]) == codec.rid_of([b"x" * 100_000]) == 0


def written(folder: Path, *, behind: bool) -> None:
    """A journal that contains the message; with `behind`, a record follows it."""
    journal = Journal(folder, 1)
    journal.note(boot(), 0)
    journal.note(ClientCame(1), 0)
    journal.commit()
    journal.note(FromClient(1, POISON), 1, frames_of(POISON))
    journal.commit()
    if behind:
        journal.note(FromClient(1, FINE), 2, frames_of(FINE))
        journal.commit()
    journal.close()


def dies_of_it(self: Machine, event: Any, now_us: int) -> Any:
    if isinstance(event, FromClient) and isinstance(event.message, CreateSequence):
        raise Dead
    return apply(self, event, now_us)


apply = Machine.apply


def open_folder(folder: Path) -> StateFolder:
    return StateFolder(folder, "process", 1 << 20, 1 << 20)


def die_of_recovery(folder: Path, times: int) -> None:
    for _ in range(times):
        state_folder = open_folder(folder)
        with pytest.raises(Dead):
            state_folder.recover()
        state_folder._poison_detector.close()
        state_folder.close(keep=True)


def test_a_last_record_that_ends_recoveries_is_set_aside_and_its_message_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    written(folder, behind=False)
    (path,) = segments(folder).values()
    record = records_of(path)[-1]
    data = path.read_bytes()[record.start : record.end]
    monkeypatch.setattr(Machine, "apply", dies_of_it)
    die_of_recovery(folder, DEATHS_MAX)
    state_folder = open_folder(folder)
    found = state_folder.recover()
    assert found is not None and found.number == record.number and list(found.machine.clients) == [1]
    assert (folder / f"set-aside-{record.number:016d}").read_bytes() == data
    assert "was set aside in" in caplog.text
    journal = state_folder.begin(found, lambda: True)
    assert journal.poison_detector is not None
    with pytest.raises(MessageRefused):
        journal.poison_detector.begin(frames_of(POISON))
    state_folder.close(keep=True)
    assert recover(folder) is not None


def test_a_record_that_others_follow_from_is_named_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    written(folder, behind=True)
    before = {path: path.read_bytes() for path in segments(folder).values()}
    with monkeypatch.context() as patched:
        patched.setattr(Machine, "apply", dies_of_it)
        die_of_recovery(folder, DEATHS_MAX)
        state_folder = open_folder(folder)
        with pytest.raises(JournalCorrupt, match=r"in a row ended .* record 2, and later ones"):
            state_folder.recover()
        state_folder.close(keep=True)
    assert {path: path.read_bytes() for path in segments(folder).values()} == before
    assert recover(folder) is not None


def test_deaths_at_other_records_are_other_deaths(tmp_path: Path) -> None:
    for record in (5, 6, 5, 6):
        life = begun(tmp_path)
        life.recovering(record)
    assert begun(tmp_path).record_deaths < DEATHS_MAX
    life = begun(tmp_path)
    life.recovered()
    assert begun(tmp_path).record_deaths == 0


def test_a_refused_command_takes_the_same_room_whatever_its_size(tmp_path: Path) -> None:
    """The next life counts its size as this one did."""
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    machine = Machine(boot(), 0)
    machine.apply(ClientCame(1), 0)
    journal = Journal(folder, 1)
    journal.note(boot(), 0)
    journal.note(ClientCame(1), 0)
    journal.commit()
    sizes = []
    for tokens in (10_000, 1_000_000):
        message = Submit(rid=tokens, max_tokens=1, prompt=np.zeros(tokens, np.int32))
        event = FromClient(1, message)
        effects = machine.apply(event, 1).effects
        assert isinstance(effects[-1], ToClient) and isinstance(effects[-1].message, Refused)
        refused = _refused(event, effects)
        assert refused == CommandRefused(1, True)
        journal.note(refused, 1)
        before = journal.bytes
        journal.commit()
        sizes.append(journal.bytes - before)
    journal.close()
    assert sizes[0] == sizes[1] < 100
    found = recover(folder)
    assert found is not None and found.machine.requests.refused_total == 2
    assert state_digest(found.machine) == state_digest(machine)


def test_damage_that_is_named_is_no_death(tmp_path: Path) -> None:
    """Otherwise, an intact record before the damage would be set aside after some starts."""
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    written(folder, behind=True)
    (path,) = segments(folder).values()
    last = records_of(path)[-1]
    data = bytearray(path.read_bytes())
    data[last.end - 1] ^= 1
    path.write_bytes(data)
    for _ in range(2 * DEATHS_MAX):
        state_folder = open_folder(folder)
        with pytest.raises(JournalCorrupt, match=f"record {last.number} to {last.number} were acknowledged"):
            state_folder.recover()
        state_folder.close(keep=True)
    assert path.read_bytes() == data
