"""A file system on a host that may lose power: synced data survives, unsynced data may not.

The files are real. Each call that changes one is a point at which the power may fail, before or after the call.
Afterwards, a file has its contents of the last sync, and a folder its names of the last sync.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CALLS = ("write", "pwrite", "fsync", "fdatasync", "ftruncate", "truncate", "unlink", "rename", "mkdir")
LOST, NAMES_KEPT = "lost", "names kept"


class PowerCut(BaseException):
    """The host is off: no code continues, whatever it catches."""


class Disk:
    """The disk below one folder.

    Attributes:
        points: calls so far.
        cut: the point at which the power fails.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.points, self.cut = 0, -1
        self._held: dict[tuple[int, int], int] = {}  # open descriptors, so that the inodes named here are not reused
        self._contents: dict[tuple[int, int], bytes] = {}
        self._names: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        self._folders: set[tuple[int, int]] = set()
        self._real = {name: getattr(os, name) for name in CALLS}
        self._sync_folder(root)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Route every call of this process through the model."""
        for name in CALLS:
            monkeypatch.setattr(os, name, self._call(name))

    def _call(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(what: Any, *arguments: Any, **named: Any) -> Any:
            self._point()
            result = real(what, *arguments, **named)
            if name in ("fsync", "fdatasync"):
                self._synced(what)
            self._point()
            return result

        return call

    def _point(self) -> None:
        if self.points == self.cut:
            raise PowerCut
        self.points += 1

    def _synced(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            self._sync_folder(path)
        elif self.root in path.parents:
            self._contents[self._key(path)] = path.read_bytes()

    def _sync_folder(self, path: Path) -> None:
        if path == self.root or self.root in path.parents:
            self._names[self._key(path)] = {entry.name: self._key(entry) for entry in path.iterdir()}

    def _key(self, path: Path) -> tuple[int, int]:
        found = path.stat()
        key = (found.st_dev, found.st_ino)
        if key not in self._held:
            self._held[key] = os.open(path, os.O_RDONLY)
            if path.is_dir():
                self._folders.add(key)
        return key

    def after(self, where: Path, kept: str = LOST) -> Path:
        """Create the root as found after the power failure, in another folder.

        Args:
            where: a folder that does not exist yet.
            kept: NAMES_KEPT keeps unsynced names, as a disk may; LOST drops them.

        Returns:
            `where`.
        """
        self._restore(self.root, self._key(self.root), where, kept)
        return where

    def _restore(self, path: Path, key: tuple[int, int], where: Path, kept: str) -> None:
        where.mkdir(mode=0o700)
        names = self._names.get(key, {})
        if kept == NAMES_KEPT and path.is_dir():
            names = {entry.name: self._key(entry) for entry in path.iterdir()}
        for name, inode in names.items():
            if inode in self._folders:
                self._restore(path / name, inode, where / name, kept)
            else:
                (where / name).write_bytes(self._contents.get(inode, b""))
                (where / name).chmod(0o600)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._held.values():
            os.close(descriptor)
