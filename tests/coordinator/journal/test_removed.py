"""The state directory disappears under a coordinator, or its disk fails: a clear error, and no data loss."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvforge.coordinator.config import CoordinatorConfig, LimitsSection
from kvforge.coordinator.core.events import ClientCame
from kvforge.coordinator.journal.state_folder import LOOK_US, StateFolder
from kvforge.coordinator.machine_store import MachineStore
from kvforge.protocol.errors import JournalFailed, KvforgeError, StateRemoved
from kvforge.protocol.exits import FAILED, UNAVAILABLE, status_of
from kvforge.protocol.transport import default_state_dir


class Lived:
    """A life with clients that arrive one by one."""

    def __init__(self, folder: Path) -> None:
        limits = LimitsSection(blocks_max=64)  # by default there is room for a million
        config = CoordinatorConfig(runtime_dir=str(folder / "r"), state_dir=str(folder / "s"), limits=limits)
        self.life = MachineStore(config, lambda: True)
        self.folder = folder / "s"
        self.clients = len(self.life.machine.clients)

    def accept(self) -> None:
        self.clients += 1
        event = ClientCame(self.clients)
        self.life.machine.apply(event, self.life.now_us())
        assert self.life.journal is not None
        self.life.journal.note(event, self.life.now_us())
        self.life.journal.commit()

    def look(self) -> None:
        """Finish a turn, some time later."""
        state_folder = self.life._state_folder
        assert state_folder is not None
        state_folder._look_us -= 2 * LOOK_US
        self.life.turned(self.life.now_us())


@pytest.fixture
def lived(tmp_path: Path) -> Iterator[Lived]:
    lived = Lived(tmp_path)
    lived.accept()
    yield lived
    lived.life.close(ended=False)


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir(mode=0o700)


def segment_gone(folder: Path) -> None:
    (path,) = folder.glob("records-*")
    path.unlink()


def mark_gone(folder: Path) -> None:
    (folder / "acknowledged").unlink()


def mark_replaced(folder: Path) -> None:
    data = (folder / "acknowledged").read_bytes()
    (folder / "acknowledged").unlink()
    (folder / "acknowledged").write_bytes(data)


@pytest.mark.parametrize("away", [gone, moved, replaced, segment_gone, mark_gone, mark_replaced])
def test_a_folder_that_is_removed_is_noticed_and_written_anew(away: Callable[[Path], None], lived: Lived) -> None:
    away(lived.folder)
    with pytest.raises(StateRemoved, match=rf"{lived.folder} was removed or moved away .* XDG_STATE_HOME|local/state"):
        lived.look()
    assert "written to a new folder" in lived.life.rebuild()
    known = lived.clients
    lived.life.close(ended=False)
    again = Lived(lived.folder.parent)
    assert again.life.again and again.clients == known
    again.accept()
    again.life.close(ended=False)


def test_what_comes_after_the_removal_has_no_consequences(lived: Lived) -> None:
    """At once: a record in an unlinked file is not acknowledged."""
    gone(lived.folder)
    with pytest.raises(StateRemoved):
        lived.accept()


def test_an_old_file_that_a_cleaner_takes_is_noticed(lived: Lived) -> None:
    """A cleaner deletes files by their last write, so the last segment must always be recent."""
    assert lived.life.journal is not None
    lived.life.journal.rotate()
    state_folder = lived.life._state_folder
    assert state_folder is not None
    state_folder._files = state_folder._names()
    lived.accept()
    lived.look()
    min(lived.folder.glob("records-*")).unlink()
    with pytest.raises(StateRemoved):
        lived.look()


def test_a_removal_lets_what_starts_processes_again_do_so() -> None:
    assert status_of(StateRemoved("folder", "problem")) == FAILED
    assert status_of(JournalFailed("path", "reason", "remedy")) == UNAVAILABLE


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["write", "pwrite"])
def test_a_disk_that_refuses_a_record_is_named_with_its_remedy(
    call: str, number: int, lived: Lived, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        lived.accept()
        with pytest.raises(JournalFailed, match=rf"{lived.folder}/.*: {os.strerror(number)}.*state_dir") as caught:
            lived.look()
        assert caught.value.path.startswith(str(lived.folder))
        lived.life.close(ended=False)
    again = Lived(lived.folder.parent)
    assert again.clients == lived.clients, "what was accepted is in the file of unwritten records"
    again.life.close(ended=False)


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "pwrite"])
def test_a_disk_that_refuses_a_start_is_named(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_named: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    real = getattr(os, call)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(KvforgeError, match=r"Read-only file system.*state_dir"):
            state_folder = StateFolder(tmp_path / "s", "power", 1 << 20, 1 << 20)
            state_folder.begin(None, lambda: True)
    assert getattr(os, call) is real


def test_a_disk_that_cannot_be_read_is_named(lived: Lived, monkeypatch: pytest.MonkeyPatch) -> None:
    lived.life.close(ended=False)

    def refuse(_path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(_path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    state_folder = StateFolder(lived.folder, "process", 1 << 20, 1 << 20)
    with pytest.raises(JournalFailed, match=rf"{lived.folder}/.*Input/output error"):
        state_folder.recover()
    state_folder.close(keep=True)


def test_the_default_folder_is_not_in_one_that_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KVFORGE_RUNTIME_DIR", raising=False)
    assert CoordinatorConfig().state_path == tmp_path / "state" / "kvforge"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CoordinatorConfig().state_path == tmp_path / ".local" / "state" / "kvforge"
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert CoordinatorConfig().state_path == tmp_path / "run" / "kvforge" / "state"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir(tmp_path / "chosen") == tmp_path / "chosen" / "state"
    assert CoordinatorConfig(state_dir=str(tmp_path / "named")).state_path == tmp_path / "named"


def test_a_look_without_a_free_descriptor_finds_nothing_gone(lived: Lived, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd may use up the descriptors of the process; that must not end it."""

    def refuse(_path: object) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as crowded:
        crowded.setattr("kvforge.coordinator.journal.log.os.scandir", refuse)
        lived.look()
    lived.look()
    shutil.rmtree(lived.folder)
    with pytest.raises(StateRemoved):
        lived.look()


def test_a_snapshot_that_its_coordinator_ends_has_not_failed(lived: Lived, caplog: pytest.LogCaptureFixture) -> None:
    state_folder = lived.life._state_folder
    assert state_folder is not None
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    state_folder._child = child.pid
    state_folder.close(keep=False)
    child.returncode = -signal.SIGKILL  # reaped by the folder
    assert "a snapshot failed" not in caplog.text
