"""What an installation is made of: steps that say what they do, and what was put in place before."""

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
class Step:
    """words: what it does, as an order ("write /etc/..."). act: does it; None: only something to know."""

    words: str
    act: Callable[[], None] | None = None


@dataclass(frozen=True)
class Owner:
    """Whose a file is, and who may read it."""

    uid: int
    gid: int
    mode: int

    def apply(self, path: Path) -> None:
        """Only root can give files away: whoever makes a system in a folder of their own keeps them."""
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.gid)
        path.chmod(self.mode)

    def holds(self, path: Path) -> bool:
        """Whether the file is so already."""
        found = path.stat()
        same = (found.st_uid, found.st_gid) == (self.uid, self.gid) or os.geteuid() != 0
        return same and found.st_mode & 0o7777 == self.mode


EVERYBODY = Owner(0, 0, 0o644)


class Record:
    """What was put in place, by its digest: a file that has another one now was edited. Kept beside the environment."""

    def __init__(self, places: Places) -> None:
        self._path = places.record
        self._root = places.root
        self._facts: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self._facts = dict(json.loads(self._path.read_text(encoding="utf-8")))

    def get(self, name: str | Path) -> str:
        """What was noted; "" where nothing was."""
        return str(self._facts.get(self._key(name), ""))

    def note(self, name: str | Path, value: str) -> None:
        """Notes it, at once."""
        self._facts[self._key(name)] = value
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write(self._path, (json.dumps(self._facts, indent=1, sort_keys=True) + "\n").encode(), EVERYBODY)

    def _key(self, name: str | Path) -> str:
        return f"/{name.relative_to(self._root)}" if isinstance(name, Path) else name


def write(path: Path, content: bytes, owner: Owner) -> None:
    """The whole file or nothing of it, whatever happens meanwhile."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
    owner.apply(part)
    part.replace(path)


def place(path: Path, content: bytes, owner: Owner, record: Record) -> list[Step]:
    """Steps that bring a file to `content`, unless somebody edited it: then it stays, with the new one beside it."""
    wanted = digest(content)

    def put() -> None:
        write(path, content, owner)
        record.note(path, wanted)

    if not path.exists():
        return [Step(f"write {path}", put)]
    current = digest(path.read_bytes())
    if current == wanted:
        return [] if owner.holds(path) else [Step(f"set owner and mode of {path}", lambda: owner.apply(path))]
    if current == record.get(path):
        return [Step(f"replace {path}, which nobody has edited", put)]
    beside = path.with_name(path.name + NEW)
    told = Step(f"keep {path}, which was edited; what this version brings is in {beside}: compare them")
    if beside.exists() and digest(beside.read_bytes()) == wanted:
        return [told]
    return [told, Step(f"write {beside}", lambda: write(beside, content, owner))]


def digest(content: bytes) -> str:
    """sha256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
