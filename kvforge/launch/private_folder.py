"""The folder of `kvforge up` in the runtime folder: its children's configuration and temporary files, and its lock."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from kvforge.protocol import token, transport
from kvforge.protocol.errors import CoordinatorInUse, InvalidConfiguration

PRIVATE_FOLDER = "up"
MARK = "made-by-kvforge-up"
# What we put into our folder, and what a coordinator that was killed leaves in its runtime folder.
OURS = re.compile(r"(coordinator|worker-\d+(\.\d+)?)\.toml|gateway\.keys")
KEY_HASHES = "gateway.keys"
LEFT_BY_KILLED = (
    transport.CLIENT_SOCKET,
    transport.WORKER_SOCKET,
    "coordinator.lock",
    transport.TABLES_FILE,
    token.TOKEN_FILE,
)


class PrivateFolder:
    """A folder of ours in the runtime folder, locked while we run: one supervisor to a runtime folder.

    Nothing is removed from it that was not put there by us, or by one before us that was killed: a folder that is there
    is taken only if it carries our mark, or nothing.
    """

    def __init__(self, runtime: Path) -> None:
        self.path = runtime / PRIVATE_FOLDER
        self.temporary = self.path / "tmp"
        self._runtime = runtime
        self._made_runtime = False
        self._descriptor = -1

    def claim(self) -> None:
        """Makes and locks it. Raises CoordinatorInUse, InvalidConfiguration."""
        self._made_runtime = not self._runtime.exists()
        transport.prepare_runtime_dir(self._runtime)
        try:
            while self._descriptor < 0:
                with suppress(FileExistsError):
                    self.path.mkdir(mode=0o700)
                self._check()
                self._descriptor = self._lock()
        except BlockingIOError:
            raise CoordinatorInUse(
                f"another `kvforge up` runs in {self._runtime}: stop it, or choose another --runtime-dir"
            ) from None
        except OSError as error:
            raise InvalidConfiguration("runtime_dir", f"{self._runtime} cannot be used: {error.strerror}") from None
        (self.path / MARK).touch()
        self._empty()  # of what a supervisor that was killed has left
        self.temporary.mkdir()  # torch makes folders in TMPDIR when it is imported; nobody else would remove them

    def release(self, *, clean: bool) -> None:
        """Removes it, and the runtime folder if we made it. clean: also what a killed coordinator leaves there."""
        if self._descriptor < 0:
            return
        if clean:
            for name in LEFT_BY_KILLED:
                (self._runtime / name).unlink(missing_ok=True)
        self._empty()
        with suppress(OSError):  # not empty: not only ours
            if all(left.name == MARK for left in self.path.iterdir()):
                (self.path / MARK).unlink()
                self.path.rmdir()
        if self._made_runtime:
            with suppress(OSError):  # not empty: not only ours
                self._runtime.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    def _check(self) -> None:
        """Raises InvalidConfiguration where the folder that is there is not ours to use."""
        try:
            status = self.path.lstat()
            names = {entry.name for entry in self.path.iterdir()} if stat.S_ISDIR(status.st_mode) else set()
        except FileNotFoundError:
            return  # whoever had it has removed it meanwhile; it is made again
        what = f"{self.path}, where `kvforge up` keeps its files,"
        remedy = "move it away, or choose another --runtime-dir"
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidConfiguration("runtime_dir", f"{what} is not a folder: {remedy}")
        if status.st_uid != os.geteuid():
            raise InvalidConfiguration("runtime_dir", f"{what} belongs to another user (uid {status.st_uid}): {remedy}")
        if names and MARK not in names:
            raise InvalidConfiguration("runtime_dir", f"{what} holds what it did not make ({min(names)}): {remedy}")

    def _empty(self) -> None:
        """Removes what is ours."""
        with suppress(OSError):
            for entry in list(self.path.iterdir()):
                if OURS.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        if not self.temporary.is_symlink():
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _lock(self) -> int:
        """The locked descriptor; -1 if the folder was removed meanwhile by the one that had it."""
        descriptor = -1
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        if descriptor >= 0:
            os.close(descriptor)
        return -1
