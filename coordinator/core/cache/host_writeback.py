"""Write-back: blocks that running sequences fill are copied to the host before anything evicts them.

Without it, only evicted blocks are on the host when a worker dies. With it, the successor continues the sequences from
there, and computes again what was filled last.

A step carries write-back only if it carries no other copies and none is in flight, and then at most
`cache.host_writeback_blocks` blocks, with the window blocks and the checkpoint of the last: copies share the device's
memory with decodes. Steps without rows carry on with it when the worker is idle, so that it leaves its whole cache if
it dies then.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .host_copies import HostCopies
from .host_free import ALIGN
from .host_node import NO_HOST_BLOCK, HostNode
from .host_parts import CHECKPOINT

BACKLOG_MAX = 1 << 16  # a block beyond is copied with one behind it, or when it is evicted
NO_KEY = -1
ROOM_MAX = 64  # neighbours for a prompt that is copied in several steps


class Parts(Protocol):
    """What hangs on index entries, by their keys; see `EntryParts`."""

    @property
    def windows(self) -> dict[int, tuple[int, ...]]:
        """Window blocks."""

    @property
    def checkpoints(self) -> dict[int, tuple[int, ...]]:
        """Blocks of checkpoints."""


class HostWriteback:
    """The blocks of a group that are filled and not on the host yet.

    Attributes:
        backlog: Keys of their index entries, those that were filled first at the front.
    """

    def __init__(self, copies: HostCopies, blocks_max: int) -> None:
        self._copies, self._blocks_max = copies, blocks_max
        self.backlog: deque[int] = deque()

    def note(self, ids: npt.NDArray[np.integer]) -> None:
        """Note blocks that were indexed: [n] ids."""
        if self._blocks_max:
            self.backlog.extend(self._copies.index.keys(ids).tolist()[: BACKLOG_MAX - len(self.backlog)])

    def note_key(self, key: int) -> None:
        """Note an entry that got a checkpoint."""
        if self._blocks_max and len(self.backlog) < BACKLOG_MAX:
            self.backlog.append(key)

    def order(self, parts: Parts) -> None:
        """Add blocks to the copies of the next step, if it would carry none and no copy is in flight.

        Args:
            parts: What hangs on the entries of the pool.
        """
        copies = self._copies
        if copies.pending or copies.sent:
            return
        while self.backlog and len(copies.writes) < self._blocks_max:
            if not self._copy(self.backlog[0], parts):
                return
            self.backlog.popleft()

    def _copy(self, key: int, parts: Parts) -> bool:
        """Copy an entry's block, and those before it that are not on the host, the first ones first.

        Returns:
            False if the step has no room for the block: it is next in a later one.
        """
        copies, tier = self._copies, self._copies.tier
        node_id = copies.node_of(key & 0xFFFFFFFF) if copies.index.alive(key) else None
        if node_id is None:
            return True
        missing = self._missing(node_id, key)[::-1]
        room = self._blocks_max - len(copies.writes)
        fits = len(missing) <= room
        sources, chain = [source for source, _ in missing[:room]], [each for _, each in missing[:room]]
        if chain:
            tier.put_behind(node_id)  # an entry behind it that gives its block must not take it along
            parent = tier.nodes[chain[0]].parent
            before = tier.nodes[parent].block if parent > 0 else NO_HOST_BLOCK
            wanted = max(ALIGN, min(ROOM_MAX, len(self.backlog)))
            fits |= copies.write(sources, chain, before, wanted) < len(chain)  # then the file has no room
            tier.remove_behind(node_id)
        if fits and tier.nodes[node_id].block != NO_HOST_BLOCK:
            self._copy_parts(node_id, key, parts)
        tier.prune(node_id)
        return fits

    def _copy_parts(self, node_id: int, key: int, parts: Parts) -> None:
        """Copy what hangs on an entry that is on the host: window blocks that a token to come can see, a checkpoint.

        All of it goes with one step: in a small file, its parts would otherwise take each other's blocks for ever.
        """
        copies = self._copies
        windows, checkpoint = parts.windows.get(key), parts.checkpoints.get(key)
        if windows is not None and (copies.has_holder(windows[0]) or copies.ends_in_sight(key)):
            copies.write_parts(node_id, windows, 0)
        if checkpoint is not None:
            copies.write_parts(node_id, checkpoint, CHECKPOINT)

    def _missing(self, node_id: int, key: int) -> list[tuple[int, int]]:
        """Return the device blocks and nodes of an entry's chain that are not on the host, the last one first.

        What was seen to be whole is not looked at again, so that the blocks of a sequence are not walked for each block
        that it fills.

        Args:
            node_id: The node of the entry.
            key: The key of the entry.

        Returns:
            Pairs; none if a block is neither here nor there, without which the others are of no use.
        """
        index, tier = self._copies.index, self._copies.tier
        missing: list[tuple[int, int]] = []
        seen: list[HostNode] = []
        while node_id > 0:
            node = tier.nodes[node_id]
            here = key >= 0 and index.alive(key) and node.entry == key
            if node.block != NO_HOST_BLOCK:
                if node.whole == tier.breaks:
                    break
                seen.append(node)
            elif here:
                missing.append((key & 0xFFFFFFFF, node_id))
                seen.clear()  # it is whole once the copy has a place
            else:
                return []
            node_id, key = node.parent, index.parent_of(key & 0xFFFFFFFF) if here else NO_KEY
        for node in seen:
            node.whole = tier.breaks
        return missing
