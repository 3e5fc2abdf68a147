"""The folder of `kvforge up` in the runtime folder: its children's configuration and temporary files, and its lock."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

from kvforge.protocol import token, transport
from kvforge.protocol.errors import CoordinatorInUse, InvalidConfiguration

if sys.platform != "win32":
    import fcntl

PRIVATE_FOLDER = "up"
MARK = "made-by-kvforge-up"
# Files of `kvforge up` in its folder, and files that a killed coordinator leaves in the runtime folder.
OURS = re.compile(r"(coordinator|worker-\d+(\.\d+)?)\.(toml|notify)|gateway\.(keys|notify)")
KEY_HASHES = "gateway.keys"
LEFT_BY_KILLED = (
    transport.CLIENT_SOCKET,
    transport.WORKER_SOCKET,
    "coordinator.lock",
    transport.TABLES_FILE,
    token.TOKEN_FILE,
)


class PrivateFolder:
    """The supervisor's folder in the runtime folder, locked so that only one supervisor uses a runtime folder.

    It removes only files that it or a killed predecessor created: an existing folder is used only if it is empty or has
    the mark.
    """

    def __init__(self, runtime: Path) -> None:
        self.path = runtime / PRIVATE_FOLDER
        self.temporary = self.path / "tmp"
        self._runtime = runtime
        self._made_runtime = False
        self._descriptor = -1

    def claim(self) -> None:
        """Create and lock the folder.

        Raises:
            CoordinatorInUse: Another supervisor uses it.
            InvalidConfiguration: It cannot be used.
        """
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
        self._empty()  # files of a killed supervisor
        self.temporary.mkdir()  # torch creates folders in TMPDIR at import and does not remove them

    def release(self, *, clean: bool) -> None:
        """Remove the folder, and the runtime folder if `claim` created it.

        Args:
            clean: Also remove the files of a killed coordinator.
        """
        if self._descriptor < 0:
            return
        if clean:
            for name in LEFT_BY_KILLED:
                (self._runtime / name).unlink(missing_ok=True)
        self._empty()
        with suppress(OSError):  # it holds files of others
            if all(left.name == MARK for left in self.path.iterdir()):
                (self.path / MARK).unlink()
                self.path.rmdir()
        if self._made_runtime:
            with suppress(OSError):  # it holds files of others
                self._runtime.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    def _check(self) -> None:
        """Raise InvalidConfiguration if an existing folder must not be used."""
        try:
            status = self.path.lstat()
            names = {entry.name for entry in self.path.iterdir()} if stat.S_ISDIR(status.st_mode) else set()
        except FileNotFoundError:
            return  # its owner has just removed it; the caller creates it again
        what = f"{self.path}, where `kvforge up` keeps its files,"
        remedy = "move it away, or choose another --runtime-dir"
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidConfiguration("runtime_dir", f"{what} is not a folder: {remedy}")
        if status.st_uid != os.geteuid():
            raise InvalidConfiguration("runtime_dir", f"{what} belongs to another user (uid {status.st_uid}): {remedy}")
        if names and MARK not in names:
            raise InvalidConfiguration("runtime_dir", f"{what} holds foreign files ({min(names)}): {remedy}")

    def _empty(self) -> None:
        """Remove the supervisor's files."""
        with suppress(OSError):
            for entry in list(self.path.iterdir()):
                if OURS.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        if not self.temporary.is_symlink():
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _lock(self) -> int:
        """Return the locked descriptor; -1 if the previous owner has just removed the folder."""
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
