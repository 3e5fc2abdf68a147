"""The KV cache manager, which owns the block pools, the prefix caches and the sequences."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import BlockNotFound, CapacityExceeded
from kvforge.protocol.messages import GENERATED, ModelInfo, WorkerReady

from ..clock import Clock
from ..limits import Limits, microseconds
from ..waits import Waits
from .block_pool import BlockPool
from .block_tables import BlockTables
from .blocks import Blocks
from .changes import IndexChanges
from .checkpoints import Checkpoints
from .continuing import Continuing
from .disk_copies import DiskCopies
from .disk_costs import DiskCosts
from .disk_tier import DiskTier
from .eviction import Eviction
from .groups import Group
from .hashing import BlockHasher
from .host_copies import HostCopies
from .host_tiers import HostTiers
from .host_writeback import HostWriteback
from .idle_tracker import IdleTracker
from .indexing import Indexing
from .kept import KeptSequences
from .pins import Pins
from .planner import Planner
from .prefix_cache import PrefixCache, PrefixStore
from .prefix_pins import PrefixPins
from .residency import Residency
from .sequences import Sequences, Slots
from .tenants import Tenants
from .windows import Windows
from .wipes import Wipes
from .zeroing import Zeroing

VOCABULARY_UNKNOWN = GENERATED


class KVCacheManager:
    """The KV cache, composed of its parts.

    Attributes:
        groups: Groups by number. Each has a `BlockPool` and the `PrefixCache` of its blocks.
        sequences: The sequences, resident or not.
        checkpoints: Takes checkpoints of recurrent states.
        windows: Places the window blocks of sequences.
        planner: Plans how a sequence is placed in a group.
        idle: Knows when idle sequences are expected back.
        residency: Places sequences in groups, and evicts idle ones.
        tables: Grows the block tables of resident sequences.
        pins: Blocks that clients hold.
        indexing: Indexes full blocks for prefix hits.
        continuing: Finds what a prompt shares with a kept sequence.
        wipes: Names the owners of entries of the lower tiers, and remembers which were wiped.
        host_tiers: The books of the host files of workers.
        kept: The sequences that ended requests left to the next turn.
        prefix_pins: The beginnings of prompts that requests pinned.
        model: The model that the workers serve; None before the first worker is ready.
        vocab_size: Its vocabulary size, or VOCABULARY_UNKNOWN.
        largest_pool: Blocks of the largest pool so far, including those of absent workers, which may return.
        state_blocks: Blocks of a sequence's recurrent state in that pool.
        window: Tokens that layers with a sliding window see there.
        window_pages: Blocks with the KV of these layers for one block of tokens.
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
        self.groups: dict[int, Group] = {}
        self.windows = Windows(self.sequences, self.blocks, self.groups, limits.schedule.step_tokens_max)
        self.eviction = Eviction(limits.cache.policy, self.blocks, self.sequences, self.windows)
        self.store = PrefixStore(bounds.blocks_max, block_size)
        self.hasher = BlockHasher(block_size, hash_key, bounds.blocks_per_sequence_max)
        self.wipes = Wipes(self.tenants, self.hasher)
        window, ancestors_max = limits.cache.host_learn_blocks, bounds.blocks_per_sequence_max
        self.host_tiers = HostTiers(bounds.pools_max, ancestors_max, self.tenants, self.wipes, window)
        self.indexing = Indexing(self.sequences, self.hasher, self.windows)
        self._epochs = 0
        self.model: ModelInfo | None = None
        self.vocab_size = VOCABULARY_UNKNOWN
        self.largest_pool = self.state_blocks = self.window = self.window_pages = 0
        self.past_steps_total = 0  # steps of workers that are gone
        placed = (self.sequences, self.blocks, self.groups)
        self.checkpoints = Checkpoints(limits, self.sequences, self.blocks, self.indexing, self.hasher)
        self.planner = Planner(limits, self.sequences, self.blocks, self.checkpoints, self.windows)
        self.idle = IdleTracker(clock, self.sequences, self.groups)
        self.residency = Residency(
            clock, *placed, self.indexing, self.eviction, self.waits, self.checkpoints, self.windows, self.idle
        )
        self.tables = BlockTables(*placed, self.tenants, self.residency, self.windows)
        self.continuing = Continuing(self.sequences, self.blocks, self.indexing, self.tenants, self.planner)
        self.kept = KeptSequences(bounds, self.sequences, self.groups, self.residency, self.tenants)
        parts = (self.sequences, self.groups, self.residency, self.kept, self.tenants, self.idle)
        self.prefix_pins = PrefixPins(clock, bounds, *parts)

    # -------------------------------------------------------------------------------------------------------- groups

    def add_group(self, worker: int, name: str, ready: WorkerReady, ranks: int = 1) -> Group:
        """Create a group with a pool of as many blocks as the worker has.

        Args:
            worker: The worker's number.
            name: Its name.
            ready: Its announcement; of several ranks, the joint one.
            ranks: The number of its ranks.

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
        parts, mixed = (
            (self.clock, self.blocks, self.tenants, self.waits, index),
            ready.state_blocks + ready.window_pages > 0,
        )
        pool = BlockPool(*parts, self._epochs, base, blocks, zeroing, mixed)
        group = Group(number, worker, name, self._epochs, pool, ready)
        self.groups[number] = group
        if ready.host_blocks:
            tier = self.host_tiers.attach(ready.host_identity, ready.host_blocks, group.epoch, ready.host_new)
            sight = -(-group.window // self.blocks.block_size)
            group.host = pool.eviction.host = HostCopies(tier, index, self.blocks, base, blocks, sight)
            group.host.compute_costs = group.costs
            pool.writeback = HostWriteback(group.host, self.limits.cache.host_writeback_blocks)
            if ready.disk_blocks:
                group.host.disk = self.disk_copies(ready.disk_blocks, group.host, ranks)
        if self.store.changed is not None:
            self.store.changed.pool(number, base, blocks)
        self.waits.wake_all()
        longest = self.windows.longest(self, self.largest_pool - self.state_blocks)
        if self.windows.longest(ready, blocks - ready.state_blocks) > longest:
            self.largest_pool, self.state_blocks = blocks, ready.state_blocks
            self.window, self.window_pages = ready.window, ready.window_pages
        self.model, self.vocab_size = ready.model, ready.model.vocab_size
        self.indexing.kinds |= ready.wants_kinds  # one index serves all workers, so kinds then differ for all
        self.blocks.changed.append(np.arange(base, base + blocks))
        return group

    def disk_copies(self, blocks: int, host: HostCopies, ranks: int = 1) -> DiskCopies:
        """Return the copies of a new disk tier of so many blocks, beside a host tier, for a worker of so many ranks."""
        tier = DiskTier(
            blocks, 4 * blocks + self.limits.bounds.blocks_per_sequence_max, self.tenants.disk_shares, self.wipes
        )
        host.tier.yields.remember(blocks)
        wait_us = microseconds(self.limits.schedule.disk_wait_s)
        costs = DiskCosts(self.clock, host.read_costs, host.compute_costs, wait_us)
        return DiskCopies(tier, host.tier, self.blocks.block_size, costs, ranks)

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
        blocks.state[ids] = blocks.kind[ids] = blocks.owner[ids] = blocks.touch[ids] = 0
        blocks.indexed[ids] = False
        if self.store.changed is not None:
            self.store.changed.pool(group.number, pool.base, pool.count, gone=True)
        blocks.changed.append(np.arange(pool.base, pool.base + pool.count))
        self.residency.forget_kv(slots)
        for slot in slots[(s.idle_since_us[slots] > 0) | s.pinned[slots] | s.returned[slots]].tolist():
            self.idle.moved_down(slot, group)
        if group.host is not None:
            group.host.lost()
        s.step_done(group.number, np.iinfo(np.int64).max)
        s.read_step[s.read_pool == group.number] = 0
        self.past_steps_total += group.steps_total
        del self.groups[group.number]
        self.waits.wake_all()
        return slots

    def record_changes(self) -> IndexChanges:
        """Start recording changes of the prefix indexes, beginning with their present content."""
        changed = self.store.changed = IndexChanges(self.blocks.refcount.size)
        for group in self.groups.values():
            changed.pool(group.number, group.pool.base, group.pool.count)
            group.index.note_all(changed)
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
            if group.disk is not None:
                group.disk.tier.forget_tenant(idle)
        for tier in self.host_tiers.tiers.values():
            tier.forget_tenant(idle)
        self.idle.times.forget_tenant(idle)
        return self.tenants.intern(name, idle)

    def _idle_tenant(self, keep: int) -> int | None:
        """Return a replaceable tenant: no sequences, live requests or pins, and charged only for cached blocks."""
        s, tenants = self.sequences, self.tenants
        busy = {keep, *np.unique(s.tenant[s.id != 0]).tolist(), *np.flatnonzero(tenants.requests).tolist()}
        busy |= self.pins.tenants()
        known = range(1, len(tenants.names))
        busy |= {t for t in known for group in self.groups.values() if group.pool.held_by(t)}
        return tenants.first_but(busy)
