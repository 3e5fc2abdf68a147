"""Ownership of the runtime folder: locks, live sockets, and the files that this process may remove."""

from __future__ import annotations

import fcntl
import os
import socket as sockets
from pathlib import Path

from kvforge.protocol.errors import CoordinatorInUse

LOCK_FILE = "coordinator.lock"


class RuntimeLock:
    """The lock that permits one coordinator for each runtime folder.

    Both the lock file and the folder itself are locked, because a cleaner may remove the file of a running coordinator.
    """

    def __init__(self, runtime: Path, *, lock_folder: bool = True) -> None:
        """Take the locks.

        Args:
            runtime: The folder.
            lock_folder: False if another part of this process locks the same folder.

        Raises:
            CoordinatorInUse: Another coordinator is running.
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
                self.release()  # the lock file was missing and has just been created here
                raise

    def _is(self, descriptor: int) -> bool:
        """Return whether the descriptor is of the file that exists at the path now."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def covers(self, runtime: Path) -> bool:
        """Return whether the path still leads to the locked folder rather than a replacement."""
        try:
            return self._folder >= 0 and os.path.samestat(os.fstat(self._folder), runtime.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the lock file and release the locks. Idempotent."""
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
    """Check that no process, not even a suspended one, listens on a socket file.

    Args:
        path: The path of the socket. A killed process may have left a file without a listener.

    Raises:
        CoordinatorInUse: A process listens there.
    """
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # a process listens, and its backlog is full
        except OSError:
            return
    raise CoordinatorInUse(f"another process listens at {path}: stop it, or choose another folder")


class OwnFiles:
    """Files created by this process, which removes them only if they have not been replaced.

    If a folder was removed and recreated, another coordinator may use the same paths.
    """

    def __init__(self) -> None:
        self._files: dict[Path, tuple[int, int]] = {}

    def note(self, path: Path) -> None:
        """Record a file that this process has just created."""
        status = path.lstat()
        self._files[path] = (status.st_dev, status.st_ino)

    def remove(self) -> None:
        """Remove the files that are still this process's own. Idempotent."""
        for path, made in self._files.items():
            try:
                status = path.lstat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == made:
                path.unlink(missing_ok=True)
        self._files.clear()
