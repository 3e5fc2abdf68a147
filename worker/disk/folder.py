"""The folder of a worker's disk tier: locked for the process's life, bounded in size, with a folder for each identity.

An identity covers all that the bytes of a block depend on apart from tokens and salt: model, dtypes, layout, device,
versions, sizes and the encryption key. Blocks of another identity are never read. Their folders stay until that
model is served again. The least recently used one is deleted when space is needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path

from kvforge.protocol.errors import InvalidConfiguration, WorkerError
from kvforge.protocol.steady_clock import monotonic

from .sealing import Sealer
from .segments import Geometry, Segments

LOCK_WAIT_S, LOCK_POLL_S = 30.0, 0.05
IDENTITY_BYTES = 16
USED = "used"  # the time of its last change is when the identity was opened last


class DiskFolder:
    """A locked folder.

    Args:
        root: The configured folder.
        name: The worker's name.
        lock_wait_s: Seconds to wait for an earlier process.

    Raises:
        InvalidConfiguration: Names `disk_dir`: the folder cannot be used.
        WorkerError: Another process has the folder.
    """

    def __init__(self, root: Path, name: str, lock_wait_s: float = LOCK_WAIT_S) -> None:
        if not root.is_dir():
            raise InvalidConfiguration("disk_dir", f"{str(root)!r} is no folder: create it, or name another one")
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self.path = root / f"kvforge-disk-{digest}"
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if self.path.is_symlink() or self.path.stat().st_uid != os.getuid():
                raise InvalidConfiguration("disk_dir", f"{str(self.path)!r} is no folder of this user: remove it")
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise InvalidConfiguration("disk_dir", f"{str(self.path)!r} cannot be used: {error.strerror}") from None
        deadline = monotonic() + lock_wait_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if monotonic() >= deadline:
                    os.close(self._lock)
                    problem = f"another process still has {self.path}: end it, or give this worker another disk_dir"
                    raise WorkerError(problem) from None
            time.sleep(LOCK_POLL_S)

    def open(self, layout: str, geometry: Geometry, bytes_max: int, sealer: Sealer | None = None) -> BoundedSegments:
        """Open the segments of an identity, which becomes the most recently used one.

        Args:
            layout: All that determines the bytes of a block, apart from its tokens and salt.
            geometry: The sizes of its segments.
            bytes_max: The most bytes of all identities together.
            sealer: Seals records and blocks.

        Raises:
            InvalidConfiguration: Names `disk_bytes` or `disk_dir`.
        """
        sealer = sealer if sealer is not None else Sealer()
        segments_max = bytes_max // geometry.size
        if not segments_max:
            problem = f"{bytes_max} bytes hold no segment; one takes {geometry.size}"
            raise InvalidConfiguration("disk_bytes", problem)
        whole = f"{layout}\n{geometry}".encode() + sealer.key_id
        identity = hashlib.blake2b(whole, digest_size=IDENTITY_BYTES).digest()
        own = self.path / identity.hex()
        try:
            own.mkdir(mode=0o700, exist_ok=True)
            (own / USED).touch(mode=0o600)
            os.utime(own / USED)
            return BoundedSegments(self.path, own, identity, geometry, segments_max, sealer, bytes_max)
        except OSError as error:
            raise InvalidConfiguration("disk_dir", f"{str(own)!r} cannot be used: {error.strerror}") from None

    def fileno(self) -> int:
        """Return the descriptor that holds the lock."""
        return self._lock

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)


class BoundedSegments(Segments):
    """Segments that delete other identities, the least recently used first, before they take more than the bound."""

    def __init__(
        self,
        around: Path,
        folder: Path,
        identity: bytes,
        geometry: Geometry,
        segments_max: int,
        sealer: Sealer,
        bytes_max: int,
        *,
        direct: bool = True,
    ) -> None:
        self._around, self._bytes_max = around, bytes_max
        super().__init__(folder, identity, geometry, segments_max, sealer, direct=direct)
        self._make_room(0)

    @property
    def identity(self) -> bytes:
        """The identity: 16 bytes."""
        return self._identity

    def _create(self, path: Path) -> int:
        self._make_room(self.geometry.size)
        return super()._create(path)

    def _make_room(self, more: int) -> None:
        others = [each for each in self._around.iterdir() if each.is_dir() and each != self.folder]
        others.sort(key=_used_at)
        total = sum(map(_size, (*others, self.folder))) + more
        while total > self._bytes_max and others:
            total -= _size(others[0])
            shutil.rmtree(others.pop(0), ignore_errors=True)


def _used_at(folder: Path) -> float:
    try:
        return (folder / USED).stat().st_mtime
    except OSError:
        return 0.0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("segment-*"))
