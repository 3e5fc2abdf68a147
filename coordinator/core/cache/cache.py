"""The KV cache: sequences over blocks. Every change of a block table happens here.

Rules kept by every method:
  * a table's last block is written only while it has one holder and is not indexed; otherwise it is copied first;
  * allocation is all or nothing, and a method that raises has changed nothing;
  * blocks leave a table through Pool.release, with the last step that may touch them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import BlockNotFound, CapacityExceeded
from kvforge.protocol.messages import ModelInfo

from ..clock import Clock
from ..limits import Limits
from ..waits import Waits, eviction_of
from .eviction import Eviction
from .groups import Group
from .hashing import BlockHasher, Hashes
from .pins import Pins
from .placement import Placement
from .pool import NO_SPARE, BlockIds, Blocks, Pool, Spare
from .prefix import PrefixIndex, PrefixStore, root_key
from .sequences import NO_POOL, Sequences, Slots
from .tenants import Tenants

Tokens = npt.NDArray[np.int32]
VOCABULARY_UNKNOWN = 1 << 31
NO_BLOCKS = np.zeros(0, np.int64)


class Cache:
    """Pools, prefix indexes and sequences under one roof.

    model: what the workers serve, None before the first one is ready; vocab_size: its tokens, or VOCABULARY_UNKNOWN.
    largest_pool: blocks of the largest pool so far; a worker that is away for a while may come back.
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
        self._hasher = BlockHasher(block_size, hash_key, bounds.blocks_per_sequence_max)
        self._epochs = 0
        self.model: ModelInfo | None = None
        self.vocab_size = VOCABULARY_UNKNOWN
        self.largest_pool = 0
        self.past_steps_total = 0  # of workers that are gone
        self.evicted_sequences_total = 0
        self.tenants.on_forget.append(self._forget_tenant)

    # -------------------------------------------------------------------------------------------------------- groups

    def add_group(
        self, worker: int, name: str, blocks: int, model: ModelInfo, bytes_per_block: int, kv_dtype: str, device: str
    ) -> Group:
        """A new pool of `blocks` blocks. Raises CapacityExceeded."""
        bounds = self.limits.bounds
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
        pool = Pool(self.clock, self.blocks, self.tenants, self.waits, self._epochs, base, blocks)
        index = PrefixIndex(self.store, self.blocks, pool, self._hasher)
        group = Group(number, worker, name, self._epochs, pool, index, model, bytes_per_block, kv_dtype, device)
        self.groups[number] = group
        self.waits.wake_all()
        self.largest_pool = max(self.largest_pool, blocks)
        self.model, self.vocab_size = model, model.vocab_size
        self.blocks.changed.append(np.arange(base, base + blocks))
        return group

    def drop_group(self, group: Group) -> Slots:
        """The worker is gone and its KV with it. Its sequences keep their tokens; returns their slots."""
        s, pool, blocks = self.sequences, group.pool, self.blocks
        slots = np.flatnonzero(s.pool == group.number)
        ids = np.arange(pool.base, pool.base + pool.count)
        self.pins.forget_pool(pool.base, pool.count)
        self.tenants.past_byte_seconds += pool.block_us_each() * (group.bytes_per_block / 1e6)
        blocks.refcount[ids] = 0
        blocks.generation[ids] += 1
        blocks.state[ids] = blocks.owner[ids] = blocks.touch[ids] = 0
        blocks.indexed[ids] = False
        blocks.changed.append(ids)
        for slot in slots.tolist():
            self._forget_kv(slot)
        s.step_done(group.number, np.iinfo(np.int64).max)
        s.read_step[s.read_pool == group.number] = 0
        self.past_steps_total += group.steps_total
        del self.groups[group.number]
        self.waits.wake_all()
        return slots

    def tenants_in_use(self) -> set[int]:
        """Tenants that have a sequence, or are charged for a block that is not merely cached."""
        s, tenants = self.sequences, range(1, len(self.tenants.names))
        used = set(np.unique(s.tenant[s.id != 0]).tolist()) | self.pins.tenants()
        return used | {t for t in tenants for group in self.groups.values() if group.pool.held_by(t)}

    def _forget_tenant(self, tenant: int) -> None:
        for group in self.groups.values():
            group.pool.forget_tenant(tenant)

    def group_of_block(self, block_id: int) -> Group:
        """The group whose pool has the block. Raises BlockNotFound."""
        for group in self.groups.values():
            if group.pool.base <= block_id < group.pool.base + group.pool.count:
                return group
        raise BlockNotFound(block_id)

    def step_done(self, group: Group, step_id: int) -> None:
        """Every step of the group up to `step_id` is over."""
        group.pool.step_done(step_id)
        self.sequences.step_done(group.number, step_id)

    # ----------------------------------------------------------------------------------------------------- placement

    def salt(self, text: str) -> int:
        """The salt number of a salt text."""
        return self._hasher.salt(text)

    def hashes(self, salt: int, tokens: Tokens) -> Hashes:
        """Chained hashes of the full blocks that a hit may use: at least one token is left to compute."""
        size = self.blocks.block_size
        return self._hasher.chain(salt, tokens[: (tokens.size - 1) // size * size])

    def plan_placement(self, group: Group, salt: int, tokens: Tokens, hashes: Hashes) -> Placement:
        """What `tokens` would share with, and need from, the group's pool. Changes nothing."""
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
        """The same for a sequence that starts with the first `tokens` tokens of `slot`, all of which have KV there."""
        s, size = self.sequences, self.blocks.block_size
        full, rest = divmod(tokens - 1, size)
        partial = (int(s.table[slot, full]), rest) if rest else (-1, 0)
        return Placement(group, s.blocks_of(slot)[:full], partial, s.blocks_for(tokens) - full)

    def with_room(self, placement: Placement, tenant: int, spare: Spare, asking: Slots) -> Placement:
        """The placement, or the same without its partial copy: that one's source must stay, which may be too much.

        spare: blocks that are to be left over. Raises CapacityExceeded where there is no room for either.
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
        """Gives a non-resident sequence its blocks. Raises CapacityExceeded (idle sequences are evicted before)."""
        s, group = self.sequences, placement.group
        pool, hits, tenant = group.pool, placement.hits, int(s.tenant[slot])
        assert s.pool[slot] == NO_POOL and not self.still_read(slot)
        self.make_room(group, tenant, placement.needed, placement.keep, slot)
        block, common = placement.partial
        pool.hold(placement.keep)
        fresh = pool.allocate(tenant, placement.needed)
        if common:
            group.copy_block(block, int(fresh[0]), common)
            pool.release(np.array([block], np.int64), group.next_step)
        table = np.concatenate([hits, fresh])
        s.table[slot, : table.size] = table
        s.used[slot] = table.size
        s.pool[slot] = group.number
        s.resident_us[slot] = self.clock.now_us
        s.computed[slot] = s.scheduled[slot] = placement.cached_tokens(s.block_size)
        if hits.size and self.blocks.indexed[hits].all():
            s.hashed[slot], s.chain[slot] = hits.size, self.store.hash[hits[-1]]
            s.parent[slot] = group.index.key(int(hits[-1]))
        else:  # none, or some that a sibling computed after someone else had: indexing finds those again
            s.hashed[slot], s.chain[slot], s.parent[slot] = 0, s.salt[slot], root_key(int(s.salt[slot]))
        if common:
            s.last_step[slot] = group.next_step
            pool.await_step(group.next_step)  # until then it is not evicted
        self._row_changed(slot)

    def release_kv(self, slot: int) -> int:
        """Takes a sequence's blocks away; its tokens stay. Returns how many blocks nobody holds any more."""
        s = self.sequences
        if s.pool[slot] == NO_POOL:
            return 0
        group = self.groups[int(s.pool[slot])]
        if s.computed[slot] // s.block_size > s.hashed[slot]:  # what it has filled is worth more indexed than free
            self._index_many(group, slot)
        dead = self._release(group, s.blocks_of(slot), int(s.last_step[slot]))
        if s.request[slot]:
            self.waits.wake(eviction_of(int(s.id[slot])))
        if s.last_step[slot] > group.pool.done_step:
            s.read_pool[slot], s.read_step[slot] = group.number, s.last_step[slot]
        self._forget_kv(slot)
        return dead

    def still_read(self, slot: int) -> bool:
        """Whether a step under way may read the row of a sequence whose blocks were taken away."""
        s = self.sequences
        group = self.groups.get(int(s.read_pool[slot]))
        return group is not None and bool(s.read_step[slot] > group.pool.done_step)

    def _release(self, group: Group, ids: BlockIds, last_step: int) -> int:
        dead = group.pool.release(ids, last_step)
        if dead and group.copies:
            group.forget_copies(ids[self.blocks.refcount[ids] == 0])
        return dead

    def _forget_kv(self, slot: int) -> None:
        s = self.sequences
        s.used[slot] = s.computed[slot] = s.scheduled[slot] = s.pending[slot] = s.last_step[slot] = 0
        s.hashed[slot] = s.parent[slot] = 0
        s.chain[slot] = 0
        s.pool[slot] = NO_POOL
        self._row_changed(slot)

    def remove(self, slot: int) -> int:
        """Ends a sequence: every block that it alone held is back. Returns how many."""
        s = self.sequences
        dead = self.release_kv(slot)
        s.end(slot, int(s.read_pool[slot]), int(s.read_step[slot]) if self.still_read(slot) else 0)
        return dead

    # ------------------------------------------------------------------------------------------------------- growing

    def append(self, slots: Slots, tokens: Tokens, counts: Slots) -> None:
        """Appends to resident or non-resident sequences: all of them or none.

        slots: [n] distinct; tokens: [sum(counts)] int32, the new tokens one sequence after the other.
        Raises CapacityExceeded.
        """
        s = self.sequences
        if counts.size == tokens.size and self.append_each(slots, tokens) is not None:
            return
        after = s.length[slots] + counts
        if (after > s.context_tokens_max).any():
            raise CapacityExceeded("context", int(after.max()), s.context_tokens_max, "start a new sequence")
        self.reserve(slots, s.length[slots], after, after)
        start = 0
        several = zip(slots.tolist(), s.length[slots].tolist(), counts.tolist(), strict=True)
        for slot, length, count in several if tokens.size > slots.size else ():
            s.tokens[slot, length : length + count - 1] = tokens[start : start + count - 1]
            start += count
        s.append(slots, after - 1, tokens[np.cumsum(counts) - 1])
        s.accesses[slots] += 1

    def append_each(self, slots: Slots, tokens: Tokens) -> Slots | None:
        """`append` of one token each where every sequence has a block that it may write: the lengths after it, [n].

        None where one has not: then nothing has changed.
        """
        s, blocks = self.sequences, self.blocks
        length = s.length.take(slots)
        column = length // s.block_size
        if not (column < s.used.take(slots)).all():
            return None
        ids = s.table[slots, column]
        if np.maximum.reduce(blocks.refcount.take(ids)) > 1 or blocks.indexed.take(ids).any():
            return None
        s.append(slots, length, tokens)
        s.accesses[slots] += 1
        return length + 1

    def append_one(self, slot: int, token: int) -> bool:
        """Appends a token where that needs no block and no copy. False where it does: then nothing has changed."""
        s, blocks = self.sequences, self.blocks
        length = int(s.length[slot])
        if s.pool[slot] != NO_POOL:
            column = length // s.block_size
            if column >= s.used[slot]:
                return False
            block = s.table[slot, column]
            if blocks.refcount[block] > 1 or blocks.indexed[block]:
                return False
        elif length >= s.context_tokens_max:
            return False
        s.tokens[slot, length] = token
        s.length[slot] = length + 1
        s.touch(slot)
        s.changed_lengths.append(np.array([slot]))
        return True

    def reserve(self, slots: Slots, start: Slots, end: Slots, lengths: Slots) -> None:
        """Makes the resident ones of `slots` able to write positions [start, end) and to hold `lengths` tokens.

        slots: [n] distinct, all of one tenant; start, end, lengths: [n]. Blocks in the range that are shared or
        indexed are replaced by copies. All or nothing; raises CapacityExceeded.
        """
        s = self.sequences
        resident = s.pool[slots] != NO_POOL
        if not resident.all():
            slots, start, end, lengths = slots[resident], start[resident], end[resident], lengths[resident]
        more = -(-lengths // s.block_size) - s.used[slots]
        copy_rows, copy_columns = self._to_copy(slots, *self.unwritable(slots, start, end))
        if not copy_rows.size and not more.any():
            return
        needed = more + np.bincount(copy_rows, minlength=slots.size)
        tenant = int(s.tenant[slots[0]])
        assert (s.tenant[slots] == tenant).all()
        parts = [(self.groups[n], s.pool[slots] == n) for n in sorted(set(s.pool[slots].tolist()))]
        for group, rows in parts:
            self.check_room(group, tenant, int(needed[rows].sum()), NO_BLOCKS, slots)
        for group, rows in parts:
            count = int(needed[rows].sum())
            self.make_room(group, tenant, count, NO_BLOCKS, slots)
            fresh = group.pool.allocate(tenant, count)
            mine = rows[copy_rows]
            copies = int(np.count_nonzero(mine))
            cells = zip(slots[copy_rows[mine]].tolist(), copy_columns[mine].tolist(), fresh.tolist(), strict=False)
            for slot, column, block in cells:
                self._replace_block(group, slot, column, block)
            self._extend(slots[rows], more[rows], fresh[copies:])

    def _to_copy(self, slots: Slots, rows: Slots, columns: Slots) -> tuple[Slots, Slots]:
        """Of the blocks that each of several rows may not write, those that must be copied: where the rows are all that
        hold a block, the last of them keeps it."""
        if rows.size < 2:
            return rows, columns
        ids = self.sequences.table[slots[rows], columns]
        _, which, asked = np.unique(ids, return_inverse=True, return_counts=True)
        alone = (asked[which] == self.blocks.refcount[ids]) & ~self.blocks.indexed[ids]
        if not alone.any():
            return rows, columns
        last = np.zeros(asked.size, np.int64)
        np.maximum.at(last, which, np.arange(rows.size))
        kept = alone & (last[which] == np.arange(rows.size))
        return rows[~kept], columns[~kept]

    def needed(self, slot: int, start: int, end: int, length: int) -> int:
        """How many blocks one resident sequence takes to write positions [start, end) and to hold `length` tokens."""
        copies = self.unwritable(np.array([slot]), np.array([start]), np.array([end]))[0].size
        return self.sequences.blocks_for(length) - int(self.sequences.used[slot]) + int(copies)

    def grow(self, group: Group, slots: Slots) -> bool:
        """One more block for each of `slots`, all of the group, where that takes nothing from anybody.

        False where it would: then nothing has changed.
        """
        s, pool = self.sequences, group.pool
        owners = s.tenant[slots].tolist()
        tenants = set(owners)
        if len(tenants) > 1 and (self.tenants.has_quotas or pool.free < slots.size):
            return False
        if len(tenants) == 1 and pool.available(owners[0]) < slots.size:
            return False
        for tenant in sorted(tenants):
            rows = slots if len(tenants) == 1 else slots[s.tenant[slots] == tenant]
            columns = s.used[rows]
            s.table[rows, columns] = pool.allocate(tenant, rows.size)
            s.used[rows] = columns + 1
            s.changed_cells.append((rows, columns))
        return True

    def unwritable(self, slots: Slots, start: Slots, end: Slots) -> tuple[Slots, Slots]:
        """The blocks that positions [start, end) fall into and that may not be written: shared, or indexed.

        Returns (row, column) pairs: row indexes `slots`, column is the index in its table. A fixed number of numpy
        operations whatever the ranges.
        """
        s, blocks = self.sequences, self.blocks
        first = start // s.block_size
        if np.array_equal((end - 1) // s.block_size, first):  # decodes: one block each
            inside = np.flatnonzero(first < s.used[slots])
            ids = s.table[slots[inside], first[inside]]
            bad = (blocks.refcount[ids] > 1) | blocks.indexed[ids]
            return inside[bad], first[inside[bad]]
        widths = np.maximum(np.minimum(-(-end // s.block_size), s.used[slots]) - first, 0)
        rows = np.repeat(np.arange(slots.size), widths)
        columns = np.arange(rows.size) - np.repeat(np.cumsum(widths) - widths, widths) + first[rows]
        ids = s.table[slots[rows], columns]
        bad = (blocks.refcount[ids] > 1) | blocks.indexed[ids]
        return rows[bad], columns[bad]

    def _extend(self, slots: Slots, more: Slots, fresh: BlockIds) -> None:
        """Appends more[i] of the `fresh` blocks to the table of slots[i]."""
        s = self.sequences
        rows = np.repeat(slots, more)
        columns = np.arange(rows.size) - np.repeat(np.cumsum(more) - more, more) + s.used[rows]
        s.table[rows, columns] = fresh
        s.used[slots] += more
        s.changed_cells.append((rows, columns))
        s.changed_rows.append(slots)

    def _replace_block(self, group: Group, slot: int, column: int, fresh: int) -> None:
        """Copy-on-write: the sequence gets `fresh` in place of a block it may not write, with the KV it had there."""
        s = self.sequences
        old = int(s.table[slot, column])
        with_kv = min(int(s.scheduled[slot]) - column * s.block_size, s.block_size)
        last = int(s.last_step[slot])
        if with_kv > 0:
            origin = group.copy_block(old, fresh, with_kv)
            last = s.last_step[slot] = group.next_step
            group.pool.await_step(last)
            self.blocks.touch[origin] = max(int(self.blocks.touch[origin]), last)
        self._release(group, np.array([old], np.int64), last)
        s.table[slot, column] = fresh
        s.changed_cells.append((np.array([slot]), np.array([column])))
        s.changed_rows.append(np.array([slot]))

    def rewind(self, slot: int) -> None:
        """The last token must be computed (again) to continue from it: its KV no longer counts."""
        s = self.sequences
        last = int(s.length[slot]) - 1
        if s.computed[slot] > last:
            s.computed[slot] = s.scheduled[slot] = last
            if s.hashed[slot] * s.block_size > last:  # the index starts again from the root; same entries, same keys
                s.hashed[slot] = 0
                s.chain[slot] = s.salt[slot]
                s.parent[slot] = root_key(int(s.salt[slot]))

    def trim(self, slot: int) -> None:
        """Gives back the blocks reserved for tokens that will not come, and forgets KV not yet acknowledged."""
        s = self.sequences
        s.pending[slot] = 0
        s.scheduled[slot] = s.computed[slot]
        keep = s.blocks_for(int(s.length[slot]))
        if s.pool[slot] != NO_POOL and s.used[slot] > keep:
            group = self.groups[int(s.pool[slot])]
            self._release(group, s.blocks_of(slot)[keep:], int(s.last_step[slot]))
            s.used[slot] = keep
        self._row_changed(slot)

    def fork(self, slot: int) -> int:
        """A second sequence with the same tokens and the same blocks. No KV is copied until one side writes."""
        s = self.sequences
        child = s.create(int(s.tenant[slot]), int(s.salt[slot]))
        length = int(s.length[slot])
        s.tokens[child, :length] = s.tokens[slot, :length]
        s.logprobs[child, :length] = s.logprobs[slot, :length]
        s.length[child] = length
        if s.pool[slot] != NO_POOL:
            group, used = self.groups[int(s.pool[slot])], s.blocks_for(length)
            ids = s.table[slot, :used].astype(np.int64)
            group.pool.hold(ids)
            s.table[child, :used] = ids
            for array in (s.pool, s.hashed, s.chain, s.parent, s.last_step):
                array[child] = array[slot]
            s.used[child] = used
            s.resident_us[child] = self.clock.now_us
            s.computed[child] = s.scheduled[child] = min(int(s.computed[slot]), length)
        self._row_changed(child)
        return child

    # ------------------------------------------------------------------------------------------------------- indexing

    def index_filled(self, group: Group) -> None:
        """Indexes the blocks of the group's sequences that acknowledged steps have filled.

        A fixed number of numpy operations for those that filled one block, as decodes do, and Python for the others.
        """
        s = self.sequences
        slots = np.flatnonzero(s.pool == group.number)
        slots = slots[s.computed[slots] // s.block_size > s.hashed[slots]]
        if not slots.size:
            return
        simple = (s.computed[slots] // s.block_size == s.hashed[slots] + 1) & group.index.all_alive(s.parent[slots])
        if simple.any():
            self._index_one_each(group, slots[simple])
        for slot in slots[~simple].tolist():
            self._index_many(group, slot)

    def _index_one_each(self, group: Group, slots: Slots) -> None:
        s = self.sequences
        first = s.hashed[slots]
        contents = s.tokens[slots[:, None], (first * s.block_size)[:, None] + np.arange(s.block_size)]
        values = self._hasher.extend(s.chain[slots], contents)
        keys = group.index.add_each(s.table[slots, first], s.parent[slots], values, contents)
        s.hashed[slots], s.chain[slots], s.parent[slots] = first + 1, values, keys

    def _index_many(self, group: Group, slot: int) -> None:
        s, index = self.sequences, group.index
        if not index.alive(int(s.parent[slot])):  # an ancestor was evicted: start again from the root
            s.hashed[slot] = 0
            s.chain[slot] = s.salt[slot]
            s.parent[slot] = root_key(int(s.salt[slot]))
        first, full = int(s.hashed[slot]), int(s.computed[slot]) // s.block_size
        tokens = s.tokens[slot, first * s.block_size : full * s.block_size]
        values = self._hasher.chain(int(s.chain[slot]), tokens).tolist()
        parent = int(s.parent[slot])
        for i, block in enumerate(s.table[slot, first:full].tolist()):
            content = tokens[i * s.block_size : (i + 1) * s.block_size]
            parent = index.add(block, parent, values[i], content)
        s.hashed[slot], s.chain[slot], s.parent[slot] = full, values[-1], parent

    # ------------------------------------------------------------------------------------------------------- pressure

    def check_room(
        self, group: Group, tenant: int, count: int, keep: BlockIds, asking: Slots | int, spare: Spare = NO_SPARE
    ) -> Slots:
        """The idle sequences to evict so that `tenant` can have `count` blocks. Raises CapacityExceeded."""
        pool = group.pool
        if pool.has(tenant, count, keep, spare):
            return NO_BLOCKS
        victims, supply = self.eviction.victims(group, tenant, count, keep, asking, spare)
        if not supply.has(tenant, count, spare):
            raise pool.shortage(tenant, count, supply, spare)
        return victims

    def make_room(self, group: Group, tenant: int, count: int, keep: BlockIds, asking: Slots | int) -> None:
        """Evicts idle sequences, least recently used first and whole, until `tenant` can have `count` blocks."""
        for slot in self.check_room(group, tenant, count, keep, asking).tolist():
            self.release_kv(slot)
            self.evicted_sequences_total += 1

    def _row_changed(self, slot: int) -> None:
        s = self.sequences
        used = int(s.used[slot])
        s.changed_rows.append(np.array([slot]))
        if used:
            s.changed_cells.append((np.full(used, slot), np.arange(used)))
