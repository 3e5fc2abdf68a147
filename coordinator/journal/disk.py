"""Disk operations of the journal: syncing files and folders, and remedies for disk errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvforge.protocol.errors import InvalidConfiguration, JournalFailed

REMEDIES = {
    errno.EIO: "check the disk (`dmesg` shows its errors), or set state_dir to a folder on another one",
    errno.EROFS: "mount the file system for writing again, or set state_dir to a folder elsewhere",
    errno.EACCES: "let this user write to it, or set state_dir to a folder of its own",
    errno.EPERM: "let this user write to it, or set state_dir to a folder of its own",
    errno.ENOSPC: "make room there, or set state_dir to a folder on another disk",
    errno.EDQUOT: "raise the quota, or set state_dir to a folder elsewhere",
    errno.ESTALE: "mount the file system again, or set state_dir to a local folder",
}


def failed(path: Path, error: OSError) -> JournalFailed:
    """Return the typed error for a failed disk operation."""
    return JournalFailed(str(path), error.strerror or str(error), _remedy(error))


def unusable(folder: Path, error: OSError) -> InvalidConfiguration:
    """Return the typed error for a folder that cannot be used at startup."""
    return InvalidConfiguration("state_dir", f"{folder} cannot be used: {error}; {_remedy(error)}")


def _remedy(error: OSError) -> str:
    return REMEDIES.get(error.errno or 0, "remove the cause, or set state_dir to a folder elsewhere")


def make_folder(folder: Path, durable: bool) -> None:
    """Create a folder with its parents. With `durable`, sync their names to the disk. Raise OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if durable:
        for path in reversed(missing):
            sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder: names created, renamed or removed in it are then on the disk. Raise OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Sync a file, regardless of the process that wrote it. Raise OSError."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
