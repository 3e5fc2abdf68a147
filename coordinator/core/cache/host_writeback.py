"""Write-back: blocks that running sequences fill are copied to the host before anything evicts them.

Without it, only evicted blocks are on the host when a worker dies. With it, the successor continues the sequences from
there, and computes again what was filled last.

A step carries write-back only if it carries no other copies and none is in flight, and then at most
`cache.host_writeback_blocks` blocks: copies share the device's memory with decodes. Steps without rows carry on with it
when the worker is idle, so that it leaves its whole cache if it dies then.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from .host_copies import HostCopies
from .host_tier import NO_HOST_BLOCK

BACKLOG_MAX = 1 << 16  # a block beyond is copied with one behind it, or when it is evicted
NO_KEY = -1


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

    def order(self) -> None:
        """Add blocks to the copies of the next step, if it would carry none and no copy is in flight."""
        copies = self._copies
        if copies.pending or copies.sent:
            return
        while self.backlog and len(copies.writes) < self._blocks_max:
            if not self._copy(self.backlog[0]):
                return
            self.backlog.popleft()

    def _copy(self, key: int) -> bool:
        """Copy an entry's block, and those before it that are not on the host, the first ones first.

        Returns:
            False if the step has no room for the block: it is next in a later one.
        """
        copies, tier = self._copies, self._copies.tier
        node_id = copies.node_of(key & 0xFFFFFFFF) if copies.index.alive(key) else None
        if node_id is None:
            return True
        chain, node = tier.chain(node_id), tier.nodes[node_id]
        node.children += 1  # an entry behind it that gives its block must not take it along
        fits = True
        for source, each in reversed(self._missing(chain, key)):
            fits = len(copies.writes) < self._blocks_max
            if not fits or not tier.give_block(each, chain, copies.owner_of(source)):
                break
            copies.writes[source] = each
        node.children -= 1
        tier.prune(node_id)
        return fits

    def _missing(self, chain: list[int], key: int) -> list[tuple[int, int]]:
        """Return the device blocks and nodes of a chain that are not on the host, the last one first.

        Args:
            chain: The nodes from an entry to the first block of its prefix.
            key: The key of the entry.

        Returns:
            Pairs; none if a block is neither here nor there, without which the others are of no use.
        """
        index, nodes, missing = self._copies.index, self._copies.tier.nodes, []
        for node_id in chain:
            here = key >= 0 and index.alive(key) and nodes[node_id].entry == key
            if nodes[node_id].block == NO_HOST_BLOCK:
                if not here:
                    return []
                missing.append((key & 0xFFFFFFFF, node_id))
            key = index.parent_of(key & 0xFFFFFFFF) if here else NO_KEY
        return missing
