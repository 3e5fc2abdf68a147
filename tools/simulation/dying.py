"""How the simulated coordinator's process ends, and what the next one makes of what it wrote.

It is killed before a turn is written, in the middle of writing it, or between any two of the effects that follow. The
books are what was promised, so they go back with it: what was not written has not happened, and whoever was told of it
will find out.
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
from tools.simulation.likeness import likeness
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
    """The process is gone."""


class Death(NamedTuple):
    """How the next turn ends.

    wall_jump_s: by which the wall clock is set before the next process is there.
    how: BEFORE its record is written; with the first `part` of WHOLE of it written (TORN); AFTER so many effects
    (`part`), or at its end where it has fewer. back_us: until the next process is there.
    """

    how: str
    part: int
    back_us: int
    wall_jump_s: float = 0.0


class Books(NamedTuple):
    """What everybody could rely on at one moment, and the state then. They must not be changed any more."""

    ledger: Ledger
    progress: Progress
    checker: Checker
    likeness: str


def copied(ledger: Ledger, progress: Progress, checker: Checker, machine: Machine, shared: list[Any]) -> Books:
    """As they are now, whatever becomes of them. shared: objects that there is one of.

    What is never changed in place is shared too, and what holds numbers alone is copied at once.
    """
    memo: dict[int, Any] = {id(one): one for one in (*shared, machine, *ledger.keys.values())}
    memo |= {id(numbers): numbers.copy() for numbers in (ledger.prompt_sizes, *ledger.prefixes.values())}
    return Books(*deepcopy((ledger, progress, checker), memo), likeness(machine))


class DyingJournal(Journal):
    """The real one. death: how the turn ends that is written next; None: it does not."""

    death: Death | None = None

    @property
    def unwritten(self) -> bool:
        """Whether something entered the core that is not written yet."""
        return bool(self._noted)

    def commit(self) -> None:
        """Writes what was noted, or not all of it."""
        death = self.death if self.unwritten else None
        if death is not None and death.how == BEFORE:
            raise Crash
        start = self._end
        super().commit()
        if death is not None and death.how == TORN:
            (*_, path) = segments(self.folder).values()
            os.truncate(path, start + (self._end - start) * death.part // WHOLE)
            raise Crash

    def _acknowledge(self) -> None:
        """Not where the process dies while it writes the record."""
        if self.death is None or self.death.how != TORN:
            super()._acknowledge()


def next_life(folder: Path, before: Books) -> Recovered:
    """What a new process makes of the journal: the very state that the books are of. Raises Violation."""
    found = recover(folder)
    assert found is not None, "there is a journal"
    cut_torn(found)
    if (made := likeness(found.machine)) != before.likeness:
        raise Violation(f"the journal makes state {made}, and {before.likeness} was the last that counted")
    if found.number % INVARIANTS_EVERY == 0:  # they held where it was made from, and it is the same
        found.machine.check_invariants()
    return found


@contextmanager
def alone(machine: WatchedMachine) -> Iterator[None]:
    """The machine inside the block is an ordinary one, and nobody watches it."""
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
    """A snapshot, as a child writes it; what came before it is removed."""
    first = journal.rotate()
    head = snapshot.Head.of(journal, now_us, numbers)
    with alone(machine):
        snapshot.write(journal.folder / snapshot.STATE.format(first), machine, head)
    remove_before(journal.folder, first, durable=False)
