"""Named external holders of blocks: clients that keep a block alive without having it in a sequence.

A holder is a name; a name holds a block at most once. Whoever added it, any client may take it away by name; what a
connection added is dropped when the connection ends, so that a dead client pins nothing.
"""

from __future__ import annotations

import numpy as np

from protocol.errors import AlreadyHolder, BlockNotHeld, CapacityExceeded, InvalidRequest, NotAHolder, StaleGeneration

from .groups import Group
from .pool import FREE, QUARANTINED, Blocks

NAME_LENGTH_MAX = 128


class Refs:
    """Who holds what, on top of the blocks' own counts."""

    def __init__(self, blocks: Blocks, holders_per_block_max: int) -> None:
        self._blocks = blocks
        self._holders_max = holders_per_block_max
        self._client_of: dict[tuple[int, str], int] = {}

    def add(self, group: Group, block: int, generation: int, holder: str, client: int, now_us: int) -> None:
        """One more holder. Raises InvalidRequest, StaleGeneration, BlockNotHeld, AlreadyHolder, CapacityExceeded."""
        blocks = self._blocks
        if not 0 < len(holder) <= NAME_LENGTH_MAX or not holder.isprintable():
            raise InvalidRequest("holder", f"1 to {NAME_LENGTH_MAX} printable characters")
        self.check_generation(block, generation)
        state = int(blocks.state[block])
        if state == FREE or (state == QUARANTINED and not blocks.indexed[block]):
            raise BlockNotHeld(block)
        names = blocks.external.get(block, {})
        if holder in names:
            raise AlreadyHolder(block, holder)
        if len(names) >= self._holders_max:
            raise CapacityExceeded("holders of a block", len(names) + 1, self._holders_max)
        group.pool.hold(np.array([block], np.int64))
        blocks.external.setdefault(block, {})[holder] = now_us
        self._client_of[block, holder] = client

    def drop(self, group: Group, block: int, generation: int, holder: str, now_us: int) -> None:
        """One holder less. Raises StaleGeneration, BlockNotHeld, NotAHolder."""
        self.check_generation(block, generation)
        if self._blocks.refcount[block] == 0:
            raise BlockNotHeld(block)
        names = self._blocks.external.get(block, {})
        if holder not in names:
            raise NotAHolder(block, holder)
        self._forget(block, holder)
        ids = np.array([block], np.int64)
        if group.pool.release(ids, 0, now_us):
            group.forget_copies(ids)

    def check_generation(self, block: int, generation: int) -> None:
        """Raises StaleGeneration where a generation is named (not -1) and is not the block's."""
        current = int(self._blocks.generation[block])
        if generation not in (-1, current):
            raise StaleGeneration(block, generation, current)

    def of_client(self, client: int) -> list[tuple[int, str]]:
        """The (block, holder) pairs that a connection added."""
        return [pair for pair, owner in self._client_of.items() if owner == client]

    def forget_pool(self, first: int, count: int) -> None:
        """The pool of blocks [first, first + count) is gone, and every hold on them."""
        for block, holder in [pair for pair in self._client_of if first <= pair[0] < first + count]:
            self._forget(block, holder)

    def _forget(self, block: int, holder: str) -> None:
        names = self._blocks.external[block]
        del names[holder]
        if not names:
            del self._blocks.external[block]
        del self._client_of[block, holder]

    def check_invariants(self) -> None:
        """Every hold has a connection and the other way round."""
        held = {(block, holder) for block, names in self._blocks.external.items() for holder in names}
        assert held == set(self._client_of), "a hold without a connection"
        assert all(self._blocks.external.values()), "an empty list of holders"
