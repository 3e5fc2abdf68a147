"""When a draft model proposes, and how many tokens: its passes take time, which wrong or unused proposals waste.

The coordinator decides what is verified, and shows it by the drafts of later steps. Proposals that no step takes are
tried again after 4, 8, 16, ... results. A request gets about as many as were accepted of late, and a few more.
"""

from __future__ import annotations

from collections.abc import Iterable

TRIAL = 4  # proposals of one trial: the coordinator compares the first with the tokens, and waits for a later one
WAIT_FIRST, WAIT_MAX = 4, 1024  # results without proposals
ACCEPTED_FIRST = 2.0  # accepted drafts of a step that are expected of a new request
AVERAGED = 4  # the averaging window of accepted drafts, in steps


class DraftPacing:
    """Decides for one worker; not thread-safe."""

    def __init__(self) -> None:
        self._unused = 0  # proposals since the last one that a step verified
        self._wait = self._skip = 0  # results of the next wait, and of the present one that are left
        self._rows = 0  # rows of the last trial
        self._accepted: dict[int, float] = {}  # by slot: accepted drafts of a step, averaged

    def begin(self, slot: int) -> None:
        """Expect of a slot what a new request is expected to accept."""
        self._accepted[slot] = ACCEPTED_FIRST

    def is_due(self, rows: int) -> bool:
        """Return whether to propose with this result. Called once for each result that could have proposals.

        Args:
            rows: Rows that could have some. With half of those of the last trial or less, drafts may pay again.
        """
        if self._skip and 2 * rows <= self._rows:
            self._skip = self._wait = 0
        if self._skip:
            self._skip -= 1
            return False
        return True

    def proposed(self, rows: int) -> None:
        """Note that a result has proposals of so many rows."""
        self._unused += 1
        self._rows = rows
        if self._unused >= TRIAL:
            self._wait = min(2 * self._wait or WAIT_FIRST, WAIT_MAX)
            self._skip, self._unused = self._wait, 0

    def verified(self, results: Iterable[tuple[int, int, int]]) -> None:
        """Learn from steps that verified proposals: (slot, drafted, accepted) each."""
        for slot, drafted, accepted in results:
            self._unused = self._wait = self._skip = 0
            seen = accepted + (accepted == drafted)  # another one may have been right too
            before = self._accepted.get(slot, ACCEPTED_FIRST)
            self._accepted[slot] = before + (seen - before) / AVERAGED

    def count(self, slot: int) -> int:
        """Return how many tokens to propose for a slot."""
        return 2 + int(1.5 * self._accepted.get(slot, ACCEPTED_FIRST))

    def forget(self) -> None:
        """Forget all slots."""
        self._accepted.clear()
