"""python -m tools.simulation.replay FILE: applies recorded events to a new machine and prints the digests.

The file holds what a coordinator's journal would: the events from the Boot on, with their times. Applied again in any
process, they yield the same effects and the same state.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from kvforge.coordinator.core.events import Applied, Boot, Event, FromClient, FromWorker
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.journal.entries import Reader, pack
from kvforge.protocol import codec
from tools.simulation.digest import digest, state_digest

STATE_EVERY = 20
NOT_SAID = frozenset({"tables"})  # a field of Step that is always empty


class Recording:
    """The events of one machine and their digests.

    Each line covers some events: their effects, the due times, and the state after them.
    """

    def __init__(self, boot: Boot, start_us: int) -> None:
        self._events: list[bytes] = [_packed(boot, start_us)]
        self.lines: list[str] = []
        self._effects = hashlib.blake2b(digest_size=16)

    def applied(self, machine: Machine, event: Event, now_us: int, applied: Applied) -> None:
        """Record an applied event."""
        self._events.append(_packed(event, now_us))
        self._note(machine, applied)

    def _note(self, machine: Machine, applied: Applied) -> None:
        self._effects.update(digest(applied).encode())
        if len(self._events) % STATE_EVERY == 0:
            self._line(machine)

    def _line(self, machine: Machine) -> None:
        self.lines.append(f"{len(self._events)} {self._effects.hexdigest()} {state_digest(machine)}")

    def write(self, machine: Machine, path: Path) -> None:
        """Write the recording."""
        self._line(machine)
        path.write_bytes(b"".join(self._events))


def _packed(event: Event | Boot, now_us: int) -> bytes:
    """Return an event as a journal entry."""
    frames = codec.encode(event.message) if isinstance(event, FromClient | FromWorker) else ()
    return b"".join(pack(event, now_us, frames))


def replayed(path: Path) -> list[str]:
    """Return the lines of a recording, computed anew."""
    (boot, start_us), *rest = Reader().entries(memoryview(path.read_bytes()))
    assert isinstance(boot, Boot)
    machine, recording = Machine(boot, start_us), Recording(boot, start_us)
    for event, now_us in rest:
        assert not isinstance(event, Boot)
        recording.applied(machine, event, now_us, machine.apply(event, now_us))
        _forget_published(machine.cache)
    machine.check_invariants()
    recording._line(machine)
    return recording.lines


def _forget_published(cache: Any) -> None:
    """Clear the change lists, as the publisher does after a turn."""
    for changes in (cache.sequences.changed_rows, cache.sequences.changed_lengths, cache.sequences.changed_cells):
        changes.clear()
    cache.blocks.changed.clear()


class OutputDigest:
    """Digest of everything that leaves the core.

    It covers the messages to each peer, the requests to the shell, the log entries, and the due times. It depends on
    messages and log entries per destination only, not on the core's structure.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def applied(self, _machine: Machine, event: Event, now_us: int, applied: Applied) -> None:
        """Add an applied event."""
        by_destination: dict[str, list[str]] = {}
        for effect in applied.effects:
            kind = type(effect).__name__
            receiver = getattr(effect, "client", None) or getattr(effect, "worker", 0)
            side = "worker" if kind.endswith("Worker") else kind
            by_destination.setdefault(f"{side} {receiver}", []).append(f"{kind} {digest(effect, NOT_SAID)}")
        by_destination.get("Log 0", []).sort()  # log entries of one moment have no order
        applied_text = (now_us, type(event).__name__, sorted(by_destination.items()), applied.due_us)
        self._hash.update(repr(applied_text).encode())

    def over(self, tables: Any) -> str:
        """Return the digest, including the published tables."""
        for array in (tables.row_length, tables.row_blocks, tables.row_sequence, tables.block_table):
            self._hash.update(array.tobytes())
        for array in (tables.block_refcount, tables.block_generation, tables.block_owner):
            self._hash.update(array.tobytes())
        return self._hash.hexdigest()


if __name__ == "__main__":
    print("\n".join(replayed(Path(sys.argv[1]))))
