"""What client processes write down as it happens, one line each, in files that outlive them: the ledger's one side."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

ASKED, ACCEPTED, REFUSED, UNKNOWN = "asked", "accepted", "refused", "unknown"
CANCELLING, ENDED, BROKEN, LEFT, FAULT = "cancelling", "ended", "broken", "left", "fault"
# How a request without a key is asked for over HTTP, and the code of one that ended with its connection.
HTTP, LOST = "http", "connection_lost"


class Notes:
    """Appends lines. Each is in the file when the call returns, whatever then becomes of the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **facts: Any) -> None:
        """One thing that happened, at the time of all processes of this host."""
        line = json.dumps({"kind": kind, "at": monotonic(), **facts})
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        """No more of them."""
        os.close(self._descriptor)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """What was written so far, but for a last line that is not whole."""
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            yield json.loads(line)


@dataclass
class Intent:
    """One command that asks for requests, and what is known of them.

    name: unique in the run, but that who repeats a key repeats the name. max_tokens: by which its requests are known.
    settled: whether it is known which requests it made: `ids`, in the order of their seeds.
    """

    name: str
    case: int
    turn: int
    count: int
    how: str
    settled: bool = False
    ids: list[int] = field(default_factory=list)


@dataclass
class Story:
    """What one client process wrote."""

    process: str
    intents: dict[str, Intent] = field(default_factory=dict)
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    cancelling: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    broken: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, process: str, path: Path) -> Story:
        """What its file says so far."""
        story = cls(process)
        for note in read(path):
            story._take(note)
        return story

    def _take(self, note: dict[str, Any]) -> None:
        kind = note["kind"]
        if kind == ASKED:
            facts = {name: note[name] for name in ("name", "case", "turn", "count", "how")}
            self.intents.setdefault(note["name"], Intent(**facts))
        elif kind == ACCEPTED:
            intent = self.intents[note["name"]]
            if intent.ids and intent.ids != note["ids"]:
                self.faults.append(f"{intent.name} was accepted as {intent.ids}, then as {note['ids']}")
            intent.settled, intent.ids = True, note["ids"]
        elif kind == REFUSED:
            self.intents[note["name"]].settled = True
            self.broken.append(note)
        elif kind in (UNKNOWN, BROKEN):
            self.broken.append(note)
        elif kind == CANCELLING:
            self.cancelling.add(note["id"])
        elif kind == ENDED:
            if self.ended.setdefault(note["id"], note)["reason"] != note["reason"]:
                self.faults.append(f"request {note['id']} ended twice, and not the same way")
        elif kind == LEFT:
            self.left.add(note["id"])
        else:
            assert kind == FAULT, f"a note of kind {kind}"
            self.faults.append(note["what"])
