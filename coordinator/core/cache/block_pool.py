"""The block pool of a worker: it allocates, caches, quarantines and frees blocks."""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded

from ..clock import Clock
from ..waits import Waits, blocks_of
from .blocks import CACHED, CHECKPOINT, FREE, KV, NO_BLOCKS, QUARANTINED, REFERENCED, WINDOW, BlockIds, Blocks
from .cached_blocks import CachedBlocks
from .hashing import Hashes
from .host_copies import HostCopies
from .host_parts import CHECKPOINT as CHECKPOINT_PART
from .host_writeback import HostWriteback
from .prefix_cache import PrefixCache, Tokens
from .supply import NO_SPARE, Spare, Supply
from .tenants import Tenants
from .zeroing import Zeroing

_ONE = np.array(1, np.int32)  # see `sequences.ONE`
NO_KEY = -1


class BlockPool:
    """The blocks of one worker: [base, base + count). All ids are global.

    Attributes:
        index: The prefix index of the pool.
        zeroing: Blocks to zero before reuse; None if blocks are not zeroed when the tenant changes.
        mixed: Blocks are of several kinds: the model keeps a recurrent state, or has layers with a window.
        checkpoints: Blocks of the checkpoints of recurrent states, by the key of the KV block before their position.
        windows: Window blocks for the tokens of KV blocks, by the key of these. See `windows`.
        touched: The last step that may touch a block.
        recent: The cached blocks in the order of their last use.
        host: Takes blocks that are evicted to the host; None without a host tier.
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
        self._tenants, self.zeroing, self.mixed = tenants, zeroing, mixed
        self._stack = np.arange(base + count - 1, base - 1, -1, dtype=np.int64)
        self.free = count
        self.quarantined = 0
        self.cached = 0
        self.recent = CachedBlocks(base + count)
        self._quarantine: deque[BlockIds] = deque()
        self.usage = np.zeros(tenants.floor.size, np.int64)
        self._usage_since_us = np.zeros(tenants.floor.size, np.int64)
        self._usage_block_us = np.zeros(tenants.floor.size, np.int64)
        self.done_step = self.touched = 0
        self.referenced_peak = 0
        self.allocated_total = 0
        self.freed_total = 0
        self._awaited: deque[int] = deque()
        self.checkpoints: dict[int, tuple[int, ...]] = {}
        self._checkpoint_of: dict[int, int] = {}
        self.windows: dict[int, tuple[int, ...]] = {}
        self._window_keys = np.full(base + count if mixed else 0, NO_KEY)  # the entry that a window block hangs on
        self.host: HostCopies | None = None
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

    # ------------------------------------------------------------------------------------------------- allocation

    def available(self, tenant: int, keep: BlockIds | None = None) -> int:
        """Return how many blocks `tenant` could get now, including by evicting cached blocks.

        Args:
            tenant: The tenant that pays for the blocks.
            keep: Blocks that must not be evicted.
        """
        if self._tenants.has_quotas:
            return self._supply(keep, self.usage).available(tenant)
        kept = int(np.count_nonzero(self.blocks.state[keep] == CACHED)) if keep is not None and keep.size else 0
        return self.free + self.cached - kept

    def has(self, tenant: int, count: int, keep: BlockIds, spare: Spare) -> bool:
        """Return whether `tenant` could get `count` blocks now and leave `spare`; `keep` must not be evicted."""
        if self._tenants.has_quotas:
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
        return Supply(self._tenants, self.free, cached, usage)

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
            raise self.shortage(tenant, count, self.supply())
        kept = 0
        if self._tenants.has_quotas:
            self.make_room_within_ceiling(tenant, count)
            kept = self._tenants.kept_for_others(tenant, self.usage)
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
        if not self._tenants.has_quotas:  # what a tenant is charged decides nothing, so all become free together
            missing, owners = count - self.free, [owner for owner, cached in self.recent.counts.items() if cached]
            if len(owners) == 1:
                self._evict(owners[0], missing, gone)
            while len(gone) < missing:
                self._evict(self._lru_tenant(tenant), 1, gone)
            self._free_evicted(gone)
            return
        while self.free < count + kept:
            self._evict(self._lru_tenant(tenant), 1, gone)
            self._free_evicted(gone)
            if self.mixed:  # a checkpoint goes as a whole, which may reach into its tenant's floor
                kept = self._tenants.kept_for_others(tenant, self.usage)

    def make_room_within_ceiling(self, tenant: int, count: int) -> None:
        """Evict cached blocks of a tenant until `count` more blocks fit under its ceiling. It has enough to evict."""
        if self._tenants.has_quotas:
            gone: list[int] = []
            while self.usage[tenant] + count > self._tenants.ceiling[tenant]:
                self._evict(tenant, 1, gone)
                self._free_evicted(gone)

    def shortage(self, tenant: int, count: int, supply: Supply, spare: Spare = NO_SPARE) -> CapacityExceeded:
        """Build the error that explains why `tenant` cannot have `count` blocks out of `supply`."""
        ceiling, room = int(self._tenants.ceiling[tenant]), supply.room(tenant)
        if count + spare.own > room:
            return QuotaExceeded(self._tenants.names[tenant], ceiling - room + count + spare.own, ceiling)
        hint = "remove sequences or wait for requests to end"
        return CapacityExceeded("blocks", count + spare.pool, max(0, supply.stock(tenant)), hint)

    def _lru_tenant(self, asking: int) -> int:
        """Return the tenant that owns the oldest cached block that `asking` may evict."""
        best, best_stamp = 0, -1
        for tenant, cached in self.recent.counts.items():
            if not cached or (tenant != asking and self.usage[tenant] <= self._tenants.floor[tenant]):
                continue
            stamp, _ = self.recent.oldest(tenant)
            if best == 0 or stamp < best_stamp:
                best, best_stamp = tenant, stamp
        return best

    def _evict(self, tenant: int, count: int, gone: list[int]) -> None:
        """Evict a tenant's least recently used blocks, and what goes with them.

        Args:
            tenant: The tenant.
            count: How many blocks to evict, at least. It has as many.
            gone: Takes the blocks that are to become free; see `_free_evicted`.
        """
        if self.checkpoints or self.windows:
            least = len(gone) + count
            while len(gone) < least:
                _, block = self.recent.oldest(tenant)
                if self.host is not None:
                    self._save_with_parts(self.host, block)
                self._evict_with_parts(block, gone)
            return
        blocks = self.recent.pop(tenant, count)
        self.cached -= count
        for block in blocks:
            if self.host is not None:
                self.host.save(block)
            self.index.remove(block)
        gone += blocks

    def _save_with_parts(self, host: HostCopies, block: int) -> None:
        """Let the host tier have all that `_evict_with_parts` evicts."""
        if (held := self._checkpoint_of.get(block)) is not None:
            host.save_parts(held, self.checkpoints[held], CHECKPOINT_PART)
            return
        if (key := self._window_keys.item(block)) != NO_KEY:
            host.save_parts(key, self.windows[key], 0)
            return
        host.save(block)
        key = self.index.key(block)
        for parts, number in ((self.windows, 0), (self.checkpoints, CHECKPOINT_PART)):
            ids = parts.get(key)
            if ids is not None and self.blocks.state[ids[0]] == CACHED:
                host.save_parts(key, ids, number)

    def part_of(self, block: int) -> tuple[int, int] | None:
        """Return the entry that a window block or a block of a checkpoint hangs on, and the number of the part."""
        if self.windows and (key := self._window_keys.item(block)) != NO_KEY:
            return key, self.windows[key].index(block)
        if (held := self._checkpoint_of.get(block)) is not None:
            return held, CHECKPOINT_PART + self.checkpoints[held].index(block)
        return None

    def _evict_with_parts(self, block: int, gone: list[int]) -> None:
        """Evict a cached block with what hangs on it, or the checkpoint or window blocks that it is a part of."""
        if (held := self._checkpoint_of.get(block)) is not None:
            self._drop_checkpoint(held, gone)
        elif self.windows and (key := self._window_keys.item(block)) != NO_KEY:
            self._drop_window(key, gone)
        else:
            self._remove_entry(block, gone)
            self._uncache((block,), gone)

    def _uncache(self, blocks: tuple[int, ...], gone: list[int]) -> None:
        """Add blocks that leave the index, all cached or all held, to those that are to become free if they are cached.

        Those that are held lose their mark of an indexed block at once, the others in `_free_evicted`.
        """
        if self.blocks.state.item(blocks[0]) != CACHED:
            self.blocks.indexed[list(blocks)] = False
            return
        self.recent.discard_few(blocks, self.blocks.owner)
        gone += reversed(blocks)
        self.cached -= len(blocks)

    def _free_evicted(self, gone: list[int]) -> None:
        """Free blocks that left the index and the lists of cached ones, and clear `gone`. The last is reused first."""
        if gone:
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
            self._evict(tenant, 1, gone)
        self._free_evicted(gone)
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
            self._evict_with_parts(self.recent.oldest(tenant)[1], gone)
        count = len(gone)
        self._free_evicted(gone)
        blocks, ids = self.blocks, np.arange(self.base, self.base + self.count)
        waiting = ids[(blocks.state[ids] == QUARANTINED) & (blocks.owner[ids] == tenant) & blocks.indexed[ids]]
        for block in waiting.tolist():
            if blocks.indexed[block]:  # otherwise it went with the entry that it hung on
                self._evict_with_parts(block, gone)
        self._free_evicted(gone)
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
        self._quarantine.append(held_back)
        self._cache_or_free(dead[~waiting])

    def step_done(self, step: int) -> None:
        """Record that every step up to `step` has ended, and end the quarantine of the blocks that waited for it."""
        self.done_step = max(self.done_step, step)
        if self._awaited and self._awaited[0] <= self.done_step:
            while self._awaited and self._awaited[0] <= self.done_step:
                self._awaited.popleft()
            self._waits.wake(self._gain)
        for _ in range(len(self._quarantine)):
            ids = self._quarantine.popleft()
            ids = ids[self.blocks.state[ids] == QUARANTINED]
            over = self.blocks.touch[ids] <= self.done_step
            if count := int(np.count_nonzero(over)):
                self.quarantined -= count
                released = ids[over]
                self.blocks.changed.append(released)  # a cached one differs from before in its state alone
                self._cache_or_free(released)
            if count < ids.size:
                self._quarantine.append(ids[~over])

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
            kept = ids[indexed] if count < ids.size else ids
            self.blocks.state[kept] = CACHED
            self.cached += count
            self._make_recent(kept[::-1])
            ids = ids[~indexed] if count < ids.size else NO_BLOCKS
        self._to_free(ids)
        self._waits.wake(self._gain)

    def _make_recent(self, ids: BlockIds) -> None:
        """Make blocks that are cached from now on, [n > 0], the most recently used ones, in this order."""
        blocks, start = self.blocks, 0
        if self.checkpoints and np.count_nonzero(blocks.kind[ids]) < ids.size:  # they hang on KV blocks
            keys = self.index.keys(ids).tolist()
            if not self.checkpoints.keys().isdisjoint(keys):
                for place, key in enumerate(keys):
                    if key in self.checkpoints:
                        if place > start:
                            self.recent.add(ids[start:place], blocks.owner[ids[start:place]])
                        self._refresh_checkpoint(key)
                        start = place
                ids = ids[start:]
        self.recent.add(ids, blocks.owner[ids])

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

    # ----------------------------------------------------------------------------------------------------- index

    def index_block(self, block: int, parent: int, value: int, tokens: Tokens) -> int:
        """Index a full, acknowledged, held block under its chained hash `value`.

        An existing entry for the same content stays, and its key is returned. An entry that collides, or that lost its
        parent, is replaced.

        Returns:
            The key of the entry.
        """
        index = self.index
        old = index.find(value)
        if old is not None:
            if index.is_of(old, parent, tokens):
                return index.key(old)
            self.unindex(old)
        if self.blocks.indexed[block]:
            gone: list[int] = []
            self._remove_entry(block, gone)
            self._free_evicted(gone)
        for child in index.strangers(block, value):
            self.unindex(child)
        return index.add(block, parent, value, tokens)

    def index_each(
        self,
        ids: npt.NDArray[np.integer],
        parents: npt.NDArray[np.int64],
        values: Hashes,
        contents: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int64]:
        """Apply `index_block` to one block of each of n sequences.

        Args:
            ids: Block ids, [n].
            parents: Parent keys, [n].
            values: Chained hashes, [n].
            contents: Tokens, [n, block_size] int32.

        Returns:
            Keys of the entries, [n] int64.
        """
        self._note_filled(ids, values)
        if self.index.add_new(ids, parents, values, contents):
            return self.index.keys(ids)
        each = zip(ids.tolist(), parents.tolist(), values.tolist(), contents, strict=True)
        return np.array([self.index_block(*entry) for entry in each])

    def index_run(
        self, ids: npt.NDArray[np.integer], parent: int, values: Hashes, contents: npt.NDArray[np.int32]
    ) -> int:
        """Apply `index_block` to [n] consecutive blocks of one sequence. Return the key of the last entry."""
        self._note_filled(ids, values)
        keys = self.index.keys(ids)
        if self.index.add_new(ids, np.concatenate([[parent], keys[:-1]]), values, contents):
            return int(keys[-1])
        for block, value, tokens in zip(ids.tolist(), values.tolist(), contents, strict=True):
            parent = self.index_block(block, parent, value, tokens)
        return parent

    def _note_filled(self, ids: npt.NDArray[np.integer], values: Hashes) -> None:
        """Let the host tier know about blocks that are going to be indexed: [n] ids and chained hashes."""
        if self.host is not None and self.writeback is not None:
            self.host.note_computed(ids, values)
            self.writeback.note(ids)

    def unindex(self, block: int) -> None:
        """Remove a block from the prefix index. A block without holders becomes free."""
        gone: list[int] = []
        self._remove_entry(block, gone)
        self._uncache((block,), gone)
        self._free_evicted(gone)

    def _remove_entry(self, block: int, gone: list[int]) -> None:
        """Remove a block from the prefix index, with the checkpoint and the window blocks that hang on its entry."""
        self.index.remove(block)
        if self.checkpoints and (key := self.index.key(block)) in self.checkpoints:
            self._drop_checkpoint(key, gone)
        if self.windows and (key := self.index.key(block)) in self.windows:
            self._drop_window(key, gone)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def add_checkpoint(self, key: int, blocks: tuple[int, ...]) -> None:
        """Make held blocks the checkpoint that hangs on an index entry without one."""
        assert key not in self.checkpoints and self.index.alive(key)
        self.checkpoints[key] = blocks
        if self.writeback is not None:
            self.writeback.note_key(key)
        self._checkpoint_of.update(dict.fromkeys(blocks, key))
        self.blocks.indexed[np.array(blocks, np.int64)] = True

    def _drop_checkpoint(self, key: int, gone: list[int]) -> None:
        """Remove a checkpoint. Its blocks become free when they have no holders."""
        blocks = self.checkpoints.pop(key)
        for block in blocks:
            del self._checkpoint_of[block]
        self._uncache(blocks, gone)

    def _refresh_checkpoint(self, key: int) -> None:
        """Make a checkpoint the most recently used item if it is cached: just before the KV block that it hangs on."""
        blocks = self.blocks
        ids = np.array([block for block in self.checkpoints[key] if blocks.state[block] == CACHED], np.int64)
        if ids.size:
            owners = blocks.owner[ids]
            self.recent.discard(ids, owners)
            self.recent.add(ids, owners)

    # ----------------------------------------------------------------------------------------------- window blocks

    def add_windows(self, keys: list[int], ids: npt.NDArray[np.integer]) -> None:
        """Hang held window blocks on live index entries, unless either has others already.

        Args:
            keys: Keys of the entries, [n].
            ids: The window blocks of each, [n, window_pages].
        """
        windows, key_of = self.windows, self._window_keys
        if windows.keys().isdisjoint(keys) and np.count_nonzero(key_of[ids[:, 0]] == NO_KEY) == len(keys):
            parts, column = dict(zip(keys, map(tuple, ids.tolist()), strict=True)), np.array(keys)[:, None]
            key_of[ids] = column
            if len(parts) == len(keys) and np.count_nonzero(key_of[ids] == column) == ids.size:
                windows.update(parts)  # nearly always: no two rows have the same block
                self.blocks.indexed[ids] = True
                return
            key_of[ids] = NO_KEY
        added: list[int] = []
        for place, (key, blocks) in enumerate(zip(keys, ids.tolist(), strict=True)):
            if key not in windows and key_of[blocks[0]] == NO_KEY:
                windows[key] = tuple(blocks)
                key_of[blocks] = key
                added.append(place)
        self.blocks.indexed[ids[added]] = True

    def _drop_window(self, key: int, gone: list[int]) -> None:
        """Remove the window blocks of an entry from the index. They become free when they have no holders."""
        blocks = self.windows.pop(key)
        for block in blocks:
            self._window_keys[block] = NO_KEY
        self._uncache(blocks, gone)

    # ------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """Check that free + cached + referenced + quarantined = total, and that lists and states agree."""
        self.index.check_invariants(self.base, self.count)
        if self.mixed:
            self._check_kinds()
        blocks, ids = self.blocks, np.arange(self.base, self.base + self.count)
        states, counts = blocks.state[ids], blocks.refcount[ids]
        assert (counts >= 0).all(), "a reference count is below zero"
        listed = self._stack[: self.free]
        assert len(set(listed.tolist())) == self.free, "the free list has a duplicate"
        assert (blocks.state[listed] == FREE).all() and self.free == np.count_nonzero(states == FREE), "free list"
        assert not blocks.indexed[listed].any(), "a free block is indexed"
        assert ((counts > 0) == (states == REFERENCED)).all(), "a count disagrees with its block's state"
        assert self.cached == np.count_nonzero(states == CACHED) == sum(self.recent.counts.values()), "cached"
        assert self.quarantined == np.count_nonzero(states == QUARANTINED), "quarantined"
        for tenant, count in self.recent.counts.items():
            cached, stamps = self.recent.items(tenant)
            assert count == np.unique(cached).size == cached.size, "a count of cached blocks"
            assert (np.diff(stamps) > 0).all(), "cached blocks are in another order than their last uses"
            assert (blocks.state[cached] == CACHED).all() and (blocks.owner[cached] == tenant).all(), "LRU list"
            assert blocks.indexed[cached].all(), "a cached block is not indexed"
        waiting = {block for part in self._quarantine for block in part.tolist()}
        held_back = ids[states == QUARANTINED]
        assert waiting.issuperset(held_back.tolist()), "a quarantined block is in no queue"
        assert (blocks.touch[held_back] > self.done_step).all(), "a block overstays its quarantine"
        owners = np.bincount(blocks.owner[ids][states != FREE], minlength=self.usage.size)
        assert (owners == self.usage).all(), "a tenant's usage disagrees with its blocks"
        assert not blocks.owner[listed].any(), "a free block is charged to a tenant"
        assert not blocks.kind[listed].any() and (self.mixed or not blocks.kind[ids].any()), "kinds of blocks"
        assert self.touched == blocks.touch[ids].max(initial=0), "the last step that may touch a block"
        assert (self.usage <= self._tenants.ceiling).all(), "a tenant is above its ceiling"

    def _check_kinds(self) -> None:
        self._check_checkpoints()
        self._check_windows()
        region = np.arange(self.base, self.base + self.count)
        indexed = region[self.blocks.indexed[region] & (self.blocks.kind[region] != KV)]
        keyed = np.flatnonzero(self._window_keys != NO_KEY).tolist()
        assert set(indexed.tolist()) == {*self._checkpoint_of, *keyed}, "indexed blocks of other kinds"

    def _check_windows(self) -> None:
        blocks = [block for each in self.windows.values() for block in each]
        keyed = np.flatnonzero(self._window_keys != NO_KEY).tolist()
        assert len(set(blocks)) == len(blocks) and set(blocks) == set(keyed), "window blocks of entries"
        assert all(self._window_keys[block] == key for key, each in self.windows.items() for block in each)
        assert all(map(self.index.alive, self.windows)), "window blocks outlive the entry that they hang on"
        ids = np.array(blocks, np.int64)
        assert (self.blocks.kind[ids] == WINDOW).all() and self.blocks.indexed[ids].all(), "window blocks of an entry"
        for each in self.windows.values():
            assert len(set(self.blocks.state[list(each)].tolist())) == 1, "a part of an entry's window blocks is held"

    def _check_checkpoints(self) -> None:
        blocks = [block for each in self.checkpoints.values() for block in each]
        assert len(set(blocks)) == len(blocks) and self._checkpoint_of.keys() == set(blocks), "blocks of checkpoints"
        assert all(self._checkpoint_of[block] == key for key, each in self.checkpoints.items() for block in each)
        assert all(map(self.index.alive, self.checkpoints)), "a checkpoint outlives the entry that it hangs on"
        ids = np.array(blocks, np.int64)
        assert (self.blocks.kind[ids] == CHECKPOINT).all() and self.blocks.indexed[ids].all(), "a checkpoint's blocks"
        for each in self.checkpoints.values():
            assert len(set(self.blocks.state[list(each)].tolist())) == 1, "a part of a checkpoint is held"


def short_of(error: CapacityExceeded) -> int:
    """Return how many blocks were missing."""
    available = error.ceiling if isinstance(error, QuotaExceeded) else error.available
    return int(error.needed) - int(available)
