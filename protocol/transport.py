"""Endpoints and socket options: the one place that defines how kvforge processes reach each other.

`ipc://` sockets live in the runtime folder, which is private to its owner (0700) unless its maker decided otherwise.
`network` covers `tcp://`.

The coordinator speaks ZMTP itself (kvforge.coordinator.transport.router_socket). Clients and workers use a ZeroMQ
DEALER made here, with a linger of zero, a bounded send queue and heartbeats, so that nothing waits for a coordinator
that is gone.

The receive queue has no bound. It holds no more than this process asked for: answers to its commands and tokens of its
requests. With a bound, ZeroMQ stops reading when the queue is full; if the coordinator dies then, the next heartbeat
aborts the whole process (libzmq's `!_io_error`).

A DEALER does not wait for answers to its heartbeats: a process that was stopped for a while must not end a working
connection. It detects a silent coordinator by the lifetime (TTL) in the coordinator's last heartbeat, which counts only
until the next message.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import zmq

from .errors import InvalidConfiguration
from .network import CurveCredentials
from .platforms import IPC, check_endpoint
from .trust import check_path

CLIENT_SOCKET = "clients.sock"
WORKER_SOCKET = "workers.sock"
TABLES_FILE = "tables.shm"

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
SEND_MESSAGES_MAX = 10_000
NEVER_MS = 24 * 3600 * 1000  # with reconnecting off, ZeroMQ discards received messages that were not read yet
# sockaddr_un.sun_path holds 108 bytes with its terminating zero, and 104 on macOS.
IPC_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107


def default_runtime_dir() -> Path:
    """Return KVFORGE_RUNTIME_DIR, else kvforge/ under XDG_RUNTIME_DIR, else /tmp/kvforge-UID."""
    if configured := os.environ.get("KVFORGE_RUNTIME_DIR"):
        return Path(configured)
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "kvforge"
    return Path(f"/tmp/kvforge-{os.getuid()}")  # noqa: S108 - created 0700, and its owner is checked below


def default_state_dir(runtime_dir: Path) -> Path:
    """Return the default folder of the journal.

    Args:
        runtime_dir: The runtime folder of the coordinator.

    Returns:
        For the user's own runtime folder, which a logout or a cleaner empties: kvforge/ under XDG_STATE_HOME, else
        under ~/.local/state. For any other runtime folder, or a user without a home: `state` in the runtime folder.
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
    """Return the endpoint for clients of the coordinator in `runtime_dir`."""
    return _ipc(runtime_dir / CLIENT_SOCKET)


def worker_endpoint(runtime_dir: Path) -> str:
    """Return the endpoint for workers of the coordinator in `runtime_dir`."""
    return _ipc(runtime_dir / WORKER_SOCKET)


def default_client_endpoint() -> str:
    """Return KVFORGE_ENDPOINT, else the client socket of the default runtime folder.

    Raises:
        InvalidConfiguration: This is Windows, which has no such socket.
    """
    if chosen := os.environ.get("KVFORGE_ENDPOINT"):
        return chosen
    if sys.platform == "win32":
        problem = "Windows has no default: name the coordinator as tcp://HOST:PORT, here or in KVFORGE_ENDPOINT"
        raise InvalidConfiguration("endpoint", problem)
    return client_endpoint(default_runtime_dir())


def _ipc(path: Path) -> str:
    check_endpoint(IPC, "runtime_dir")
    absolute = path.absolute()
    if len(os.fsencode(absolute)) > IPC_PATH_BYTES_MAX:
        raise InvalidConfiguration(
            "runtime_dir",
            f"the socket path {absolute} is longer than {IPC_PATH_BYTES_MAX} bytes; choose a shorter folder",
        )
    return f"{IPC}{absolute}"


def prepare_runtime_dir(runtime_dir: Path) -> None:
    """Create the runtime folder (0700), or check that an existing one is safe to use.

    Raises:
        InvalidConfiguration: Names `runtime_dir`. The folder belongs to another user, is writable by everyone, is a
            symbolic link (its owner may point it anywhere), or another user could replace a folder of its path
            (`trust`).
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
    context: zmq.Context[zmq.Socket[bytes]], proof: CurveCredentials | None = None, *, immediate: bool = True
) -> zmq.Socket[bytes]:
    """Create the socket of a client or worker, for one connection.

    Args:
        context: The ZeroMQ context.
        proof: The keys for `tcp://`.
        immediate: Queue nothing for a coordinator that is not connected: a send waits instead. ZeroMQ then discards
            unread messages when the connection ends, and libzmq aborts the process if that happens within a multipart
            message. A caller that learns from the socket's monitor whether it is connected passes False.
    """
    socket = context.socket(zmq.DEALER)
    configure_dealer(socket)
    socket.setsockopt(zmq.IMMEDIATE, int(immediate))
    if proof is not None:
        proof.set_on(socket)
    return socket


def configure_dealer(socket: zmq.Socket[bytes]) -> None:
    """Set the options of a DEALER (a zmq.asyncio socket takes the same)."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
