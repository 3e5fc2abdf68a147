"""Placement of sequences: groups, how sequences get blocks in a group, and how they give them back.

Every method keeps these rules:

- Allocation is all or nothing, and a method that raises has changed nothing.
- Blocks leave a table through `BlockPool.release`, with the last step that may touch them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import BlockNotFound, CapacityExceeded
from kvforge.protocol.messages import GENERATED, ModelInfo, WorkerReady

from ..clock import Clock
from ..limits import Limits
from ..waits import Waits, eviction_of
from .block_pool import BlockPool
from .blocks import NO_BLOCKS, BlockIds, Blocks
from .changes import IndexChanges
from .eviction import Eviction
from .groups import Group
from .hashing import BlockHasher, Hashes
from .indexing import Indexing
from .pins import Pins
from .placement import Placement
from .prefix_cache import PrefixCache, PrefixStore, root_key
from .sequences import NO_POOL, Sequences, Slots
from .supply import NO_SPARE, Spare
from .tenants import Tenants
from .zeroing import Zeroing

Tokens = npt.NDArray[np.int32]
VOCABULARY_UNKNOWN = GENERATED


class Residents:
    """The pools, prefix indexes and sequences.

    Attributes:
        model: The model that the workers serve; None before the first worker is ready.
        vocab_size: Its vocabulary size, or VOCABULARY_UNKNOWN.
        largest_pool: Blocks of the largest pool so far, including those of absent workers, which may return.
    """

    def __init__(
        self, clock: Clock, limits: Limits, hash_key: bytes, first_id: int = 0, first_generation: int = 0
    ) -> None:
        self.clock, self.limits = clock, limits
        bounds, block_size = limits.bounds, limits.cache.block_size
        self.tenants = Tenants(limits)
        self.blocks = Blocks(bounds.blocks_max, block_size, first_generation)
        self.waits = Waits()
        self.sequences = Sequences(clock, limits, self.waits, first_id)
        self.pins = Pins(clock, self.blocks, self.tenants, bounds.holders_per_block_max)
        self.eviction = Eviction(limits.cache.policy, self.blocks, self.sequences)
        self.groups: dict[int, Group] = {}
        self.store = PrefixStore(bounds.blocks_max, block_size)
        self.hasher = BlockHasher(block_size, hash_key, bounds.blocks_per_sequence_max)
        self.indexing = Indexing(self.sequences, self.hasher)
        self._epochs = 0
        self.model: ModelInfo | None = None
        self.vocab_size = VOCABULARY_UNKNOWN
        self.largest_pool = 0
        self.past_steps_total = 0  # steps of workers that are gone
        self.evicted_sequences_total = 0

    # -------------------------------------------------------------------------------------------------------- groups

    def add_group(self, worker: int, name: str, ready: WorkerReady) -> Group:
        """Create a group with a pool of as many blocks as the worker has.

        Raises:
            CapacityExceeded: There are too many pools or blocks.
        """
        bounds, blocks = self.limits.bounds, ready.blocks
        number = next((n for n in range(bounds.pools_max) if n not in self.groups), None)
        if number is None:
            raise CapacityExceeded("pools", 1, 0, "raise limits.pools_max")
        base = 0
        for group in sorted(self.groups.values(), key=lambda g: g.pool.base):
            if group.pool.base - base >= blocks:
                break
            base = group.pool.base + group.pool.count
        if base + blocks > bounds.blocks_max:
            raise CapacityExceeded("blocks_max", base + blocks, bounds.blocks_max, "raise limits.blocks_max")
        self._epochs += 1
        index = PrefixCache(self.store, self.blocks, self.waits, self.hasher)
        zeroing = Zeroing(base, blocks) if self.limits.cache.zero_on_tenant_change else None
        pool = BlockPool(self.clock, self.blocks, self.tenants, self.waits, index, self._epochs, base, blocks, zeroing)
        group = Group(number, worker, name, self._epochs, pool, ready)
        self.groups[number] = group
        if self.store.changed is not None:
            self.store.changed.pool(number, base, blocks)
        self.waits.wake_all()
        self.largest_pool = max(self.largest_pool, blocks)
        self.model, self.vocab_size = ready.model, ready.model.vocab_size
        self.indexing.kinds |= ready.wants_kinds  # one index serves all workers, so kinds then differ for all
        self.blocks.changed.append(np.arange(base, base + blocks))
        return group

    def drop_group(self, group: Group) -> Slots:
        """Drop the group of a dead worker, with its KV. Its sequences keep their tokens.

        The whole pool is reset at once, which makes it unreachable for lookups.

        Returns:
            The slots of its sequences, [n].
        """
        s, pool, blocks = self.sequences, group.pool, self.blocks
        slots = np.flatnonzero(s.pool == group.number)
        ids = slice(pool.base, pool.base + pool.count)
        self.pins.forget_pool(pool.base, pool.count)
        self.tenants.past_byte_seconds += pool.block_us_each() * (group.bytes_per_block / 1e6)
        blocks.refcount[ids] = 0
        blocks.generation[ids] += 1
        blocks.state[ids] = blocks.owner[ids] = blocks.touch[ids] = 0
        blocks.indexed[ids] = False
        if self.store.changed is not None:
            self.store.changed.pool(group.number, pool.base, pool.count, gone=True)
        blocks.changed.append(np.arange(pool.base, pool.base + pool.count))
        self._forget_kv(slots)
        s.step_done(group.number, np.iinfo(np.int64).max)
        s.read_step[s.read_pool == group.number] = 0
        self.past_steps_total += group.steps_total
        del self.groups[group.number]
        self.waits.wake_all()
        return slots

    def tell_changes(self) -> IndexChanges:
        """Start recording changes of the prefix indexes, beginning with their present content."""
        changed = self.store.changed = IndexChanges(self.blocks.refcount.size)
        for group in self.groups.values():
            changed.pool(group.number, group.pool.base, group.pool.count)
            group.index.tell_all(changed)
        return changed

    def group_of_block(self, block_id: int) -> Group:
        """Return the group of a block.

        Raises:
            BlockNotFound: No pool has this block.
        """
        for group in self.groups.values():
            if group.pool.base <= block_id < group.pool.base + group.pool.count:
                return group
        raise BlockNotFound(block_id)

    def step_done(self, group: Group, step_id: int) -> None:
        """Record that every step of the group up to `step_id` has ended."""
        group.pool.step_done(step_id)
        self.sequences.step_done(group.number, step_id)

    # ------------------------------------------------------------------------------------------------------- tenants

    def check_tenant(self, name: str, keep: int = 0) -> None:
        """Check that `intern` would succeed, without changes.

        Raises:
            InvalidRequest: The name is invalid.
            CapacityExceeded: The table is full and every tenant is in use.
        """
        self.tenants.check(name)
        if not self.tenants.has_place_for(name) and self._idle_tenant(keep) is None:
            raise CapacityExceeded("tenants", 1, 0, "raise limits.tenants_max")

    def intern(self, name: str, keep: int = 0) -> int:
        """Return the tenant's index, adding the name if it is new.

        If the table is full, a new name replaces an idle tenant other than `keep`.
        """
        self.check_tenant(name, keep)
        if self.tenants.has_place_for(name):
            return self.tenants.intern(name)
        idle = self._idle_tenant(keep)
        assert idle is not None
        for group in self.groups.values():
            group.pool.forget_tenant(idle)
        return self.tenants.intern(name, idle)

    def _idle_tenant(self, keep: int) -> int | None:
        """Return a replaceable tenant: no sequences, live requests or pins, and charged only for cached blocks."""
        s, tenants = self.sequences, self.tenants
        busy = {keep, *np.unique(s.tenant[s.id != 0]).tolist(), *np.flatnonzero(tenants.requests).tolist()}
        busy |= self.pins.tenants()
        known = range(1, len(tenants.names))
        busy |= {t for t in known for group in self.groups.values() if group.pool.held_by(t)}
        return tenants.first_but(busy)

    # ----------------------------------------------------------------------------------------------------- placement

    def plan_placement(self, group: Group, salt: int, tokens: Tokens, hashes: Hashes) -> Placement:
        """Plan a placement for `tokens` in the group, without changes."""
        size, partial_tokens_min = self.blocks.block_size, self.limits.cache.partial_tokens_min
        hits = group.index.match(salt, tokens, hashes)
        partial = (-1, 0)
        rest = tokens[hits.size * size : tokens.size - 1]
        if rest.size >= partial_tokens_min:
            parent = group.index.key(int(hits[-1])) if hits.size else root_key(salt)
            block, common = group.index.match_partial(parent, rest)
            if common >= partial_tokens_min:
                partial = (block, common)
        return Placement(group, hits, partial, self.sequences.blocks_for(tokens.size) - hits.size)

    def plan_fork(self, group: Group, slot: int, tokens: int) -> Placement:
        """Plan a placement for a sequence that shares the first `tokens` tokens of `slot`, which all have KV there."""
        s, size = self.sequences, self.blocks.block_size
        full, rest = divmod(tokens - 1, size)
        partial = (int(s.table[slot, full]), rest) if rest else (-1, 0)
        return Placement(group, s.blocks_of(slot)[:full], partial, s.blocks_for(tokens) - full)

    def with_room(self, placement: Placement, tenant: int, spare: Spare, asking: Slots) -> Placement:
        """Return the placement if there is room for it, or else the placement without its partial copy.

        The source of a partial copy must stay, which takes a further block.

        Args:
            placement: The placement to check.
            tenant: The tenant that pays for the blocks.
            spare: Blocks that must remain.
            asking: Slots that must not be evicted.

        Raises:
            CapacityExceeded: There is room for neither.
        """
        group, needed = placement.group, placement.needed
        try:
            self.check_room(group, tenant, needed, placement.keep, asking, spare)
        except CapacityExceeded:
            if not placement.partial[1]:
                raise
            placement = Placement(group, placement.hits, (-1, 0), needed)
            self.check_room(group, tenant, needed, placement.keep, asking, spare)
        return placement

    def move_in(self, slot: int, placement: Placement) -> None:
        """Give a non-resident sequence its blocks, evicting idle sequences as needed.

        Raises:
            CapacityExceeded: There is no room.
        """
        s, group = self.sequences, placement.group
        pool, tenant = group.pool, int(s.tenant[slot])
        assert s.pool[slot] == NO_POOL and not self.still_read(slot)
        self.make_room(group, tenant, placement.needed, placement.keep, slot)
        block, common = placement.partial
        group.hold(placement.keep)
        fresh = pool.allocate(tenant, placement.needed)
        if common:
            group.copy_block(block, int(fresh[0]), common)
            pool.release(np.array([block], np.int64), group.next_step)
        table = np.concatenate([placement.hits, fresh])
        s.table[slot, : table.size] = table
        s.used[slot] = table.size
        s.pool[slot] = group.number
        s.resident_us[slot] = self.clock.now_us
        s.computed[slot] = s.scheduled[slot] = placement.cached_tokens(s.block_size)
        self.indexing.shared(group, slot, placement.hits)
        if common:
            s.last_step[slot] = group.next_step
            pool.await_step(group.next_step)  # the copy protects the sequence from eviction until then
        self._row_changed(slot)

    def release_kv(self, slot: int) -> int:
        """Release a sequence's blocks; its tokens stay. Return how many blocks have no holder left."""
        s = self.sequences
        if s.pool[slot] == NO_POOL:
            return 0
        group = self.groups[int(s.pool[slot])]
        if s.computed[slot] // s.block_size > s.hashed[slot]:  # index what it filled, so that it can be reused
            self.indexing.filled_by(group, slot)
        dead = group.release(s.blocks_of(slot), int(s.last_step[slot]))
        if s.request[slot]:
            self.waits.wake(eviction_of(int(s.id[slot])))
        if s.last_step[slot] > group.pool.done_step:
            s.read_pool[slot], s.read_step[slot] = group.number, s.last_step[slot]
        self._forget_kv(np.array([slot]))
        return dead

    def still_read(self, slot: int) -> bool:
        """Return whether a step in flight may read the row of a sequence that lost its blocks."""
        s = self.sequences
        group = self.groups.get(int(s.read_pool[slot]))
        return group is not None and bool(s.read_step[slot] > group.pool.done_step)

    def _forget_kv(self, slots: Slots) -> None:
        s = self.sequences
        s.used[slots] = s.computed[slots] = s.scheduled[slots] = s.pending[slots] = s.last_step[slots] = 0
        s.hashed[slots] = s.parent[slots] = 0
        s.chain[slots] = 0
        s.pool[slots] = NO_POOL
        s.changed_rows.append(slots)

    def remove(self, slot: int) -> int:
        """End a sequence. Return how many of its blocks have no holder left."""
        s = self.sequences
        dead = self.release_kv(slot)
        s.end(slot, int(s.read_pool[slot]), int(s.read_step[slot]) if self.still_read(slot) else 0)
        return dead

    def rewind(self, slot: int) -> None:
        """Discard the KV of the last token, which must be computed again to continue from it."""
        s = self.sequences
        last = int(s.length[slot]) - 1
        if s.computed[slot] > last:
            s.computed[slot] = s.scheduled[slot] = last
            if s.hashed[slot] * s.block_size > last:
                self.indexing.restart(slot)

    def trim(self, slot: int) -> None:
        """Release blocks reserved for tokens that will not come, and discard unacknowledged KV."""
        s = self.sequences
        s.pending[slot] = 0
        s.scheduled[slot] = s.computed[slot]
        keep = s.blocks_for(int(s.length[slot]))
        if s.pool[slot] != NO_POOL and s.used[slot] > keep:
            group = self.groups[int(s.pool[slot])]
            group.release(s.blocks_of(slot)[keep:], int(s.last_step[slot]))
            s.used[slot] = keep
        self._row_changed(slot)

    def fork(self, slot: int) -> int:
        """Create a sequence that shares the tokens and blocks of `slot`. KV is copied when one side writes."""
        s = self.sequences
        child = s.create(int(s.tenant[slot]), int(s.salt[slot]))
        length = int(s.length[slot])
        s.extend(child, s.tokens[slot, :length], s.logprobs[slot, :length])
        if s.pool[slot] != NO_POOL:
            group, used = self.groups[int(s.pool[slot])], s.blocks_for(length)
            ids = s.table[slot, :used].astype(np.int64)
            group.hold(ids)
            s.table[child, :used] = ids
            for array in (s.pool, s.hashed, s.chain, s.parent, s.last_step):
                array[child] = array[slot]
            s.used[child] = used
            s.resident_us[child] = self.clock.now_us
            s.computed[child] = s.scheduled[child] = min(int(s.computed[slot]), length)
        self._row_changed(child)
        return child

    # ------------------------------------------------------------------------------------------------------- pressure

    def check_room(
        self, group: Group, tenant: int, count: int, keep: BlockIds, asking: Slots | int, spare: Spare = NO_SPARE
    ) -> Slots:
        """Choose the idle sequences to evict so that `tenant` can have `count` blocks.

        Args:
            group: The group that must provide the blocks.
            tenant: The tenant that pays for them.
            count: Blocks needed.
            keep: Blocks that must not be evicted.
            asking: Slots that must not be evicted.
            spare: Blocks that must remain.

        Returns:
            Slots, [n]; empty if no eviction is needed.

        Raises:
            CapacityExceeded: Evictions do not suffice.
        """
        pool = group.pool
        if pool.has(tenant, count, keep, spare):
            return NO_BLOCKS
        victims, supply = self.eviction.victims(group, tenant, count, keep, asking, spare)
        if not supply.has(tenant, count, spare):
            raise pool.shortage(tenant, count, supply, spare)
        return victims

    def make_room(self, group: Group, tenant: int, count: int, keep: BlockIds, asking: Slots | int) -> None:
        """Evict whole idle sequences, least recently used first, until `tenant` can have `count` blocks."""
        for slot in self.check_room(group, tenant, count, keep, asking).tolist():
            self.release_kv(slot)
            self.evicted_sequences_total += 1

    def _row_changed(self, slot: int) -> None:
        s = self.sequences
        used = int(s.used[slot])
        s.changed_rows.append(np.array([slot]))
        if used:
            s.changed_cells.append((np.array([slot]), slice(used)))
