"""Endpoints and socket options: the one place that knows how kvforge processes reach each other.

`ipc://` sockets live in the runtime folder, which is private to its owner (0700) unless its maker decided otherwise;
`tcp://` is in `network`.
The coordinator speaks ZMTP itself (coordinator.peers). Clients and workers have a DEALER of ZeroMQ, made here: with a
linger of zero, a bounded queue of what is sent, and heartbeats, so that nothing waits for a coordinator that is gone.

What comes is queued without a bound of its own: it is no more than was asked for, the answers to commands and the
tokens of one's own requests. With a bound ZeroMQ stops reading when it is reached, and where the coordinator dies
meanwhile the next heartbeat ends our whole process (libzmq's `!_io_error`). Answers to heartbeats are not waited for: a
process that was stopped for a while must not end a connection that is there. A coordinator that has fallen silent is
noticed by the lifetime (TTL) that it gave with its own last heartbeat, which counts only until the next message.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import zmq

from .errors import InvalidConfiguration
from .network import Proof
from .trust import check_path

CLIENT_SOCKET = "clients.sock"
WORKER_SOCKET = "workers.sock"
TABLES_FILE = "tables.shm"

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
SEND_MESSAGES_MAX = 10_000
NEVER_MS = 24 * 3600 * 1000  # without reconnecting at all ZeroMQ throws away what came and was not read yet
# sockaddr_un.sun_path holds 108 bytes with its terminating zero.
IPC_PATH_BYTES_MAX = 107


def default_runtime_dir() -> Path:
    """KVFORGE_RUNTIME_DIR, else kvforge/ under XDG_RUNTIME_DIR, else /tmp/kvforge-UID."""
    if configured := os.environ.get("KVFORGE_RUNTIME_DIR"):
        return Path(configured)
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "kvforge"
    return Path(f"/tmp/kvforge-{os.getuid()}")  # noqa: S108 - made 0700 and its ownership checked below


def default_state_dir(runtime_dir: Path) -> Path:
    """The folder of the journal where none is set.

    Args:
        runtime_dir: The runtime folder of the coordinator.

    Returns:
        kvforge/ under XDG_STATE_HOME, else under ~/.local/state, for the user's own runtime folder, which a logout or a
        cleaner empties. `state` in the runtime folder where that was chosen, or where this user has no home.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    own = Path(base) / "kvforge" if base else Path(f"/tmp/kvforge-{os.getuid()}")  # noqa: S108 - as above
    if runtime_dir.absolute() != own.absolute():
        return runtime_dir / "state"
    if state_home := os.environ.get("XDG_STATE_HOME"):
        return Path(state_home) / "kvforge"
    home = os.environ.get("HOME")
    if home and os.access(home, os.W_OK):
        return Path(home) / ".local" / "state" / "kvforge"
    return runtime_dir / "state"


def client_endpoint(runtime_dir: Path) -> str:
    """Where clients of the coordinator in `runtime_dir` connect."""
    return _ipc(runtime_dir / CLIENT_SOCKET)


def worker_endpoint(runtime_dir: Path) -> str:
    """Where workers of the coordinator in `runtime_dir` connect."""
    return _ipc(runtime_dir / WORKER_SOCKET)


def default_client_endpoint() -> str:
    """KVFORGE_ENDPOINT, else the client socket of the default runtime folder."""
    return os.environ.get("KVFORGE_ENDPOINT") or client_endpoint(default_runtime_dir())


def _ipc(path: Path) -> str:
    absolute = path.absolute()
    if len(os.fsencode(absolute)) > IPC_PATH_BYTES_MAX:
        raise InvalidConfiguration(
            "runtime_dir",
            f"the socket path {absolute} is longer than {IPC_PATH_BYTES_MAX} bytes; choose a shorter folder",
        )
    return f"ipc://{absolute}"


def prepare_runtime_dir(runtime_dir: Path) -> None:
    """Makes the folder (0700) or checks that the one that exists is ours and not writable by everyone.

    Raises InvalidConfiguration naming `runtime_dir`. A symbolic link is not followed: who made it may lead us anywhere.
    Nor is a path accepted in which another user could replace a folder (`trust`).
    """
    try:
        if runtime_dir.is_symlink():
            problem = f"{runtime_dir} is a symbolic link, to {runtime_dir.readlink()}: name the folder itself"
            raise InvalidConfiguration("runtime_dir", problem)
        check_path(runtime_dir, "runtime_dir")
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = runtime_dir.lstat()
    except OSError as error:
        raise InvalidConfiguration("runtime_dir", f"{runtime_dir} cannot be used: {error.strerror}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise InvalidConfiguration("runtime_dir", f"{runtime_dir} belongs to another user (uid {status.st_uid})")
    if status.st_mode & stat.S_IWOTH:
        raise InvalidConfiguration("runtime_dir", f"{runtime_dir} is writable by everyone: chmod 0700 it")


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], proof: Proof | None = None, *, immediate: bool = True
) -> zmq.Socket[bytes]:
    """A client's or worker's socket, for one connection. proof: for `tcp://`.

    immediate: nothing is queued for a coordinator that is not there: a send waits. But then what has come and is not
    read is thrown away when the connection ends, and libzmq aborts the process where that is in the middle of a message
    of several parts. Who knows from the monitor whether it is connected does without.
    """
    socket = context.socket(zmq.DEALER)
    configure_dealer(socket)
    socket.setsockopt(zmq.IMMEDIATE, int(immediate))
    if proof is not None:
        proof.set_on(socket)
    return socket


def configure_dealer(socket: zmq.Socket[bytes]) -> None:
    """Sets a DEALER's options (a zmq.asyncio socket takes the same)."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
