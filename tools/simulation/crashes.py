"""Deaths of the simulated coordinator's process, and its recovery.

The process is killed before a turn is written, in the middle of the write, or between any two of the effects that
follow. The ledger holds the promises, so it is rolled back with the process: an unwritten event has not happened, and
peers that saw it will find out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.log import Journal, remove_before, segments
from kvforge.coordinator.journal.recovery import Recovered, cut_torn, recover
from kvforge.coordinator.journal.segment_completion import complete_segment
from kvforge.coordinator.journal.unwritten import END_AT, START, packed_end
from kvforge.protocol.errors import StateRemoved
from tools.simulation.state_equality import equality_digest
from tools.simulation.workers import Violation

if TYPE_CHECKING:
    from tools.simulation.checks import Checker
    from tools.simulation.coordinators import WatchedMachine
    from tools.simulation.ledger import Ledger
    from tools.simulation.progress import Progress

BEFORE, TORN, AFTER = "before", "torn", "after"
WHOLE = 1000
INVARIANTS_EVERY = 4


class Crash(Exception):
    """The process died."""


class CrashPlan(NamedTuple):
    """How the next turn ends.

    Attributes:
        how: BEFORE the record is written; TORN, with `part` / WHOLE of the record written; or AFTER `part` effects (at
            the turn's end if it has fewer).
        part: see `how`.
        back_us: time until the next process starts.
        wall_jump_s: change of the wall clock before the next process starts.
    """

    how: str
    part: int
    back_us: int
    wall_jump_s: float = 0.0


class LedgerCopy(NamedTuple):
    """The promises and the state at one moment; must not be changed."""

    ledger: Ledger
    progress: Progress
    checker: Checker
    state: str


def copied(ledger: Ledger, progress: Progress, checker: Checker, machine: Machine, shared: list[Any]) -> LedgerCopy:
    """Copy the ledger and the checks, and take the digest of the machine's state.

    Args:
        ledger: the promises.
        progress: the progress checks.
        checker: the invariant checks.
        machine: the core.
        shared: objects that the copy must share.

    Returns:
        The copies. Objects that are never changed in place are shared; arrays of numbers are copied at once.
    """
    memo: dict[int, Any] = {id(one): one for one in (*shared, machine, *ledger.keys.values())}
    memo |= {id(numbers): numbers.copy() for numbers in (ledger.prompt_sizes, *ledger.prefixes.values())}
    return LedgerCopy(*deepcopy((ledger, progress, checker), memo), equality_digest(machine))


class CrashingJournal(Journal):
    """The real journal.

    Attributes:
        death: How the turn that is written next ends, or None.
        dead: The process has died: stored records reach the segment in part.
    """

    death: CrashPlan | None = None
    dead = False

    @property
    def unwritten(self) -> bool:
        """Return whether an event has not been written yet."""
        return bool(self._noted)

    def commit(self) -> None:
        """Write the noted events, or a part when the process dies."""
        death = self.death if self.unwritten else None
        if death is not None and death.how == BEFORE:
            raise Crash
        start, stored = self._end, self._unwritten.end if self._unwritten is not None else 0
        super().commit()
        if death is not None and death.how == TORN:
            if self._unwritten is not None and self._end == start:
                self._unwritten._map[END_AT:START] = packed_end(stored)  # its end was not stored
                self._unwritten._end = stored
                self._unwritten._number -= 1
            else:
                (*_, path) = segments(self.folder).values()
                os.truncate(path, start + (self._end - start) * death.part // WHOLE)
            raise Crash

    def _append(self, data: bytearray) -> None:
        """Write records, or a part when the process has died."""
        if self.dead:
            part = self.death.part if self.death is not None else 0
            os.write(self._descriptor, data[: len(data) * (part % WHOLE) // WHOLE])
            raise StateRemoved(str(self.folder), "the process died")
        super()._append(data)

    def _acknowledge(self) -> None:
        """Acknowledge, unless the process dies in the middle of the record."""
        if self.death is None or self.death.how != TORN:
            super()._acknowledge()


def recover_next_process(folder: Path, before: LedgerCopy) -> Recovered:
    """Recover from the journal; raise Violation unless the state equals the ledger's copy."""
    complete_segment(folder)
    found = recover(folder)
    assert found is not None, "the journal is missing"
    cut_torn(found)
    if (made := equality_digest(found.machine)) != before.state:
        raise Violation(f"recovered state {made}, expected {before.state}")
    if found.number % INVARIANTS_EVERY == 0:  # they held for the original state, which is equal
        found.machine.check_invariants()
    return found


@contextmanager
def alone(machine: WatchedMachine) -> Iterator[None]:
    """Make the machine an ordinary one without a watcher inside the block."""
    kind = machine.__class__
    removed = [(part, name, getattr(part, name)) for part, name in machine.watcher.between]
    for part, name, _ in removed:
        delattr(part, name)
    machine.__class__ = Machine  # type: ignore[assignment]
    try:
        yield
    finally:
        machine.__class__ = kind
        for part, name, value in removed:
            setattr(part, name, value)


def cut(journal: Journal, machine: WatchedMachine, now_us: int, numbers: int) -> None:
    """Write a snapshot as a child process would, and remove what it replaces."""
    first = journal.rotate()
    head = snapshot.Head.of(journal, now_us, numbers)
    with alone(machine):
        snapshot.write(journal.folder / snapshot.STATE.format(first), machine, head)
    remove_before(journal.folder, first, durable=False)
