"""Reads from the host tier that no request waits for: each step carries a few, so that rows wait for none.

They belong to one sequence, which comes back before its next request. Once a request waits for it, the next step
carries all that are left.
"""

from __future__ import annotations

from itertools import islice

from .costs import StepCosts

NO_SLOT = -1
BLOCKS_MIN = 16  # of a step, whatever it costs
IDLE_BLOCKS = 512  # of a step without rows: a request that comes then waits for no more
SHARE = 8  # copies take at most 1 / SHARE of the fixed cost of a step


class PacedReads:
    """The reads of one sequence that are not in a step yet.

    Attributes:
        slot: The slot of the sequence; NO_SLOT once all of its reads are in steps.
        waiting: Device block -> node, which has a reader more for each.
    """

    def __init__(self) -> None:
        self.slot = NO_SLOT
        self.waiting: dict[int, int] = {}

    def begin(self, slot: int, reads: dict[int, int]) -> None:
        """Begin with the reads of a sequence: device block -> node."""
        assert not self.waiting, "one sequence comes back at a time"
        self.slot, self.waiting = slot, reads

    def pop(self, most: int) -> dict[int, int]:
        """Remove and return the first reads, at most so many."""
        first = dict(islice(self.waiting.items(), most))
        for block in first:
            del self.waiting[block]
        if not self.waiting:
            self.slot = NO_SLOT
        return first


def blocks_of_step(running: int, steps: StepCosts, reads: StepCosts) -> int:
    """Return how many blocks a step may read that no request waits for.

    Args:
        running: Rows of the group.
        steps: The measured cost of its steps.
        reads: That of its reads, by blocks.
    """
    if not running:
        return IDLE_BLOCKS
    return max(BLOCKS_MIN, steps.fixed // SHARE // reads.token) if reads.token else BLOCKS_MIN
