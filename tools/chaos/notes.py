"""Notes: client processes append each event to a file that outlives them; the client's side of the ledger."""

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
# The `how` of HTTP requests without a key, and the code of requests that ended with their connection.
HTTP, LOST = "http", "connection_lost"


class Notes:
    """Appends notes to a file.

    A note is in the file when the call returns, whatever happens to the process afterwards.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **facts: Any) -> None:
        """Append an event with the host's monotonic time."""
        line = json.dumps({"kind": kind, "at": monotonic(), **facts})
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the notes written so far, without an incomplete last line."""
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            yield json.loads(line)


@dataclass
class Intent:
    """A command that submits requests, and its outcome.

    Attributes:
        name: unique in the run; a repeated idempotency key repeats the name.
        case: number of the case.
        turn: first or second.
        count: number of requests.
        how: `plain`, `key`, `detached`, `samples` or `http`.
        settled: whether `ids` is known.
        ids: the accepted requests, in the order of their seeds.
    """

    name: str
    case: int
    turn: int
    count: int
    how: str
    settled: bool = False
    ids: list[int] = field(default_factory=list)


@dataclass
class ClientNotes:
    """The notes of one client process."""

    process: str
    intents: dict[str, Intent] = field(default_factory=dict)
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    cancelling: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    broken: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, process: str, path: Path) -> ClientNotes:
        """Read the notes of a process."""
        story = cls(process)
        for note in read(path):
            story._add(note)
        return story

    def _add(self, note: dict[str, Any]) -> None:
        kind = note["kind"]
        if kind == ASKED:
            facts = {name: note[name] for name in ("name", "case", "turn", "count", "how")}
            self.intents.setdefault(note["name"], Intent(**facts))
        elif kind == ACCEPTED:
            intent = self.intents[note["name"]]
            if intent.ids and intent.ids != note["ids"]:
                self.faults.append(f"{intent.name} was accepted as requests {intent.ids}, then as {note['ids']}")
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
                self.faults.append(f"request {note['id']} ended twice with different reasons")
        elif kind == LEFT:
            self.left.add(note["id"])
        else:
            assert kind == FAULT, f"unknown kind of note: {kind}"
            self.faults.append(note["what"])
