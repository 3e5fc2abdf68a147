"""Faults to plant where sequences come back before their requests: see `faults`. They need worlds with host files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.host_copies import HostCopies
from kvforge.coordinator.core.cache.idle_tracker import IdleTracker
from kvforge.coordinator.core.cache.paced_reads import NO_SLOT
from kvforge.coordinator.core.deadlines import Deadlines
from kvforge.coordinator.core.scheduling.returning import Returning
from tools.simulation.faults import Patch

FAULTS_OF_RETURNS: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_RETURNS[make.__name__] = make
    return make


@fault
def a_sequence_counts_when_its_first_blocks_have_come() -> list[Patch]:
    """A sequence that several steps bring back has all its KV once the first step is acknowledged."""
    flush = HostCopies.flush

    def early(self: HostCopies, step: int, running: int = 0) -> Any:
        found = flush(self, step, running)
        for load in self.loads.values():
            load.step = load.step or step
        return found

    return [(HostCopies, "flush", early)]


@fault
def a_sequence_on_its_way_can_be_evicted() -> list[Patch]:
    """The blocks of a sequence that comes back are given to others while a step in flight fills them."""

    def nothing(self: Returning, group: Group, step: int) -> None:
        pass

    return [(Returning, "hold", nothing)]


@fault
def reads_go_on_when_their_sequence_has_left() -> list[Patch]:
    """Steps go on to fill the blocks of a sequence that gave them up on its way."""

    def kept(self: HostCopies, slot: int) -> None:
        self.loads.pop(slot, None)
        if self.paced.slot == slot:
            self.paced.slot = NO_SLOT

    return [(HostCopies, "forget", kept)]


@fault
def a_try_without_a_deadline() -> list[Patch]:
    """The coordinator sets the time of a try and asks for no turn then."""
    try_at = IdleTracker.try_at

    def silent(self: IdleTracker, slot: int, now_us: int) -> None:
        arm = Deadlines.arm
        Deadlines.arm = lambda self, part, due_us: None  # type: ignore[method-assign]
        try:
            try_at(self, slot, now_us)
        finally:
            Deadlines.arm = arm  # type: ignore[method-assign]

    return [(IdleTracker, "try_at", silent)]
