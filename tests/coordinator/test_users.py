"""Local users that may connect, as the operating system reports them; and the permissions of sockets."""

from __future__ import annotations

import os
import socket as sockets
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.coordinator.transport.listener import Endpoint
from kvforge.coordinator.transport.peer_credentials import SO_PEERGROUPS, LocalUsers, credentials
from kvforge.coordinator.transport.router_socket import RouterSocket
from tests.coordinator.net import until

ME, GROUP, OTHER = os.geteuid(), 4321, 77


class Peer:
    """A peer's credentials, as the operating system reports them."""

    def __init__(self, user: int, group: int = 9, groups: tuple[int, ...] | None = ()) -> None:
        self._said = {sockets.SO_PEERCRED: struct.pack("iII", 1, user, group)}
        if groups is not None:
            self._said[SO_PEERGROUPS] = struct.pack(f"{len(groups)}I", *groups)

    def getsockopt(self, _level: int, option: int, _size: int) -> bytes:
        if option not in self._said:
            raise OSError("too many groups")
        return self._said[option]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path, as a socket needs."""
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        yield Path(folder)


def users(folder: Path, mode: int, monkeypatch: pytest.MonkeyPatch, with_group: bool = True) -> LocalUsers:
    """The users of a folder with this mode and group GROUP."""
    folder.chmod(mode)
    status = folder.stat()
    changed = os.stat_result((*status[:5], GROUP, *status[6:]))
    monkeypatch.setattr(Path, "stat", lambda _path: changed)
    made = LocalUsers(folder, with_group)
    monkeypatch.undo()
    return made


@pytest.mark.parametrize(
    ("mode", "peer", "may"),
    [
        (0o700, Peer(ME), True),
        (0o700, Peer(0), True),
        (0o700, Peer(OTHER), False),
        (0o700, Peer(OTHER, GROUP, (GROUP,)), False),
        (0o750, Peer(OTHER, GROUP), True),
        (0o750, Peer(OTHER, 9, (1, GROUP)), True),
        (0o750, Peer(OTHER, 9, (1, 2)), False),
        (0o750, Peer(OTHER, 9, None), False),
        (0o740, Peer(OTHER, GROUP), False),
    ],
)
def test_the_own_user_root_and_a_group_that_the_folder_is_open_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, peer: Peer, may: bool
) -> None:
    problem = users(tmp_path, mode, monkeypatch).problem(peer)  # type: ignore[arg-type]
    assert (not problem) == may
    assert may or problem.startswith(f"user {OTHER} is not permitted (permitted: user {ME} and root")


def test_workers_are_of_the_own_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = users(tmp_path, 0o750, monkeypatch, with_group=False)
    assert workers.problem(Peer(OTHER, GROUP))  # type: ignore[arg-type]
    assert not workers.problem(Peer(ME))  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "wanted"), [(0o700, 0o600), (0o750, 0o660)])
def test_a_socket_has_the_permissions_of_its_folder(short_folder: Path, mode: int, wanted: int) -> None:
    short_folder.chmod(mode)
    path = short_folder / "s"
    peers = RouterSocket((Endpoint(f"ipc://{path}", users=LocalUsers(short_folder, with_group=True)),), lambda: 1)
    assert path.stat().st_mode & 0o777 == wanted
    peers.close()


def test_the_system_says_who_is_there() -> None:
    ours, theirs = sockets.socketpair()
    with ours, theirs:
        assert credentials(ours) == (os.getpid(), ME, os.getegid())


@pytest.mark.skipif(ME != 0, reason="must switch to another user")
def test_another_user_is_shut_out_whatever_the_permissions_say(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = short_folder / "s"
    peers = RouterSocket((Endpoint(f"ipc://{path}", users=LocalUsers(short_folder, with_group=True)),), lambda: 1)
    short_folder.chmod(0o755)
    path.chmod(0o777)
    command = (
        f"import os, socket; os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER});"
        f"s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); s.settimeout(30); print(s.recv(64))"
    )
    child = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)
    until(lambda: (peers.note_ends(), child.poll() is not None)[1])  # type: ignore[func-returns-value]
    assert child.communicate()[0] == b"b''\n", "the refused peer received a greeting"
    assert f"client connection refused: user {OTHER} is not permitted" in caplog.text
    peers.close()
