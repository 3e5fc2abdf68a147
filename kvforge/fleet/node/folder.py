"""The folder of one replica or gateway on its node: its key, its port, its configuration, its runtime folder.

It is its owner's alone, and locked while its program runs. It stays when the program is killed, so that the next one
goes on with the journal, the key and the port; it goes when the program was asked to end.
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
    """`own.key`: its keys. `port`: where it listened last. `run`: the runtime folder of a replica."""

    def __init__(self, file: FleetFile, name: str) -> None:
        own = file.replicas.folder
        base = expand(own) if own else transport.default_runtime_dir().absolute() / "fleet"
        self.path = base / file.name / name
        self._lock = -1

    @property
    def runtime(self) -> Path:
        """Of the coordinator and its workers."""
        return self.path / "run"

    @property
    def temporary(self) -> Path:
        """For what children make in TMPDIR."""
        return self.path / "tmp"

    def claim(self) -> None:
        """Makes and locks it. Raises InvalidConfiguration, or Unavailable where another program has it still."""
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
            raise Unavailable(f"another program has {self.path} still") from None
        except OSError as error:
            raise InvalidConfiguration("replicas.folder", f"{self.path} cannot be used: {error.strerror}") from None

    def touch(self) -> None:
        """It is used: nobody sweeps it."""
        os.utime(self._lock)

    def _sweep(self) -> None:
        """Removes what others of the fleet have left here long ago, whose node was lost and is there again."""
        for other in self.path.parent.iterdir():
            lock = other / LOCK
            if other == self.path or not lock.exists() or time.time() - lock.stat().st_mtime < SWEPT_S:
                continue
            with suppress(OSError), lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)

    def keys(self) -> keys.KeyPair:
        """Its own pair, made the first time. The secret is here, and nowhere else."""
        path = self.path / KEY
        if not path.exists():
            keys.write(path, keys.make(), f"{self.path.name} of the fleet")
        return keys.read(path)

    def put_keys(self, public: str, secret: str) -> Path:
        """The file of a pair that was made elsewhere."""
        path = self.path / KEY
        path.unlink(missing_ok=True)
        keys.write(path, keys.KeyPair(public, secret), "the fleet's gateways")
        return path

    @property
    def port(self) -> int:
        """Where it listened last; 0: nowhere yet."""
        with suppress(OSError, ValueError):
            return int((self.path / PORT).read_text(encoding="ascii"))
        return 0

    def keep_port(self, port: int) -> None:
        """It listens there."""
        (self.path / PORT).write_text(str(port), encoding="ascii")

    def remove(self) -> None:
        """Nothing is left of it, nor of the folders above that only it needed."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # others are in it
            self.path.parent.rmdir()
            self.path.parents[1].rmdir()
        self.close()

    def close(self) -> None:
        """It stays; another program may have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def reserve(address: str, port: int) -> tuple[socket.socket, int]:
    """A port that a coordinator may listen at, and nobody else is given while the socket is open: `port` again, if it
    is free, else any. Raises Unavailable."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for wanted in dict.fromkeys((port, 0)):
        held = socket.socket(family, socket.SOCK_STREAM)
        # Bound and not listening, it lets another of this address listen that says the same.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((address, wanted))
        except OSError as error:
            held.close()
            problem = error.strerror
            continue
        return held, int(held.getsockname()[1])
    raise Unavailable(f"no port of {address} can be had: {problem}")
