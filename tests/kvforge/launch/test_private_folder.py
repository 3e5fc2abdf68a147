"""The working folder of `kvforge up`: it removes only its own files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvforge.launch.private_folder import MARK, PRIVATE_FOLDER, PrivateFolder
from kvforge.protocol.errors import InvalidConfiguration


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def use(folder: PrivateFolder) -> None:
    """Write a supervisor's files."""
    folder.claim()
    for name in ("coordinator.toml", "worker-0.toml", "worker-12.toml", "tmp/cache"):
        (folder.path / name).write_text("x")


def test_it_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    folder = PrivateFolder(runtime)
    use(folder)
    folder.release(clean=True)
    assert not runtime.exists()


def test_what_one_that_was_killed_left_is_removed(tmp_path: Path) -> None:
    killed = PrivateFolder(tmp_path)
    use(killed)
    os.close(killed._descriptor)  # as the kernel would
    again = PrivateFolder(tmp_path)
    again.claim()
    assert names(again.path) == [MARK, "tmp"]
    again.release(clean=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize("kept", ["notes.txt", "tmp/notes.txt", "coordinator.toml"])
def test_a_folder_that_it_did_not_make_is_refused_and_not_touched(tmp_path: Path, kept: str) -> None:
    file = tmp_path / PRIVATE_FOLDER / kept
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    before = names(tmp_path)
    first = kept.partition("/")[0]
    with pytest.raises(InvalidConfiguration, match=rf"^runtime_dir: .*/up, .* holds foreign files \({first}\): move"):
        PrivateFolder(tmp_path).claim()
    assert names(tmp_path) == before
    assert file.read_text() == "mine"


def test_what_is_not_its_own_stays_beside_it(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    use(folder)
    (folder.path / "notes.txt").write_text("mine")
    for name in ("other.sock", "tables.shm.backup", "coordinator.lock", "clients.sock"):
        (tmp_path / name).write_text("")
    folder.release(clean=True)
    assert names(tmp_path) == ["other.sock", "tables.shm.backup", "up", f"up/{MARK}", "up/notes.txt"]
    PrivateFolder(tmp_path).claim()
    assert (tmp_path / "up" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, what: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    if what == "link":
        (runtime / PRIVATE_FOLDER).symlink_to(target)
    else:
        (runtime / PRIVATE_FOLDER).write_text("mine")
    before = names(tmp_path)
    with pytest.raises(InvalidConfiguration, match=r"up.*is not a folder"):
        PrivateFolder(runtime).claim()
    assert names(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / PRIVATE_FOLDER).mkdir()
    os.chown(tmp_path / PRIVATE_FOLDER, 12345, 12345)
    with pytest.raises(InvalidConfiguration, match=r"up.*belongs to another user"):
        PrivateFolder(tmp_path).claim()
