"""Blocks: their states, reference counts and generations; and the pools that hand them out.

A block is in exactly one state:

    FREE         in its pool's free list, content meaningless
    REFERENCED   its count, the number of holders, is above zero
    QUARANTINED  nobody holds it, but a step that was sent may still touch it
    CACHED       nobody holds it, its content is indexed by prefix and may be used again or evicted

Reference counts are the number of holders: sequences whose table names the block, plus named external holders.
A generation is bumped whenever a block's content is given up, so an old name for it can be told from a new one.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded

from ..clock import Clock
from ..waits import Waits, blocks_of
from .tenants import Tenants

FREE, REFERENCED, QUARANTINED, CACHED = range(4)
STATE_NAMES = ("free", "referenced", "quarantined", "cached")

BlockIds = npt.NDArray[np.int64]


class Blocks:
    """Struct-of-arrays over every block of every pool, indexed by global block id.

    holds: grows with every new holder of a block that had one.
    """

    def __init__(self, blocks_max: int, block_size: int, first_generation: int = 0) -> None:
        self.block_size = block_size
        self.refcount = np.zeros(blocks_max, np.int32)
        self.generation = np.full(blocks_max, first_generation, np.int32)
        self.owner = np.zeros(blocks_max, np.int32)
        self.state = np.zeros(blocks_max, np.int8)
        self.indexed = np.zeros(blocks_max, np.bool_)
        self.touch = np.zeros(blocks_max, np.int64)
        self.since_us = np.zeros(blocks_max, np.int64)
        self.external: dict[int, dict[str, int]] = {}
        self.changed: list[BlockIds] = []
        self.holds = 0


class Spare(NamedTuple):
    """Blocks to be left over: pool, for all that run there; own, within the tenant's ceiling."""

    pool: int = 0
    own: int = 0


NO_SPARE = Spare()


class Supply:
    """How many blocks each tenant could get: a trial copy that can be asked "and if this were released?"."""

    def __init__(self, tenants: Tenants, free: int, cached: dict[int, int], usage: npt.NDArray[np.int64]) -> None:
        self._tenants, self._free, self._cached, self._usage = tenants, free, cached, usage

    def room(self, tenant: int) -> int:
        """Blocks until the tenant's ceiling, its own cached blocks evicted."""
        return int(self._tenants.ceiling[tenant] - self._usage[tenant]) + self._cached.get(tenant, 0)

    def available(self, tenant: int) -> int:
        """Blocks that the tenant could get: within its ceiling, leaving every other tenant its floor."""
        return max(0, min(self.room(tenant), self.stock(tenant)))

    def has(self, tenant: int, count: int, spare: Spare) -> bool:
        """Whether the tenant could get so many, with some left over."""
        return self.room(tenant) >= count + spare.own and self.stock(tenant) >= count + spare.pool

    def stock(self, tenant: int) -> int:
        """Blocks that the tenant could get if it had no ceiling."""
        floor, usage = self._tenants.floor, self._usage
        missing = np.maximum(floor - usage, 0)
        supply = self._free + self._cached.get(tenant, 0) - int(missing.sum() - missing[tenant])
        for other, count in self._cached.items():
            if other != tenant:
                supply += min(count, max(0, int(usage[other] - floor[other])))
        return supply

    def give_up(self, owner: int) -> None:
        """One held block of `owner` is charged to somebody else."""
        self._usage[owner] -= 1

    def gain(self, owner: int, indexed: bool) -> None:
        """One more block of `owner` loses its last holder: it is cached if indexed, else freed."""
        if indexed:
            self._cached[owner] = self._cached.get(owner, 0) + 1
        else:
            self._free += 1
            self._usage[owner] -= 1

    def gain_each(self, owners: npt.NDArray[np.int32], indexed: npt.NDArray[np.bool_]) -> None:
        """`gain` for each of [n] blocks."""
        for owner, count in zip(*np.unique(owners[indexed], return_counts=True), strict=True):
            self._cached[int(owner)] = self._cached.get(int(owner), 0) + int(count)
        freed = owners[~indexed]
        self._free += freed.size
        self._usage -= np.bincount(freed, minlength=self._usage.size)


class Pool:
    """One worker's blocks: [base, base + count). All ids are global.

    epoch: of the group, by which those who wait for its blocks are woken. on_evict: called with a block whose entry in
    the prefix index goes.
    """

    def __init__(
        self, clock: Clock, blocks: Blocks, tenants: Tenants, waits: Waits, epoch: int, base: int, count: int
    ) -> None:
        self._clock, self.blocks, self.waits = clock, blocks, waits
        self._gain = blocks_of(epoch)
        self.base, self.count = base, count
        self._tenants = tenants
        self._stack = np.arange(base + count - 1, base - 1, -1, dtype=np.int64)
        self.free = count
        self.quarantined = 0
        self.cached = 0
        self._lru: dict[int, OrderedDict[int, int]] = {}
        self._stamp = 0
        self._quarantine: deque[BlockIds] = deque()
        self.usage = np.zeros(tenants.floor.size, np.int64)
        self._usage_since_us = np.zeros(tenants.floor.size, np.int64)
        self._usage_block_us = np.zeros(tenants.floor.size, np.int64)
        self.done_step = 0
        self.referenced_peak = 0
        self.allocated_total = 0
        self.freed_total = 0
        self.evicted_total = 0
        self._awaited: deque[int] = deque()
        self.on_evict: Callable[[int], None] = _nothing
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
        """Blocks that `tenant` could get now, evicting cached blocks where that is allowed.

        keep: blocks that must not be evicted for it.
        """
        if self._tenants.has_quotas:
            return self.supply(keep).available(tenant)
        kept = 0 if keep is None else int(np.count_nonzero(self.blocks.state[keep] == CACHED))
        return self.free + self.cached - kept

    def has(self, tenant: int, count: int, keep: BlockIds, spare: Spare) -> bool:
        """Whether `tenant` could get so many now, as `available`, with some left over."""
        if self._tenants.has_quotas:
            return self.supply(keep).has(tenant, count, spare)
        return self.available(tenant, keep) >= count + spare.pool

    def supply(self, keep: BlockIds | None = None) -> Supply:
        """What there is to give, by tenant, as if the blocks in `keep` were held."""
        cached = {tenant: len(entries) for tenant, entries in self._lru.items()}
        if keep is not None:
            for block in keep[self.blocks.state[keep] == CACHED].tolist():
                cached[int(self.blocks.owner[block])] -= 1
        return Supply(self._tenants, self.free, cached, self.usage.copy())

    def allocate(self, tenant: int, count: int) -> BlockIds:
        """`count` blocks with one holder each: all or nothing. Evicts cached blocks, least recently used first.

        Returns [count] int64. Raises QuotaExceeded or CapacityExceeded, and then nothing was changed.
        """
        if count > self.available(tenant):
            raise self.shortage(tenant, count, self.supply())
        self.make_room_within_ceiling(tenant, count)
        for _ in range(count + self._reserved_for_others(tenant) - self.free):
            self._evict_one(self._lru_tenant(tenant))
        self.free -= count
        ids = self._stack[self.free : self.free + count][::-1].copy()
        blocks = self.blocks
        blocks.refcount[ids] = 1
        blocks.state[ids] = REFERENCED
        blocks.owner[ids] = tenant
        blocks.since_us[ids] = self._clock.now_us
        self._charge(tenant, count)
        self.allocated_total += count
        self.referenced_peak = max(self.referenced_peak, self.referenced)
        blocks.changed.append(ids)
        return ids

    def make_room_within_ceiling(self, tenant: int, count: int) -> None:
        """A tenant at its ceiling makes room for `count` blocks with its own cached ones, of which there are enough."""
        if self._tenants.has_quotas:
            for _ in range(int(self.usage[tenant] - self._tenants.ceiling[tenant]) + count):
                self._evict_one(tenant)

    def shortage(self, tenant: int, count: int, supply: Supply, spare: Spare = NO_SPARE) -> CapacityExceeded:
        """The error that says why `tenant` cannot have `count` blocks although all of `supply` was at hand."""
        ceiling, room = int(self._tenants.ceiling[tenant]), supply.room(tenant)
        if count + spare.own > room:
            return QuotaExceeded(self._tenants.names[tenant], ceiling - room + count + spare.own, ceiling)
        hint = "remove sequences or wait for requests to end"
        return CapacityExceeded("blocks", count + spare.pool, max(0, supply.stock(tenant)), hint)

    def _reserved_for_others(self, tenant: int) -> int:
        if not self._tenants.has_quotas:
            return 0
        missing = np.maximum(self._tenants.floor - self.usage, 0)
        return int(missing.sum() - missing[tenant])

    def _lru_tenant(self, asking: int) -> int:
        """Whose cached block is the oldest one that `asking` may evict."""
        best, best_stamp = 0, -1
        for tenant, entries in self._lru.items():
            if not entries or (tenant != asking and self.usage[tenant] <= self._tenants.floor[tenant]):
                continue
            stamp = next(iter(entries.values()))
            if best == 0 or stamp < best_stamp:
                best, best_stamp = tenant, stamp
        return best

    def _evict_one(self, tenant: int) -> None:
        block, _ = self._lru[tenant].popitem(last=False)
        self.cached -= 1
        self.evicted_total += 1
        self.on_evict(block)
        self._to_free(np.array([block], np.int64))

    def _charge(self, tenant: int, count: int) -> None:
        self._usage_block_us[tenant] += self.usage[tenant] * (self._clock.now_us - self._usage_since_us[tenant])
        self._usage_since_us[tenant] = self._clock.now_us
        self.usage[tenant] += count

    def block_us_each(self) -> npt.NDArray[np.int64]:
        """Blocks x microseconds that each tenant has occupied so far: [tenants] int64."""
        each: npt.NDArray[np.int64] = self._usage_block_us + self.usage * (self._clock.now_us - self._usage_since_us)
        return each

    def block_us(self, tenant: int) -> int:
        """The same of one tenant."""
        return int(
            self._usage_block_us[tenant] + self.usage[tenant] * (self._clock.now_us - self._usage_since_us[tenant])
        )

    def held_by(self, tenant: int) -> int:
        """Blocks charged to the tenant that are not merely cached."""
        return int(self.usage[tenant]) - len(self._lru.get(tenant, ()))

    def forget_tenant(self, tenant: int) -> None:
        """The tenant's number will be another's: what is cached for it goes, and what it occupied."""
        while self._lru.get(tenant):
            self._evict_one(tenant)
        assert not self.usage[tenant], "a tenant that holds blocks was forgotten"
        self._usage_block_us[tenant] = 0

    def recharge(self, block: int, tenant: int) -> None:
        """From now on the block, which somebody holds, is charged to `tenant`."""
        owner = int(self.blocks.owner[block])
        assert self.blocks.state[block] == REFERENCED
        if owner != tenant:
            self._charge(owner, -1)
            self._charge(tenant, 1)
            self.blocks.owner[block] = tenant
            self.waits.wake(self._gain)  # the one it was charged to has room for another
            self.blocks.changed.append(np.array([block], np.int64))

    # ---------------------------------------------------------------------------------------------------- holders

    def hold(self, ids: BlockIds) -> None:
        """Adds one holder to each block: [n] distinct ids, none of them free. Revives cached and quarantined ones."""
        blocks = self.blocks
        states = blocks.state[ids]
        assert not (states == FREE).any(), "a free block cannot be held"
        blocks.holds += 1
        cached = ids[states == CACHED]
        for block, owner in zip(cached.tolist(), blocks.owner[cached].tolist(), strict=True):
            del self._lru[owner][block]
        self.cached -= cached.size
        self.quarantined -= int(np.count_nonzero(states == QUARANTINED))
        blocks.refcount[ids] += 1
        blocks.state[ids] = REFERENCED
        self.referenced_peak = max(self.referenced_peak, self.referenced)
        blocks.changed.append(ids)

    def release(self, ids: BlockIds, last_step: int) -> int:
        """Takes one holder from each block: [n] distinct ids. Returns how many nobody holds any more.

        Those are quarantined while a step up to `last_step` may still touch them, else cached or freed. Table order
        is expected: the tail of a sequence is evicted before its head.
        """
        blocks = self.blocks
        counts = blocks.refcount[ids] - 1
        assert not ids.size or counts.min() >= 0, "a block without holders was released"
        blocks.refcount[ids] = counts
        if last_step > self.done_step:
            blocks.touch[ids] = np.maximum(blocks.touch[ids], last_step)
        dead = ids[counts == 0] if counts.any() else ids
        if dead.size:
            waiting = blocks.touch[dead] > self.done_step
            if waiting.any():
                held_back = dead[waiting]
                blocks.state[held_back] = QUARANTINED
                self.quarantined += held_back.size
                self._quarantine.append(held_back)
                self._cache_or_free(dead[~waiting])
            else:
                self._cache_or_free(dead)
        blocks.changed.append(ids)
        return int(dead.size)

    def step_done(self, step: int) -> None:
        """Every step up to `step` is over: what only they could touch leaves quarantine."""
        self.done_step = max(self.done_step, step)
        if self._awaited and self._awaited[0] <= self.done_step:
            while self._awaited and self._awaited[0] <= self.done_step:
                self._awaited.popleft()
            self.waits.wake(self._gain)
        for _ in range(len(self._quarantine)):
            ids = self._quarantine.popleft()
            ids = ids[self.blocks.state[ids] == QUARANTINED]
            over = self.blocks.touch[ids] <= self.done_step
            if over.any():
                self.quarantined -= int(np.count_nonzero(over))
                self._cache_or_free(ids[over])
            if not over.all():
                self._quarantine.append(ids[~over])

    def await_step(self, step: int) -> None:
        """Something that waits can go on when this step is over: an idle sequence may be evicted, a row reused."""
        if step > self.done_step and not (self._awaited and self._awaited[-1] == step):
            insort(self._awaited, step)

    @property
    def awaits_step(self) -> bool:
        """Whether anything waits for a step to be over."""
        return self.quarantined > 0 or bool(self._awaited)

    def _cache_or_free(self, ids: BlockIds) -> None:
        if not ids.size:
            return
        indexed = self.blocks.indexed[ids]
        if indexed.any():
            kept = ids[indexed]
            self.blocks.state[kept] = CACHED
            self.cached += kept.size
            last = kept[::-1]
            for block, owner in zip(last.tolist(), self.blocks.owner[last].tolist(), strict=True):
                self._stamp += 1
                self._lru.setdefault(owner, OrderedDict())[block] = self._stamp
            ids = ids[~indexed]
        self._to_free(ids)
        self.waits.wake(self._gain)

    def _to_free(self, ids: BlockIds) -> None:
        if not ids.size:
            return
        blocks = self.blocks
        blocks.generation[ids] += 1
        blocks.state[ids] = FREE
        owners = blocks.owner[ids]
        if (owners == owners[0]).all():
            self._charge(int(owners[0]), -ids.size)
        else:
            for tenant in sorted(set(owners.tolist())):
                self._charge(tenant, -int(np.count_nonzero(owners == tenant)))
        blocks.owner[ids] = 0
        self._stack[self.free : self.free + ids.size] = ids[::-1]
        self.free += ids.size
        self.freed_total += ids.size
        blocks.changed.append(ids)

    def drop_cached(self, block: int) -> None:
        """A block lost its place in the prefix index: if only the index kept it, it becomes free."""
        if self.blocks.state[block] == CACHED:
            del self._lru[int(self.blocks.owner[block])][block]
            self.cached -= 1
            self._to_free(np.array([block], np.int64))

    # ------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """Free + cached + referenced + quarantined = total, and every list agrees with every state."""
        blocks, ids = self.blocks, np.arange(self.base, self.base + self.count)
        states, counts = blocks.state[ids], blocks.refcount[ids]
        assert (counts >= 0).all(), "a reference count is below zero"
        listed = self._stack[: self.free]
        assert np.unique(listed).size == self.free, "a block is twice in the free list"
        assert (blocks.state[listed] == FREE).all() and self.free == np.count_nonzero(states == FREE), "free list"
        assert not blocks.indexed[listed].any(), "a free block is indexed"
        assert ((counts > 0) == (states == REFERENCED)).all(), "a count disagrees with its block's state"
        assert self.cached == np.count_nonzero(states == CACHED) == sum(map(len, self._lru.values())), "cached"
        assert self.quarantined == np.count_nonzero(states == QUARANTINED), "quarantined"
        for tenant, entries in self._lru.items():
            assert all(blocks.state[b] == CACHED and blocks.owner[b] == tenant for b in entries), "LRU list"
            assert all(blocks.indexed[b] for b in entries), "a cached block is not indexed"
        waiting = np.unique(np.concatenate([*self._quarantine, np.zeros(0, np.int64)]))
        held_back = ids[states == QUARANTINED]
        assert np.isin(held_back, waiting).all(), "a quarantined block would never be settled"
        assert (blocks.touch[held_back] > self.done_step).all(), "a block overstays its quarantine"
        owners = np.bincount(blocks.owner[ids][states != FREE], minlength=self.usage.size)
        assert (owners == self.usage).all(), "a tenant's usage disagrees with its blocks"
        assert not blocks.owner[listed].any(), "a free block is charged to a tenant"
        assert (self.usage <= self._tenants.ceiling).all(), "a tenant is above its ceiling"


def short_of(error: CapacityExceeded) -> int:
    """How many blocks more it would have taken."""
    available = error.ceiling if isinstance(error, QuotaExceeded) else error.available
    return int(error.needed) - int(available)


def _nothing(_block: int) -> None:
    return None
