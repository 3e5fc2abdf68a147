"""Paths and peers of other users get no data of ours, and shared setups created by root work."""

from __future__ import annotations

import os
import pwd
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvforge import Client, InvalidConfiguration
from kvforge.client.tables import Tables
from kvforge.protocol import trust
from kvforge.protocol.layout import Geometry
from kvforge.protocol.tables import TablesReader, TablesWriter
from kvforge.protocol.transport import TABLES_FILE, client_endpoint, prepare_runtime_dir, worker_endpoint
from kvforge.worker.step.connection import CoordinatorConnection
from tests.router import router

VICTIM, ATTACKER, SERVICE = 12_346, 12_345, 12_347
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def base() -> Iterator[Path]:
    """Yield a folder in /tmp of this process's user that everyone can enter."""
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the checks as a user other than root, because root can look everywhere."""
    monkeypatch.setattr(trust.os, "geteuid", lambda: VICTIM)
    monkeypatch.setattr(trust, "SERVICE_USER", "no account of this machine")


def made(path: Path, owner: int, mode: int = 0o755) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


def bound(folder: Path, owner: int) -> Path:
    """Yield a socket of that owner."""
    path = folder / "clients.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    os.chown(path, owner, owner)
    return path


def refused(path: Path) -> str:
    with pytest.raises(InvalidConfiguration) as error:
        trust.check_path(path, "endpoint")
    assert error.value.fields["field"] == "endpoint"
    return str(error.value)


@as_root
@pytest.mark.usefixtures("victim")
def test_a_folder_that_another_user_made_in_a_shared_one_is_refused(base: Path) -> None:
    made(base / "shared", 0, 0o1777)
    folder = made(base / "shared" / f"kvforge-{VICTIM}", ATTACKER)
    words = refused(bound(folder, ATTACKER))
    assert f"{folder} belongs to another user (uid {ATTACKER}" in words and trust.TRUSTED_USERS in words
    assert "belongs to another user" in refused(folder / "not there yet")


@as_root
@pytest.mark.usefixtures("victim")
def test_a_socket_that_another_user_made_is_refused(base: Path) -> None:
    made(base / "shared", 0, 0o1777)
    folder = made(base / "shared" / "mine", VICTIM, 0o1777)
    assert "clients.sock belongs to another user" in refused(bound(folder, ATTACKER))
    assert trust.check_path(bound(made(base / "shared" / "other", VICTIM), VICTIM), "endpoint") == {0, VICTIM}


@as_root
@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize("mode", [0o777, 0o775], ids=["everyone", "group"])
def test_a_folder_in_which_others_can_replace_things_is_refused(base: Path, mode: int) -> None:
    folder = made(base / "run", VICTIM, mode)
    os.chown(folder, VICTIM, ATTACKER)
    assert f"{folder} is writable by" in refused(bound(folder, VICTIM))
    assert "could replace" in refused(made(folder / "below", VICTIM) / "clients.sock")


@as_root
@pytest.mark.usefixtures("victim")
def test_a_link_is_followed_where_a_trusted_user_made_it_alone(base: Path) -> None:
    made(base / "shared", 0, 0o1777)
    mine, theirs = made(base / "shared" / "mine", VICTIM), made(base / "shared" / "theirs", ATTACKER)
    link = base / "shared" / "link"
    link.symlink_to(mine)
    os.lchown(link, ATTACKER, ATTACKER)
    assert "link belongs to another user" in refused(link / "clients.sock")
    os.lchown(link, VICTIM, VICTIM)
    assert VICTIM in trust.check_path(link / "clients.sock", "endpoint")
    link.unlink()
    link.symlink_to("theirs")
    os.lchown(link, VICTIM, VICTIM)
    assert f"{theirs} belongs to another user" in refused(link / "clients.sock")


def test_links_that_lead_in_a_circle_end(base: Path) -> None:
    (base / "a").symlink_to("b")
    (base / "b").symlink_to("a")
    assert "symbolic links" in refused(base / "a" / "clients.sock")


@as_root
@pytest.mark.usefixtures("victim")
def test_the_service_user_whose_folder_root_made_is_trusted_there(base: Path) -> None:
    """As systemd creates /run/kvforge: its owner serves there, and members of its group connect."""
    runtime = made(base / "kvforge", SERVICE, 0o750)
    assert trust.check_path(bound(runtime, SERVICE), "endpoint") == {0, VICTIM, SERVICE}


@as_root
@pytest.mark.usefixtures("victim")
def test_a_setting_names_further_users(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(base / "shared", 0, 0o1777)
    folder = made(base / "shared" / "service", SERVICE)
    assert "belongs to another user" in refused(bound(folder, SERVICE))
    monkeypatch.setenv(trust.TRUSTED_USERS, f"{SERVICE}, root")
    assert SERVICE in trust.check_path(folder / "clients.sock", "endpoint")
    monkeypatch.setenv(trust.TRUSTED_USERS, "no-such-user")
    with pytest.raises(InvalidConfiguration, match="no user 'no-such-user'"):
        trust.check_path(folder, "endpoint")


@as_root
@pytest.mark.usefixtures("victim")
def test_the_account_of_the_service_is_trusted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(base / "shared", 0, 0o1777)
    account = pwd.getpwnam("daemon")
    folder = made(base / "shared" / "kvforge", account.pw_uid)
    assert "belongs to another user" in refused(folder / "clients.sock")
    monkeypatch.setattr(trust, "SERVICE_USER", account.pw_name)
    assert account.pw_uid in trust.check_path(folder / "clients.sock", "endpoint")


def test_the_user_at_the_other_end_is_asked_of_the_kernel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        trust.check_peer(ours.fileno(), {os.geteuid()}, "ipc://x")
        with pytest.raises(InvalidConfiguration, match="the process that listens at ipc://x is of user"):
            trust.check_peer(ours.fileno(), {VICTIM}, "ipc://x")
        assert ours.getpeername() is not None, "it is still open"
    with socket.socket() as network:
        trust.check_peer(network.fileno(), {VICTIM}, "tcp://x")


def test_a_client_tells_nothing_to_a_process_of_another_user(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is correct when it is checked, but another user listens there at the connect."""
    monkeypatch.setattr(trust, "check_endpoint", lambda *_: frozenset({VICTIM}))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = router(context)
    try:
        listener.bind(client_endpoint(base))
        with (
            Client(client_endpoint(base), timeout_s=30) as kv,
            pytest.raises(InvalidConfiguration, match="is not trusted"),
        ):
            kv.submit([83, 69, 67], max_tokens=1)
        assert not listener.poll(100)
    finally:
        listener.close(0)
        context.term()


def test_a_worker_tells_nothing_to_a_process_of_another_user(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "check_endpoint", lambda *_: frozenset({VICTIM}))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = router(context)
    read, write = os.pipe()
    try:
        listener.bind(worker_endpoint(base))
        link = CoordinatorConnection(worker_endpoint(base), read)
        with pytest.raises(InvalidConfiguration, match="is not trusted"):
            link.wait_connected(60)
        link.close(goodbye=False)
        assert not listener.poll(100)
    finally:
        os.close(read)
        os.close(write)
        listener.close(0)
        context.term()


@as_root
@pytest.mark.usefixtures("victim")
def test_nobody_reads_or_serves_where_another_user_made_the_folder(base: Path) -> None:
    """Clients, workers, readers of the tables and the coordinator itself."""
    made(base / "shared", 0, 0o1777)
    folder = made(base / "shared" / f"kvforge-{VICTIM}", ATTACKER)
    geometry = Geometry(slots=4, blocks=16, blocks_per_sequence=4, block_size=4)
    tables = TablesWriter(folder / TABLES_FILE, geometry, "boot")
    bound(folder, ATTACKER)
    try:
        with pytest.raises(InvalidConfiguration, match="belongs to another user"):
            Tables(folder)
        with pytest.raises(InvalidConfiguration, match="belongs to another user"):
            TablesReader(folder / TABLES_FILE)
        with (
            Client(client_endpoint(folder), timeout_s=30) as kv,
            pytest.raises(InvalidConfiguration, match="belongs to another user"),
        ):
            kv.submit([1], max_tokens=1)
        with pytest.raises(InvalidConfiguration, match="belongs to another user"):
            CoordinatorConnection(worker_endpoint(folder), 0)
        with pytest.raises(InvalidConfiguration, match="belongs to another user"):
            prepare_runtime_dir(folder / "run")
    finally:
        tables.close()


@as_root
@pytest.mark.usefixtures("victim")
def test_a_table_file_that_others_can_write_to_is_refused(base: Path) -> None:
    folder = made(base / "run", VICTIM)
    file = folder / TABLES_FILE
    file.touch()
    os.chown(file, VICTIM, ATTACKER)
    file.chmod(0o666)
    with pytest.raises(InvalidConfiguration, match="is writable by others"):
        TablesReader(file)


@as_root
def test_an_id_that_stands_for_many_users_is_trusted_in_no_shared_folder(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rootless container all users of the host have one id, so the creator of a folder in /tmp is unknown."""
    monkeypatch.setattr(trust, "_stands_for_many", lambda user: user == ATTACKER)
    monkeypatch.setattr(trust.os, "geteuid", lambda: VICTIM)
    outer = made(base / "root-of-the-host", ATTACKER)
    shared = made(outer / "tmp", ATTACKER, 0o1777)
    assert VICTIM in trust.check_path(made(shared / "mine", VICTIM) / "clients.sock", "endpoint")
    assert "belongs to another user" in refused(made(shared / "theirs", ATTACKER) / "clients.sock")


# ------------------------------------------------------------------------------------------------- what is run as code


def private(folder: Path, below: Path) -> str:
    with pytest.raises(InvalidConfiguration) as error:
        trust.check_private(folder, "KVFORGE_CACHE_DIR", below)
    assert error.value.field == "KVFORGE_CACHE_DIR"
    return str(error.value)


def test_a_folder_that_this_user_alone_can_write_to_is_private(base: Path) -> None:
    (base / "numba" / "one").mkdir(parents=True)
    (base / "numba" / "one" / "kernel.nbi").touch()
    assert trust.check_private(base / "numba", "cache", base) == base / "numba"
    (base / "link").symlink_to(base)
    assert trust.check_private(base / "link" / "numba", "cache", base / "link") == base / "numba"  # the user's own link


@pytest.mark.parametrize("mode", [0o777, 0o772, 0o1777])
@pytest.mark.parametrize("within", [False, True])
def test_a_folder_that_others_can_write_to_is_not(base: Path, mode: int, within: bool) -> None:
    folder = base / "cache" / "numba"
    folder.mkdir(parents=True)
    opened = folder.parent if within else folder
    opened.chmod(mode)
    if within and mode & 0o1000:
        assert trust.check_private(folder, "cache", base) == folder  # sticky: others cannot replace our files
    else:
        assert f"{opened} is writable by others" in private(folder, base)


def test_links_behind_the_cache_are_refused(base: Path) -> None:
    (base / "elsewhere" / "numba").mkdir(parents=True)
    (base / "cache").mkdir()
    (base / "cache" / "numba").symlink_to(base / "elsewhere" / "numba")
    assert "is a symbolic link" in private(base / "cache" / "numba", base / "cache")
    (base / "elsewhere" / "numba" / "kernel.nbi").symlink_to("/etc/passwd")
    assert "kernel.nbi is a symbolic link" in private(base / "elsewhere" / "numba", base)


@as_root
@pytest.mark.parametrize("foreign", ["cache", "cache/numba", "cache/numba/one", "cache/numba/one/kernel.nbc"])
def test_what_another_user_owns_is_refused(base: Path, foreign: str) -> None:
    folder = base / "cache" / "numba"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "kernel.nbc").touch()
    os.chown(base / foreign, ATTACKER, ATTACKER)
    assert f"{base / foreign} belongs to another user (uid {ATTACKER}" in private(folder, base / "cache")


@as_root
def test_trusted_users_run_no_code_of_ours(base: Path, victim: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trusted user's socket may be used, but its code is never run."""
    monkeypatch.setenv(trust.TRUSTED_USERS, str(ATTACKER))
    folder = made(base / "numba", ATTACKER)
    assert f"uid {ATTACKER}" in private(folder, base)
    os.chown(folder, VICTIM, VICTIM)
    assert trust.check_private(folder, "cache", base) == folder
    os.chown(folder, 0, 0)
    assert trust.check_private(folder, "cache", base) == folder
