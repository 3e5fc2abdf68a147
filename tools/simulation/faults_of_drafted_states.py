"""Faults to plant in drafts over recurrent states; see `faults`.

They need worlds with drafts and such a model, so they are apart from the faults of all worlds.
"""

from __future__ import annotations

from collections.abc import Callable

from kvforge.coordinator.core.scheduling.drafts import Drafts
from tools.simulation import workers
from tools.simulation.faults import Patch

FAULTS_OF_DRAFTED_STATES: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_DRAFTED_STATES[make.__name__] = make
    return make


@fault
def rejected_draft_stays_in_the_state() -> list[Patch]:
    """A worker does not take back the state behind a rejected draft."""
    return [(workers, "in_state", lambda drafted, _: drafted + 1)]


@fault
def accepted_draft_missing_in_the_state() -> list[Patch]:
    """A worker does not take the state to the last accepted draft."""
    return [(workers, "in_state", lambda *_: 1)]


@fault
def more_drafts_than_states() -> list[Patch]:
    """A step has drafts as if their rows had no states."""
    return [(Drafts, "_room", lambda self, group: self._rows_max - group.running if self._most else 0)]
