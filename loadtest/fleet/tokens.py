"""The tokens of a simulated worker: a hash of the previous token and the position.

As with a model, a request has the same answer in any batch and when it is recomputed: after a preemption, on another
worker, or after a restart of the coordinator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import GENERATED, ErrorInfo, Int32Array, RowError, Step

NO_GRAMMARS = ErrorInfo.of(InvalidRequest("sampling.grammar", "is not supported by simulated workers"))
Seeds = npt.NDArray[np.uint64]

# Constants of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Tokens:
    """The state of the slots.

    It keeps the last token of each slot, its seed (0: greedy), and whether its request is refused for having a grammar.
    """

    def __init__(self, slots: int, vocabulary: int) -> None:
        self._vocabulary = np.uint64(vocabulary)
        self._last = np.zeros(slots, np.int32)
        self._seeds: Seeds = np.zeros(slots, np.uint64)
        self._refused = np.zeros(slots, np.bool_)

    def of(self, step: Step) -> tuple[Int32Array, Int32Array]:
        """Return the sampled tokens of a step. Steps must come in order.

        Returns:
            Slots and tokens, [sampled] int32 each, in the order of the step's rows.
        """
        for begin in step.begins:
            self._seeds[begin.slot] = begin.seed if begin.sampling.temperature else 0
            self._refused[begin.slot] = begin.sampling.grammar is not None
        rows = np.flatnonzero((step.samples != 0) & ~self._refused[step.slots])
        slots, counts = step.slots[rows], step.counts[rows]
        ends = rows if step.tokens.size == step.counts.size else np.cumsum(step.counts, dtype=np.int64)[rows] - 1
        before = step.tokens[ends]
        before = np.where(before < 0, self._last[slots], before % GENERATED)  # of either kind
        at = (step.starts[rows] + counts).astype(np.uint64)
        tokens = drawn(self._seeds[slots], before, at, self._vocabulary)
        self._last[slots] = tokens
        return slots, tokens

    def refused(self, step: Step) -> tuple[RowError, ...]:
        """Return the errors of the refused rows of a step that `of` has processed."""
        slots = step.slots[self._refused[step.slots]]
        return tuple(RowError(slot, NO_GRAMMARS) for slot in slots.tolist())


def drawn(seeds: Seeds, before: Int32Array, at: npt.NDArray[np.uint64], vocabulary: np.uint64) -> Int32Array:
    """Return [n] int32: the token at position `at` after the token `before`."""
    mixed = (seeds + (at << np.uint64(32)) + before.astype(np.uint64)) * GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
    return ((mixed ^ (mixed >> np.uint64(31))) % vocabulary).astype(np.int32)
