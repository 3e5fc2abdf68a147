"""Removal of a pool's index entries with their parts, and the order in which cached blocks are evicted.

Blocks that leave the index and are not held are appended to a list, `gone`; the pool makes them free together (see
`BlockPool.free_gone`). Until then they keep their state, and are not among the cached blocks that can be evicted.
"""

from __future__ import annotations

import numpy as np

from .blocks import CACHED, BlockIds, Blocks
from .cached_blocks import CachedBlocks
from .entry_parts import NO_KEY, EntryParts
from .host_copies import HostCopies
from .host_parts import CHECKPOINT as CHECKPOINT_PART
from .prefix_cache import PrefixCache


class EntryEviction:
    """Evicts the entries of one pool.

    Attributes:
        host: Takes blocks that are evicted to the host; None without a host tier.
    """

    def __init__(self, blocks: Blocks, index: PrefixCache, recent: CachedBlocks, parts: EntryParts) -> None:
        self._blocks, self._index, self._recent, self._parts = blocks, index, recent, parts
        self.host: HostCopies | None = None

    def evict(self, tenant: int, count: int, gone: list[int]) -> None:
        """Evict a tenant's least recently used blocks, and what goes with them.

        Args:
            tenant: The tenant.
            count: How many blocks to evict, at least. It has as many.
            gone: Takes the blocks that are to become free.
        """
        if self._parts.checkpoints or self._parts.windows:
            least = len(gone) + count
            while len(gone) < least:
                _, block = self._recent.oldest(tenant)
                if self.host is not None:
                    self._save_with_parts(self.host, block)
                self.evict_with_parts(block, gone)
            return
        blocks = self._recent.pop(tenant, count)
        for block in blocks:
            if self.host is not None:
                self.host.save(block)
            self._index.remove(block)
        gone += blocks

    def _save_with_parts(self, host: HostCopies, block: int) -> None:
        """Let the host tier have all that `evict_with_parts` evicts."""
        parts = self._parts
        if (held := parts.checkpoint_of.get(block)) is not None:
            host.save_parts(held, parts.checkpoints[held], CHECKPOINT_PART)
            return
        if (key := parts.window_keys.item(block)) != NO_KEY:
            host.save_parts(key, parts.windows[key], 0)
            return
        host.save(block)
        key = self._index.key(block)
        for of_kind, number in ((parts.windows, 0), (parts.checkpoints, CHECKPOINT_PART)):
            ids = of_kind.get(key)
            if ids is not None and self._blocks.state[ids[0]] == CACHED:
                host.save_parts(key, ids, number)

    def evict_with_parts(self, block: int, gone: list[int]) -> None:
        """Evict a cached block with its parts, or all blocks of the part that it belongs to.

        Args:
            block: The block.
            gone: Takes the blocks that are to become free.
        """
        parts = self._parts
        if (held := parts.checkpoint_of.get(block)) is not None:
            self.uncache(parts.drop_checkpoint(held), gone)
        elif parts.windows and (key := parts.window_keys.item(block)) != NO_KEY:
            self.uncache(parts.drop_window(key), gone)
        else:
            self.remove_entry(block, gone)
            self.uncache((block,), gone)

    def remove_entry(self, block: int, gone: list[int]) -> None:
        """Remove a block from the prefix index, and the parts of its entry with it.

        Args:
            block: The block. Its state stays as it is.
            gone: Takes the blocks of the parts that are to become free.
        """
        parts = self._parts
        self._index.remove(block)
        if parts.checkpoints and (key := self._index.key(block)) in parts.checkpoints:
            self.uncache(parts.drop_checkpoint(key), gone)
        if parts.windows and (key := self._index.key(block)) in parts.windows:
            self.uncache(parts.drop_window(key), gone)

    def uncache(self, blocks: tuple[int, ...], gone: list[int]) -> None:
        """Add blocks that leave the index, all cached or all held, to those that are to become free if they are cached.

        Blocks that are held lose their mark of an indexed block at once, the others when they become free.

        Args:
            blocks: The blocks, [n > 0].
            gone: Takes the cached blocks.
        """
        if self._blocks.state.item(blocks[0]) != CACHED:
            self._blocks.indexed[list(blocks)] = False
            return
        self._recent.discard_few(blocks, self._blocks.owner)
        gone += reversed(blocks)

    def make_recent(self, ids: BlockIds) -> None:
        """Make blocks that are cached from now on, and the checkpoints that hang on them, the most recently used ones.

        Args:
            ids: The blocks in this order, [n > 0].
        """
        blocks, checkpoints, start = self._blocks, self._parts.checkpoints, 0
        if np.count_nonzero(blocks.kind[ids]) < ids.size:  # they hang on KV blocks
            keys = self._index.keys(ids).tolist()
            if not checkpoints.keys().isdisjoint(keys):
                for place, key in enumerate(keys):
                    if key in checkpoints:
                        if place > start:
                            self._recent.add(ids[start:place], blocks.owner[ids[start:place]])
                        self._refresh_checkpoint(key)
                        start = place
                ids = ids[start:]
        self._recent.add(ids, blocks.owner[ids])

    def _refresh_checkpoint(self, key: int) -> None:
        """Make a checkpoint the most recently used item if it is cached: just before the KV block that it hangs on."""
        blocks, checkpoint = self._blocks, self._parts.checkpoints[key]
        ids = np.array([block for block in checkpoint if blocks.state[block] == CACHED], np.int64)
        if ids.size:
            owners = blocks.owner[ids]
            self._recent.discard(ids, owners)
            self._recent.add(ids, owners)
