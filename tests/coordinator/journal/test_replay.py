"""kvforge replay: shows the state at any point of a journal, to all users that may read it, without changes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from kvforge.commands import cli
from kvforge.coordinator.core.events import Boot, ClientCame, FromClient, FromWorker, Turn
from kvforge.coordinator.journal.log import Journal, segments, states
from kvforge.coordinator.journal.recovery import recover
from kvforge.coordinator.replay import main
from kvforge.protocol import codec
from kvforge.protocol.exits import DAMAGED, OK, USAGE
from kvforge.protocol.messages import Message, Submit, WorkerHello, WorkerReady
from tests.coordinator.driver import model_info
from tests.coordinator.journal.files import records_of
from tools.simulation.limits import make_limits

READY = WorkerReady(rid=2, model=model_info(), blocks=8, bytes_per_block=1, kv_dtype="float32", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A worker, two requests, and a turn that starts them: 7 events."""
    journal = Journal(tmp_path, 1)
    limits = make_limits(sequences_max=1, blocks_max=8, blocks_per_sequence_max=8)
    journal.note(Boot("b" * 32, b"key", limits), 0)
    submits = [Submit(rid=i, max_tokens=3, tenant="them", prompt=np.arange(4, dtype=np.int32)) for i in (1, 2)]
    said: list[tuple[int, Message]] = [(1, WorkerHello(rid=1, name="w", pid=1)), (1, READY)]
    for number, message in said:
        journal.note(FromWorker(number, message), 10, codec.encode(message))
    journal.note(ClientCame(2, "a secret"), 20)
    journal.commit()
    for message in submits:
        journal.note(FromClient(2, message, 5), 30, codec.encode(message))
    journal.note(Turn(), 40)
    journal.commit()
    journal.close()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == OK
    return capsys.readouterr().out


def test_it_says_what_happened_and_how_it_is_at_the_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    told = said(capsys, str(folder), "--explain", "request=2", "--explain", "tenant=them")
    of_day = datetime.fromtimestamp(max(path.stat().st_mtime for path in before), UTC)
    assert told.startswith(f"after event 7 at 0.000040 s (about {of_day:%Y-%m-%d %H:%M:%S} UTC), boot bbbb")
    assert "events are counted from the beginning\n" in told
    assert "  6 at 0.000030 s: client 2: Submit tenant='them' max_tokens=3 count=1\n" in told
    assert "2 have not ended, 0 have and are known" in told
    assert "worker w: 8 blocks, 1 rows, steps sent: 1" in told
    assert "  request 1: running, them, prompt 4" in told and "  request 2: pending, them, prompt 4" in told
    assert "every invariant holds" in told
    assert "all 1 sequence slots are taken: it starts when one is freed" in told.partition("request=2:")[2]
    assert "a secret" not in told
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(("until", "requests"), [(5, 0), (6, 1), (7, 2), (8, 2)])
def test_it_stops_where_it_is_told_to(
    folder: Path, capsys: pytest.CaptureFixture[str], until: int, requests: int
) -> None:
    told = said(capsys, str(folder), "--until", str(until), "--events", "1")
    assert told.startswith(f"after event {until - 1} at")
    assert f"requests: {requests} have not ended" in told
    assert told.count(" at 0.0000") == 2, "the position line and one event"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--until", "9"], "until: the journal ends after event 7"),
        (["--until", "0"], "until: events are counted from 1: it is 0"),
        (["--explain", "request"], "explain: is 'request'; it must be one of request, sequence, block, tenant"),
        (["--explain", "request=x"], "explain: is 'request=x'"),
        (["--explain", "request=77"], "request 77"),
    ],
)
def test_what_cannot_be_shown_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main([str(folder), *arguments]) == USAGE
    assert problem in capsys.readouterr().err


def test_a_folder_without_a_journal_and_a_damaged_one_are_told_apart(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere")]) == USAGE
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == USAGE
    (path,) = segments(folder).values()
    data = bytearray(path.read_bytes())
    data[records_of(path)[0].start + 30] ^= 1
    path.write_bytes(data)
    assert main([str(folder)]) == DAMAGED
    assert "record 1 is missing and 2 follows" in capsys.readouterr().err
    assert main([str(path)]) == USAGE
    assert f"{path} is a file: name the folder that it is in" in capsys.readouterr().err


def test_what_comes_before_the_damage_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = recover(folder)
    assert found is not None
    journal = Journal(folder, found.number, origin=found.origin)
    journal.note(Turn(), 50)
    journal.commit()
    journal.close()
    path = segments(folder)[1]
    first, second = records_of(path)
    data = bytearray(path.read_bytes())
    data[second.start + 40] ^= 1
    path.write_bytes(data)
    assert main([str(folder)]) == DAMAGED
    told = capsys.readouterr()
    assert told.out.startswith("after event 4 at") and "every invariant holds" in told.out
    assert f"{path.name} is damaged at byte {first.end}" in told.err
    assert main([str(folder), "--until", "5"]) == OK
    assert main([str(folder), "--until", "6"]) == DAMAGED


def test_a_journal_that_is_being_written_is_read_as_far_as_it_is_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = segments(folder)[1]
    path.write_bytes(path.read_bytes() + b"kvfR and no more")
    told = said(capsys, str(folder))
    assert told.startswith("after event 7 at") and "or is writing them now" in told


def test_a_snapshot_that_is_replaced_meanwhile_is_looked_for_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, old = states, [{1: folder / "state-0000000000000001"}]
    monkeypatch.setattr("kvforge.coordinator.journal.recovery.states", lambda path: old.pop() if old else real(path))
    assert said(capsys, str(folder)).startswith("after event 7 at")
    assert not old


def test_the_command_line_runs_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(folder), "--until", "6", "--explain", "request=1"]) == OK
    told = capfd.readouterr()
    assert "after event 5 at" in told.out and told.err == ""
    assert cli.main(["replay", str(folder), "--until", "99"]) == USAGE
