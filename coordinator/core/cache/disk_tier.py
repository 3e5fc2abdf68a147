"""The books of the disk tier: KV blocks in a folder of a worker, which outlive the worker, the service and the host.

They are the books of a host tier with another kind of block: free + cached + referenced + quarantined = total. They
belong to one registration. The worker announces what it found on its disk, and until it has done so, all other blocks
are quarantined: they may hold entries. A worker that is lost takes the books along; its successor announces again.

Blocks that cannot be written stay quarantined for the life of the worker: the tier gets smaller. Some
ranks may have written their share of such a block, which a wipe overwrites.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvforge.protocol.messages import DiskStats

from .hashing import BlockHasher, Hashes
from .host_free import FreeBlocks
from .host_node import NO_HOST_BLOCK
from .host_parts import part_number, part_value
from .host_tier import HostTier
from .prefix_cache import Tokens, root_key
from .tenants import Shares
from .wipes import NO_TAG, Wipes


class DiskTier(HostTier):
    """The blocks of one disk tier: [0, total).

    Attributes:
        announced: The worker has announced all entries of earlier lives.
        recovered_total: Entries that it announced and that can be hit.
        pruned_total: Entries that it announced and that cannot be used.
        failed_total: Copies that ended with an error of the device, or for lack of space.
        late_total: Requests that stopped waiting for the disk.
        declined_total: Requests that computed what the disk has, because that takes less time.
        halves: Quarantined blocks that some ranks may have bytes of an entry in.
    """

    def __init__(self, total: int, nodes_max: int, shares: Shares | None = None, wipes: Wipes | None = None) -> None:
        super().__init__("", total, nodes_max, shares, wipes)
        self._free = FreeBlocks(0)
        self.announced = False
        self.halves: set[int] = set()
        self.recovered_total = self.pruned_total = self.failed_total = self.late_total = 0
        self.declined_total = 0

    @property
    def quarantined(self) -> int:
        """Blocks that may hold an entry that was not announced yet, or that cannot be written."""
        return super().quarantined if self.announced else self.total - self.cached

    def adopt(
        self,
        block: int,
        value: int,
        parent: int,
        first: bool,
        tokens: Tokens,
        hasher: BlockHasher,
        tag: int = NO_TAG,
        owner: int = 0,
    ) -> bool:
        """Take an entry that the worker found, if the coordinator itself would name it so, and its owner has room.

        Args:
            block: Its block.
            value: Its chained hash.
            parent: The chained hash of the block before it, or the salt.
            first: Whether it is the first block of its chain.
            tokens: Its tokens, [block_size] int32; of a part, its number as `host_parts` has it, and zeros.
            hasher: Makes hashes under this coordinator's key.
            tag: The tag of its owner; NO_TAG if it is not known.
            owner: The tenant that is charged for it; 0 for none.

        Returns:
            Whether it can be hit. Otherwise its block becomes free once all entries were announced.
        """
        assert not self.announced
        if self._wipes is not None and tag in self._wipes.dead:
            self.reject(block, tag)
            return False
        before = root_key(parent) if first else self._by_value.get(parent)
        full = self._shares is not None and self.usage.get(owner, 0) >= self._shares[1][owner]
        number = part_number(tokens.tobytes())
        if number >= 0 and not first:
            expected, tokens = part_value(parent, number), tokens[:1]
        else:
            expected = int(hasher.extend(np.array([parent], np.uint64), tokens[None])[0])
        known = before is not None and not full and expected == value
        node_id = self.add(before, value, tokens.tobytes()) if known and before is not None else None
        if node_id is None or self.nodes[node_id].block != NO_HOST_BLOCK:
            self.pruned_total += 1
            return False
        self.nodes[node_id].block, self.nodes[node_id].tag = block, tag
        self._charge(self.nodes[node_id], owner)
        self.filled(node_id)
        self._lru.add_oldest(
            node_id, owner, not self.nodes[node_id].children
        )  # later chains are announced first, and parents before children
        self.recovered_total += 1
        return True

    def reject(self, block: int, tag: int) -> None:
        """Do not take an entry that the worker found. It is overwritten if its owner was wiped."""
        assert not self.announced
        self.pruned_total += 1
        if self._wipes is not None and tag in self._wipes.dead:
            self.to_wipe.append(block)

    def end_announcement(self, usable: int = 0, others: Iterable[tuple[int, int]] = ()) -> None:
        """All entries were announced: the blocks without one are free.

        Args:
            usable: Blocks below this one may have any bytes.
            others: Blocks that other ranks have entries in, and the tags of their owners.
        """
        assert not self.announced
        self.announced = True
        taken = {*(node.block for node in self.nodes.values()), *self.to_wipe}
        if self._wipes is not None:
            dead = {block for block, tag in others if tag in self._wipes.dead} - taken
            self.to_wipe.extend(sorted(dead))
            taken |= dead
        self._free = FreeBlocks(self.total, taken)
        self.stale = {block for block in self._free if block < usable}

    def _wipe_unused(self) -> None:
        """Overwrite free blocks that may have bytes of any tenant. What cannot be written stays as it is."""
        if not self.announced:
            return
        kept, self._quarantine = self._quarantine, []
        super()._wipe_unused()
        self.to_wipe.extend(sorted(self.halves))
        self._quarantine = [block for block in kept if block not in self.halves]
        self.halves.clear()

    def not_wiped(self, block: int) -> None:
        """Record that a block cannot be overwritten: it is not used any more."""
        self.wiping.remove(block)
        self._quarantine.append(block)

    def note_half(self, block: int) -> None:
        """Record that some ranks have written their share of a block, which is no entry."""
        if block in self._quarantine:
            self.halves.add(block)

    def limit(self, usable: int) -> int:
        """Give up the free blocks from `usable` on, for which the disk has no space. Return how many they are."""
        lost = [block for block in self._free if block >= usable]
        self._quarantine.extend(lost)
        self._free = self._free.without(set(lost))
        self.stale.difference_update(lost)
        return len(lost)

    def entries(self, root: int, tokens: Tokens, hashes: Hashes, first: int, end: int) -> tuple[int, ...]:
        """Return the nodes of the longest run of entries [first, ...) of a prefix; see `match`."""
        return self.match(root, tokens, hashes, first, end) if self.announced else ()

    def stats(self, off: bool) -> DiskStats:
        """Return what is shown of the tier; `off`: it is turned off."""
        return DiskStats(
            blocks=self.total,
            free=self.free,
            cached=self.cached,
            quarantined=self.quarantined,
            recovered_total=self.recovered_total,
            pruned_total=self.pruned_total,
            saved_total=self.saved_total,
            loaded_total=self.loaded_total,
            evicted_total=self.evicted_total,
            unsaved_total=self.unsaved_total,
            failed_total=self.failed_total,
            late_total=self.late_total,
            missed_tags_total=self.missed_tags_total,
            missed_checksums_total=self.missed_checksums_total,
            off=off,
            declined_total=self.declined_total,
        )

    def check_invariants(self) -> None:
        """Check that the books agree."""
        assert self.halves.issubset(self._quarantine), "a block that some ranks have written is in use"
        if self.announced:
            super().check_invariants()
            return
        blocks = [node.block for node in self.nodes.values() if node.block != NO_HOST_BLOCK]
        assert len(blocks) == self.cached, "an announced disk block"
        assert len({*blocks, *self.to_wipe}) == len(blocks) + len(self.to_wipe), "a disk block is at two places"
