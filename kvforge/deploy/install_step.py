"""Steps of an installation, which announce themselves, and the record of installed files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .places import Places

NEW = ".new"


@dataclass(frozen=True)
class InstallStep:
    """One step.

    Attributes:
        words: Its description in the imperative ("write /etc/...").
        act: Does it; None: the step is only a note.
    """

    words: str
    act: Callable[[], None] | None = None


@dataclass(frozen=True)
class Owner:
    """Owner and mode of a file."""

    uid: int
    gid: int
    mode: int

    def apply(self, path: Path) -> None:
        """Set owner and mode. Without root, the owner stays: only root can give files away."""
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.gid)
        path.chmod(self.mode)

    def holds(self, path: Path) -> bool:
        """Return whether the file has this owner and mode."""
        found = path.stat()
        same = (found.st_uid, found.st_gid) == (self.uid, self.gid) or os.geteuid() != 0
        return same and found.st_mode & 0o7777 == self.mode


EVERYBODY = Owner(0, 0, 0o644)


class Record:
    """Digests of installed files, kept beside the environment. A file with another digest was edited."""

    def __init__(self, places: Places) -> None:
        self._path = places.record
        self._root = places.root
        self._facts: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self._facts = dict(json.loads(self._path.read_text(encoding="utf-8")))

    def get(self, name: str | Path) -> str:
        """Return the recorded value, "" if there is none."""
        return str(self._facts.get(self._key(name), ""))

    def note(self, name: str | Path, value: str) -> None:
        """Record a value, at once."""
        self._facts[self._key(name)] = value
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write(self._path, (json.dumps(self._facts, indent=1, sort_keys=True) + "\n").encode(), EVERYBODY)

    def _key(self, name: str | Path) -> str:
        return f"/{name.relative_to(self._root)}" if isinstance(name, Path) else name


def write(path: Path, content: bytes, owner: Owner) -> None:
    """Write a file atomically."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
    owner.apply(part)
    part.replace(path)


def place(path: Path, content: bytes, owner: Owner, record: Record) -> list[InstallStep]:
    """Return the steps that bring a file to `content`. An edited file is kept, and the new one is written beside it."""
    wanted = digest(content)

    def put() -> None:
        write(path, content, owner)
        record.note(path, wanted)

    if not path.exists():
        return [InstallStep(f"write {path}", put)]
    current = digest(path.read_bytes())
    if current == wanted:
        return [] if owner.holds(path) else [InstallStep(f"set owner and mode of {path}", lambda: owner.apply(path))]
    if current == record.get(path):
        return [InstallStep(f"replace the unedited {path}", put)]
    beside = path.with_name(path.name + NEW)
    kept = InstallStep(f"keep the edited {path}; this version's file is {beside}: compare them")
    if beside.exists() and digest(beside.read_bytes()) == wanted:
        return [kept]
    return [kept, InstallStep(f"write {beside}", lambda: write(beside, content, owner))]


def digest(content: bytes) -> str:
    """Return the sha256 of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
