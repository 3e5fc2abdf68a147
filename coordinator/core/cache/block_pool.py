"""The block pool of a worker: it allocates, caches, quarantines and frees blocks.

Its parts: `cached_blocks` has the order in which cached blocks are evicted, `entry_parts` what hangs on index entries,
`entry_eviction` removes entries with these. `pool_indexing` adds entries, and `pool_invariants` checks a pool.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np
import numpy.typing as npt

from ..clock import Clock
from ..waits import Waits, blocks_of
from .blocks import CACHED, FREE, KV, NO_BLOCKS, QUARANTINED, REFERENCED, BlockIds, Blocks
from .cached_blocks import CachedBlocks
from .entry_eviction import EntryEviction
from .entry_parts import EntryParts
from .host_writeback import HostWriteback
from .prefix_cache import PrefixCache
from .supply import Spare, Supply
from .tenants import Tenants
from .zeroing import Zeroing

_ONE = np.array(1, np.int32)  # see `sequences.ONE`


class BlockPool:
    """The blocks of one worker: [base, base + count). All ids are global.

    Attributes:
        index: The prefix index of the pool.
        zeroing: Blocks to zero before reuse; None if blocks are not zeroed when the tenant changes.
        mixed: Blocks are of several kinds: the model keeps a recurrent state, or has layers with a window.
        touched: The last step that may touch a block.
        recent: The cached blocks in the order of their last use.
        quarantine: Blocks without holders that a step may still touch, [n] ids each. Some may be held again.
        parts: The window blocks and checkpoints that hang on index entries.
        eviction: Removes entries from the index.
        writeback: Takes note of blocks that were filled, to copy them to the host; None without a host tier.
    """

    def __init__(
        self,
        clock: Clock,
        blocks: Blocks,
        tenants: Tenants,
        waits: Waits,
        index: PrefixCache,
        epoch: int,
        base: int,
        count: int,
        zeroing: Zeroing | None = None,
        mixed: bool = False,
    ) -> None:
        self._clock, self.blocks, self.index, self._waits = clock, blocks, index, waits
        self._gain = blocks_of(epoch)
        self.base, self.count = base, count
        self.tenants, self.zeroing, self.mixed = tenants, zeroing, mixed
        self._stack = np.arange(base + count - 1, base - 1, -1, dtype=np.int64)
        self.free = count
        self.quarantined = 0
        self.cached = 0
        self.recent = CachedBlocks(base + count)
        self.quarantine: deque[BlockIds] = deque()
        self.usage = np.zeros(tenants.floor.size, np.int64)
        self._usage_since_us = np.zeros(tenants.floor.size, np.int64)
        self._usage_block_us = np.zeros(tenants.floor.size, np.int64)
        self.done_step = self.touched = 0
        self.referenced_peak = 0
        self.allocated_total = 0
        self.freed_total = 0
        self._awaited: deque[int] = deque()
        self.parts = EntryParts(blocks, index, base + count if mixed else 0)
        self.eviction = EntryEviction(blocks, index, self.recent, self.parts)
        self.writeback: HostWriteback | None = None
        ids = slice(base, base + count)
        assert not blocks.refcount[ids].any(), "a pool's range was still in use"
        blocks.state[ids] = FREE
        blocks.owner[ids] = 0
        blocks.touch[ids] = 0
        blocks.indexed[ids] = False

    @property
    def referenced(self) -> int:
        """Blocks with at least one holder."""
        return self.count - self.free - self.cached - self.quarantined

    @property
    def free_ids(self) -> BlockIds:
        """The free blocks, the next one to allocate last: [free] int64."""
        return self._stack[: self.free]

    # ------------------------------------------------------------------------------------------------- allocation

    def available(self, tenant: int, keep: BlockIds | None = None) -> int:
        """Return how many blocks `tenant` could get now, including by evicting cached blocks.

        Args:
            tenant: The tenant that pays for the blocks.
            keep: Blocks that must not be evicted.
        """
        if self.tenants.has_quotas:
            return self._supply(keep, self.usage).available(tenant)
        kept = int(np.count_nonzero(self.blocks.state[keep] == CACHED)) if keep is not None and keep.size else 0
        return self.free + self.cached - kept

    def has(self, tenant: int, count: int, keep: BlockIds, spare: Spare) -> bool:
        """Return whether `tenant` could get `count` blocks now and leave `spare`; `keep` must not be evicted."""
        if self.tenants.has_quotas:
            return self._supply(keep, self.usage).has(tenant, count, spare)
        return self.available(tenant, keep) >= count + spare.pool

    def supply(self, keep: BlockIds | None = None) -> Supply:
        """Return the supply for each tenant as if the blocks in `keep` were held: a copy to try changes on."""
        return self._supply(keep, self.usage.copy())

    def _supply(self, keep: BlockIds | None, usage: npt.NDArray[np.int64]) -> Supply:
        """Build a supply from `usage`, which the caller copies if the supply will be modified."""
        cached = dict(self.recent.counts)
        if keep is not None and keep.size:
            for block in keep[self.blocks.state[keep] == CACHED].tolist():
                cached[int(self.blocks.owner[block])] -= 1
        return Supply(self.tenants, self.free, cached, usage)

    def allocate(self, tenant: int, count: int) -> BlockIds:
        """Allocate `count` blocks with one holder each, all or nothing.

        Cached blocks are evicted as needed, least recently used first.

        Returns:
            Block ids, [count] int64.

        Raises:
            QuotaExceeded: The tenant would exceed its ceiling.
            CapacityExceeded: The pool does not have enough blocks.
        """
        if count > self.available(tenant):
            raise self.supply().shortage(tenant, count)
        kept = 0
        if self.tenants.has_quotas:
            self.make_room_within_ceiling(tenant, count)
            kept = self.tenants.kept_for_others(tenant, self.usage)
        if self.free < count + kept:
            self._make_room(tenant, count, kept)
        self.free -= count
        ids = self._stack[self.free : self.free + count][::-1].copy()
        blocks = self.blocks
        blocks.refcount[ids] = 1
        blocks.state[ids] = REFERENCED
        blocks.owner[ids] = tenant
        blocks.since_us[ids] = self._clock.now_us
        if self.zeroing is not None:
            self.zeroing.note_writer(ids, tenant)
        self._charge(tenant, count)
        self.allocated_total += count
        referenced = self.count - self.free - self.cached - self.quarantined
        if referenced > self.referenced_peak:
            self.referenced_peak = referenced
        blocks.changed.append(ids)
        return ids

    def _make_room(self, tenant: int, count: int, kept: int) -> None:
        """Evict cached blocks until `count` are free for a tenant beside the `kept` ones of others' floors."""
        gone: list[int] = []
        if not self.tenants.has_quotas:  # what a tenant is charged decides nothing, so all become free together
            missing, owners = count - self.free, [owner for owner, cached in self.recent.counts.items() if cached]
            if len(owners) == 1:
                self.eviction.evict(owners[0], missing, gone)
            while len(gone) < missing:
                self.eviction.evict(self._lru_tenant(tenant), 1, gone)
            self.free_gone(gone)
            return
        while self.free < count + kept:
            self.eviction.evict(self._lru_tenant(tenant), 1, gone)
            self.free_gone(gone)
            if self.mixed:  # a checkpoint goes as a whole, which may reach into its tenant's floor
                kept = self.tenants.kept_for_others(tenant, self.usage)

    def make_room_within_ceiling(self, tenant: int, count: int) -> None:
        """Evict cached blocks of a tenant until `count` more blocks fit under its ceiling. It has enough to evict."""
        if self.tenants.has_quotas:
            gone: list[int] = []
            while self.usage[tenant] + count > self.tenants.ceiling[tenant]:
                self.eviction.evict(tenant, 1, gone)
                self.free_gone(gone)

    def _lru_tenant(self, asking: int) -> int:
        """Return the tenant that owns the oldest cached block that `asking` may evict."""
        best, best_stamp = 0, -1
        for tenant, cached in self.recent.counts.items():
            if not cached or (tenant != asking and self.usage[tenant] <= self.tenants.floor[tenant]):
                continue
            stamp, _ = self.recent.oldest(tenant)
            if best == 0 or stamp < best_stamp:
                best, best_stamp = tenant, stamp
        return best

    def free_gone(self, gone: list[int]) -> None:
        """Free what `EntryEviction` has removed from the cached blocks, and clear `gone`. The last is reused first."""
        if gone:
            self.cached -= len(gone)
            ids = np.array(gone[::-1], np.int64)
            gone.clear()
            self.blocks.indexed[ids] = False
            self._to_free(ids)

    def _charge(self, tenant: int, count: int) -> None:
        usage, now_us = self.usage.item(tenant), self._clock.now_us
        self._usage_block_us[tenant] += usage * (now_us - self._usage_since_us.item(tenant))
        self._usage_since_us[tenant] = now_us
        self.usage[tenant] = usage + count

    def block_us_each(self) -> npt.NDArray[np.int64]:
        """Return the blocks x microseconds that each tenant has occupied so far: [tenants] int64."""
        each: npt.NDArray[np.int64] = self._usage_block_us + self.usage * (self._clock.now_us - self._usage_since_us)
        return each

    def held_by(self, tenant: int) -> int:
        """Return how many blocks the tenant is charged for, without cached ones."""
        return int(self.usage[tenant]) - self.recent.count(tenant)

    def forget_tenant(self, tenant: int) -> None:
        """Clear a tenant, because its index will be reused: evict its cached blocks and reset its usage."""
        gone: list[int] = []
        while self.recent.count(tenant):
            self.eviction.evict(tenant, 1, gone)
        self.free_gone(gone)
        assert not self.usage[tenant], "a tenant that holds blocks was forgotten"
        self._usage_block_us[tenant] = 0
        if self.zeroing is not None:
            self.zeroing.forget_tenant(tenant)

    def wipe(self, tenant: int) -> int:
        """Remove a tenant's blocks without holders from the index, and free them: no host tier gets their content.

        Returns:
            How many there were. Those that a step in flight may touch become free behind it.
        """
        gone: list[int] = []
        while self.recent.count(tenant):
            self.eviction.evict_with_parts(self.recent.oldest(tenant)[1], gone)
        count = len(gone)
        self.free_gone(gone)
        blocks, ids = self.blocks, np.arange(self.base, self.base + self.count)
        waiting = ids[(blocks.state[ids] == QUARANTINED) & (blocks.owner[ids] == tenant) & blocks.indexed[ids]]
        for block in waiting.tolist():
            if blocks.indexed[block]:  # otherwise it went with the entry that it hung on
                self.eviction.evict_with_parts(block, gone)
        self.free_gone(gone)
        self._waits.wake(self._gain)
        return count + int(waiting.size)

    def recharge(self, block: int, tenant: int) -> None:
        """Charge a held block to `tenant` from now on."""
        owner = int(self.blocks.owner[block])
        assert self.blocks.state[block] == REFERENCED
        if owner != tenant:
            self._charge(owner, -1)
            self._charge(tenant, 1)
            self.blocks.owner[block] = tenant
            self._waits.wake(self._gain)  # the previous owner has room for another block
            self.blocks.changed.append(np.array([block], np.int64))

    # ---------------------------------------------------------------------------------------------------- holders

    def hold(self, ids: BlockIds) -> None:
        """Add one holder to each block, reviving cached and quarantined ones: distinct ids, [n], no free blocks."""
        blocks = self.blocks
        states = blocks.state[ids]
        assert not np.count_nonzero(states == FREE), "a free block cannot be held"
        cached = ids[states == CACHED]
        if cached.size:
            self.recent.discard(cached, blocks.owner[cached])
            self.cached -= cached.size
        self.quarantined -= int(np.count_nonzero(states == QUARANTINED))
        blocks.refcount[ids] += 1
        blocks.state[ids] = REFERENCED
        self.referenced_peak = max(self.referenced_peak, self.referenced)
        blocks.changed.append(ids)

    def release(self, ids: BlockIds, last_step: int) -> int:
        """Remove one holder from each block.

        A block without holders is quarantined while a step up to `last_step` may still touch it, else cached or freed.

        Args:
            ids: Distinct block ids in table order, [n]; the tail of a sequence is then evicted before its head.
            last_step: The last step that may touch the blocks.

        Returns:
            How many blocks have no holder left.
        """
        blocks = self.blocks
        counts = blocks.refcount[ids] - 1
        assert not np.count_nonzero(counts < 0), "a block without holders was released"
        blocks.refcount[ids] = counts
        if last_step > self.done_step:
            self.touch(ids, last_step)
        dead = ids[counts == 0] if np.count_nonzero(counts) else ids
        if dead.size:
            self._give_up(dead)
        if dead.size < ids.size:
            self._waits.wake(self._gain)  # evicting the holders that are left may free the block now
        blocks.changed.append(ids)
        return int(dead.size)

    def release_sole(self, ids: BlockIds) -> bool:
        """Remove the holder of each block, if each has exactly one; no step that is not acknowledged may touch them.

        Takes fewer operations than `release`.

        Args:
            ids: Window blocks in the order of `release`, [n]. A block that is named twice has two holders.

        Returns:
            False, with nothing changed, if a block has several holders.
        """
        blocks = self.blocks
        if np.count_nonzero(blocks.refcount[ids] == _ONE) != ids.size:
            return False
        blocks.refcount[ids] = 0
        blocks.changed.append(ids)
        if self.touched > self.done_step or np.count_nonzero(blocks.indexed[ids]) < ids.size:
            self._give_up(ids)
            return True
        blocks.state[ids] = CACHED  # nearly always: full blocks are indexed before
        self.cached += ids.size
        ids = ids[::-1]
        self.recent.add(ids, blocks.owner[ids])
        self._waits.wake(self._gain)
        return True

    def touch(self, ids: BlockIds | list[int], step: int) -> None:
        """Record that a step may touch blocks, [n], which then stay in quarantine until it is done."""
        if len(ids):
            touch = self.blocks.touch
            touch[ids] = np.maximum(touch[ids], step)
            self.touched = max(self.touched, step)

    def _give_up(self, dead: BlockIds) -> None:
        """Quarantine, cache or free blocks without holders, [n]."""
        blocks = self.blocks
        waiting = blocks.touch[dead] > self.done_step if self.touched > self.done_step else NO_BLOCKS
        if not np.count_nonzero(waiting):
            self._cache_or_free(dead)
            return
        held_back = dead[waiting]
        blocks.state[held_back] = QUARANTINED
        self.quarantined += held_back.size
        self.quarantine.append(held_back)
        self._cache_or_free(dead[~waiting])

    def step_done(self, step: int) -> None:
        """Record that every step up to `step` has ended, and end the quarantine of the blocks that waited for it."""
        self.done_step = max(self.done_step, step)
        if self._awaited and self._awaited[0] <= self.done_step:
            while self._awaited and self._awaited[0] <= self.done_step:
                self._awaited.popleft()
            self._waits.wake(self._gain)
        for _ in range(len(self.quarantine)):
            ids = self.quarantine.popleft()
            ids = ids[self.blocks.state[ids] == QUARANTINED]
            over = self.blocks.touch[ids] <= self.done_step
            if count := int(np.count_nonzero(over)):
                self.quarantined -= count
                released = ids[over]
                self.blocks.changed.append(released)  # a cached one differs from before in its state alone
                self._cache_or_free(released)
            if count < ids.size:
                self.quarantine.append(ids[~over])

    def await_step(self, step: int) -> None:
        """Wake waiting requests when `step` has ended: an idle sequence can then be evicted, or a row reused."""
        if step > self.done_step and not (self._awaited and self._awaited[-1] == step):
            insort(self._awaited, step)

    @property
    def awaits_step(self) -> bool:
        """Whether anything waits for the end of a step."""
        return self.quarantined > 0 or bool(self._awaited)

    def _cache_or_free(self, ids: BlockIds) -> None:
        if not ids.size:
            return
        indexed = self.blocks.indexed[ids]
        if count := int(np.count_nonzero(indexed)):
            kept = (ids[indexed] if count < ids.size else ids)[::-1]
            self.blocks.state[kept] = CACHED
            self.cached += count
            if self.parts.checkpoints:  # each goes before the block that it hangs on
                self.eviction.make_recent(kept)
            else:
                self.recent.add(kept, self.blocks.owner[kept])
            ids = ids[~indexed] if count < ids.size else NO_BLOCKS
        self._to_free(ids)
        self._waits.wake(self._gain)

    def _to_free(self, ids: BlockIds) -> None:
        if not ids.size:
            return
        blocks = self.blocks
        blocks.generation[ids] += 1
        blocks.state[ids] = FREE
        owners = blocks.owner[ids]
        if np.count_nonzero(owners == owners[0]) == ids.size:
            self._charge(int(owners[0]), -ids.size)
        else:
            for tenant in sorted(set(owners.tolist())):
                self._charge(tenant, -int(np.count_nonzero(owners == tenant)))
        blocks.owner[ids] = 0
        if self.mixed:
            blocks.kind[ids] = KV
        self._stack[self.free : self.free + ids.size] = ids[::-1]
        self.free += ids.size
        self.freed_total += ids.size
        blocks.changed.append(ids)

    # ------------------------------------------------------------------------------------------------------ entries

    def add_checkpoint(self, key: int, blocks: tuple[int, ...]) -> None:
        """Make held blocks the checkpoint that hangs on an index entry without one."""
        self.parts.add_checkpoint(key, blocks)
        if self.writeback is not None:
            self.writeback.note_key(key)

    def unindex(self, block: int) -> None:
        """Remove a block from the prefix index. A block without holders becomes free."""
        gone: list[int] = []
        self.eviction.remove_entry(block, gone)
        self.eviction.uncache((block,), gone)
        self.free_gone(gone)
