"""One coordinator per runtime folder: its locks, which sockets are alive, and which files this process may remove."""

from __future__ import annotations

import fcntl
import os
import socket as sockets
from pathlib import Path

from kvforge.protocol.errors import CoordinatorInUse

LOCK_FILE = "coordinator.lock"


class RuntimeLock:
    """One coordinator per runtime folder.

    Both the lock file and the folder itself are locked: a cleaner may remove the file while its coordinator serves.
    """

    def __init__(self, runtime: Path, *, lock_folder: bool = True) -> None:
        """Take the locks.

        Args:
            runtime: The folder.
            lock_folder: False where another part of this process locks the same folder.

        Raises:
            CoordinatorInUse: Another coordinator is alive.
        """
        self._path = runtime / LOCK_FILE
        self._handle = self._folder = -1
        while self._handle < 0:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _lock(descriptor, runtime)
            if self._is(descriptor):
                self._handle = descriptor
            else:  # its holder ended meanwhile and removed the file
                os.close(descriptor)
        self._folder = os.open(runtime, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if lock_folder:
            try:
                _lock(self._folder, runtime)
            except CoordinatorInUse:
                self._folder = -1
                self.release()  # of a lock file that was gone, and that we have just made
                raise

    def _is(self, descriptor: int) -> bool:
        """Whether it is the file that others would find."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def covers(self, runtime: Path) -> bool:
        """Return whether the folder at this path is the one that was locked, and no other was made in its place."""
        try:
            return self._folder >= 0 and os.path.samestat(os.fstat(self._folder), runtime.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the lock file and let go. Idempotent."""
        if self._handle >= 0:
            if self._is(self._handle):
                self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


def _lock(descriptor: int, runtime: Path) -> None:
    """Lock, or close the descriptor and raise CoordinatorInUse."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CoordinatorInUse(
            f"another coordinator is serving in {runtime}: stop it, or choose another --runtime-dir"
        ) from None


def check_free(path: str) -> None:
    """Check that no process listens at a socket file, also one that is stopped.

    Args:
        path: The path of the socket. A process that was killed may have left a file with no listener.

    Raises:
        CoordinatorInUse: A process listens there.
    """
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # it listens, and its backlog is full
        except OSError:
            return
    raise CoordinatorInUse(f"another process listens at {path}: stop it, or choose another folder")


class OwnFiles:
    """Files that this process made, and removes only while they are the same ones.

    Where a folder was removed and made again, another coordinator may serve under the same paths.
    """

    def __init__(self) -> None:
        self._files: dict[Path, tuple[int, int]] = {}

    def note(self, path: Path) -> None:
        """This process has just made the file."""
        status = path.lstat()
        self._files[path] = (status.st_dev, status.st_ino)

    def remove(self) -> None:
        """Remove those that are still ours. Idempotent."""
        for path, made in self._files.items():
            try:
                status = path.lstat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == made:
                path.unlink(missing_ok=True)
        self._files.clear()
