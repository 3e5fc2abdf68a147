"""One coordinator per runtime folder, whatever files are removed; none removes another one's files."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvforge.coordinator.config import CoordinatorConfig, LimitsSection
from kvforge.coordinator.kv_events.settings import KvEventsSection
from kvforge.coordinator.server import Server
from kvforge.coordinator.transport.runtime_folder import LOCK_FILE, OwnFiles, RuntimeLock, check_free
from kvforge.protocol.errors import CoordinatorInUse, InvalidConfiguration
from kvforge.protocol.token import TOKEN_FILE
from kvforge.protocol.transport import CLIENT_SOCKET, TABLES_FILE, WORKER_SOCKET

FILES = (CLIENT_SOCKET, WORKER_SOCKET, TABLES_FILE, TOKEN_FILE)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))  # a socket path must be short
    yield path
    shutil.rmtree(path, ignore_errors=True)


def server(folder: Path, durability: str = "none", **more: str) -> Server:
    limits = LimitsSection(sequences_max=4, blocks_max=64, blocks_per_sequence_max=8)
    return Server(CoordinatorConfig(runtime_dir=str(folder), durability=durability, limits=limits, **more))  # type: ignore[arg-type]


def inodes(folder: Path) -> dict[str, int]:
    return {name: (folder / name).lstat().st_ino for name in FILES}


@pytest.mark.parametrize("removed", [(LOCK_FILE,), (LOCK_FILE, CLIENT_SOCKET, WORKER_SOCKET), (LOCK_FILE, *FILES)])
def test_a_second_one_is_refused_though_the_lock_file_is_gone(folder: Path, removed: tuple[str, ...]) -> None:
    with closing(server(folder)):
        for name in removed:
            (folder / name).unlink()
        before = sorted(path.name for path in folder.iterdir())
        with pytest.raises(CoordinatorInUse, match="another coordinator is serving"):
            server(folder)
        assert sorted(path.name for path in folder.iterdir()) == before


def test_a_socket_that_a_process_listens_at_is_left_alone(folder: Path) -> None:
    """Without a lock file: the folder was copied back, for example, or the other coordinator is of an older version."""
    path = folder / CLIENT_SOCKET
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        made = path.lstat().st_ino
        waiting = []
        for _ in range(2):  # fills its backlog
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(str(path))
        with pytest.raises(CoordinatorInUse, match=f"another process listens at {path}"):
            server(folder)
        assert path.lstat().st_ino == made
        for each in waiting:
            each.close()
    check_free(str(path))
    server(folder).close()
    assert not list(folder.iterdir())


def test_one_whose_folder_was_made_anew_removes_nothing_of_the_next_one(folder: Path) -> None:
    first = server(folder)
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    with closing(server(folder)) as _second:
        made = inodes(folder)
        first.close()
        assert inodes(folder) == made
        assert (folder / LOCK_FILE).exists()
    assert not list(folder.iterdir())


def test_state_may_lie_in_the_runtime_folder_itself(folder: Path) -> None:
    with closing(server(folder, "process", state_dir=str(folder))):
        (folder / LOCK_FILE).unlink()
        with pytest.raises(CoordinatorInUse):
            server(folder, "process", state_dir=str(folder))


def test_doors_that_are_open_are_closed_where_another_cannot_be(folder: Path) -> None:
    path = folder / WORKER_SOCKET
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(CoordinatorInUse):
            server(folder)
    assert [path.name for path in folder.iterdir()] == [WORKER_SOCKET]


def test_kv_events_of_another_coordinator_are_left_alone(folder: Path) -> None:
    path = folder / "events.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        made = path.lstat().st_ino
        events = KvEventsSection(publish=f"ipc://{path}")
        limits = LimitsSection(sequences_max=4, blocks_max=64, blocks_per_sequence_max=8)
        config = CoordinatorConfig(runtime_dir=str(folder), durability="none", limits=limits, kv_events=events)
        with pytest.raises(InvalidConfiguration, match="another process listens"):
            Server(config)
        assert path.lstat().st_ino == made


def test_a_lock_is_not_followed_through_a_link(folder: Path) -> None:
    """Otherwise a user who can create a link could make the coordinator lock any of its files."""
    (folder / LOCK_FILE).symlink_to(folder / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        RuntimeLock(folder)
    assert not (folder / "elsewhere").exists()


def test_files_that_were_replaced_are_another_ones(folder: Path) -> None:
    own, mine, replaced = OwnFiles(), folder / "mine", folder / "replaced"
    for path in (mine, replaced):
        path.touch()
        own.note(path)
    (folder / "new").touch()
    os.replace(folder / "new", replaced)  # noqa: PTH105
    own.remove()
    own.remove()
    assert [path.name for path in folder.iterdir()] == ["replaced"]
