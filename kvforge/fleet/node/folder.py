"""The folder of a replica or gateway on its node: its key, port, configuration and runtime folder.

Only its owner can read it, and it is locked while its program runs. It remains when the program is killed, so that the
next one keeps the journal, the key and the port. It is removed when the program is ordered to end.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from kvforge.protocol import keys, transport
from kvforge.protocol.configuration import expand
from kvforge.protocol.errors import InvalidConfiguration, Unavailable

from ..settings import FleetFile

KEY, PORT, LOCK = "own.key", "port", "lock"
SWEPT_S = 3600.0


class Folder:
    """The folder. `own.key`: its keys; `port`: its last port; `run`: the runtime folder of a replica."""

    def __init__(self, file: FleetFile, name: str) -> None:
        own = file.replicas.folder
        base = expand(own) if own else transport.default_runtime_dir().absolute() / "fleet"
        self.path = base / file.name / name
        self._lock = -1

    @property
    def runtime(self) -> Path:
        """Return the runtime folder of the coordinator and its workers."""
        return self.path / "run"

    @property
    def temporary(self) -> Path:
        """Return the folder for temporary files of children."""
        return self.path / "tmp"

    def claim(self) -> None:
        """Create and lock the folder.

        Raises:
            InvalidConfiguration: It cannot be used.
            Unavailable: Another program still uses it.
        """
        try:
            for made in (self.path.parents[1], self.path.parent, self.path):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.geteuid():
                raise InvalidConfiguration("replicas.folder", f"{self.path} belongs to another user")
            self._sweep()
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(mode=0o700)
        except BlockingIOError:
            raise Unavailable(f"another program still uses {self.path}") from None
        except OSError as error:
            raise InvalidConfiguration("replicas.folder", f"{self.path} cannot be used: {error.strerror}") from None

    def touch(self) -> None:
        """Mark the folder as used, so that it is not swept."""
        os.utime(self._lock)

    def _sweep(self) -> None:
        """Remove old folders of this fleet, left when the node was lost."""
        for other in self.path.parent.iterdir():
            lock = other / LOCK
            if other == self.path or not lock.exists() or time.time() - lock.stat().st_mtime < SWEPT_S:
                continue
            with suppress(OSError), lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)

    def keys(self) -> keys.KeyPair:
        """Return its key pair, created on first use. The secret exists only here."""
        path = self.path / KEY
        if not path.exists():
            keys.write(path, keys.make(), f"{self.path.name} of the fleet")
        return keys.read(path)

    def put_keys(self, public: str, secret: str) -> Path:
        """Write a key pair that was created elsewhere; return the file."""
        path = self.path / KEY
        path.unlink(missing_ok=True)
        keys.write(path, keys.KeyPair(public, secret), "the fleet's gateways")
        return path

    @property
    def port(self) -> int:
        """Return its last port, 0 if there is none yet."""
        with suppress(OSError, ValueError):
            return int((self.path / PORT).read_text(encoding="ascii"))
        return 0

    def keep_port(self, port: int) -> None:
        """Record its port."""
        (self.path / PORT).write_text(str(port), encoding="ascii")

    def remove(self) -> None:
        """Remove the folder, and its parents if they are empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # it holds folders of others
            self.path.parent.rmdir()
            self.path.parents[1].rmdir()
        self.close()

    def close(self) -> None:
        """Unlock the folder and keep it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def reserve(address: str, port: int) -> tuple[socket.socket, int]:
    """Reserve a port for a coordinator while the returned socket is open.

    Args:
        address: The address of the node.
        port: The preferred port; if it is taken, any other one.

    Raises:
        Unavailable: There is no free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for wanted in dict.fromkeys((port, 0)):
        held = socket.socket(family, socket.SOCK_STREAM)
        # The socket is bound but does not listen, so another one with the same option may listen at this address.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((address, wanted))
        except OSError as error:
            held.close()
            problem = error.strerror
            continue
        return held, int(held.getsockname()[1])
    raise Unavailable(f"cannot reserve a port of {address}: {problem}")
