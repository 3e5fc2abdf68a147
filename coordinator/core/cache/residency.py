"""Residency: how sequences get blocks in a group, and how they give them back.

Every method keeps these rules:

- Allocation is all or nothing, and a method that raises has changed nothing.
- Blocks leave a table through `BlockPool.release`, with the last step that may touch them.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from kvforge.protocol.errors import CapacityExceeded
from kvforge.protocol.messages import GENERATED

from ..clock import Clock
from ..waits import Waits, eviction_of
from .blocks import NO_BLOCKS, RECURRENT, BlockIds, Blocks
from .checkpoints import Checkpoints
from .eviction import Eviction
from .groups import Group
from .idle_tracker import IdleTracker
from .indexing import Indexing
from .placement import NO_DONOR, Placement
from .sequences import NO_POOL, Sequences, Slots
from .states import is_cut
from .supply import NO_SPARE, Spare
from .windows import Windows


class Residency:
    """Places sequences in groups, and evicts idle ones.

    Attributes:
        evicted_total: Sequences that were evicted.
    """

    def __init__(
        self,
        clock: Clock,
        sequences: Sequences,
        blocks: Blocks,
        groups: dict[int, Group],
        indexing: Indexing,
        eviction: Eviction,
        waits: Waits,
        checkpoints: Checkpoints,
        windows: Windows,
        idle: IdleTracker,
    ) -> None:
        self._clock, self._sequences, self._blocks = clock, sequences, blocks
        self._groups, self._indexing, self._eviction, self._waits = groups, indexing, eviction, waits
        self._checkpoints, self._windows, self._idle = checkpoints, windows, idle
        self.evicted_total = 0

    def with_room(self, placement: Placement, tenant: int, spare: Spare, asking: Slots) -> Placement:
        """Return the placement if there is room for it, or else the placement without its partial copy.

        The source of a partial copy must stay, which takes a further block. A donor must stay too; without room beside
        it, the other plan is tried, by which it may be evicted.

        Args:
            placement: The placement to check.
            tenant: The tenant that pays for the blocks.
            spare: Blocks that must remain.
            asking: Slots that must not be evicted.

        Raises:
            CapacityExceeded: There is room for neither.
        """
        group = placement.group
        needed = placement.needed + placement.ahead
        try:
            self.check_room(group, tenant, needed, placement.keep, _with_donor(asking, placement), spare)
        except CapacityExceeded:
            if placement.otherwise is not None:
                return self.with_room(placement.otherwise, tenant, spare, asking)
            if not placement.partial[1] or group.window_pages:
                raise
            placement = Placement(group, placement.hits, (-1, 0), needed)
            self.check_room(group, tenant, needed, placement.keep, asking, spare)
        return placement

    def move_in(self, slot: int, placement: Placement, *, paced: bool = False) -> None:
        """Give a non-resident sequence its blocks, evicting idle sequences as needed.

        Args:
            slot: The slot of the sequence.
            placement: What it shares and reads.
            paced: No request waits for what it reads.

        Raises:
            CapacityExceeded: There is no room.
        """
        s, group = self._sequences, placement.group
        pool, tenant = group.pool, int(s.tenant[slot])
        assert s.pool[slot] == NO_POOL and not self.still_read(slot)
        reads = placement.reads
        if reads:
            assert group.host is not None
            group.host.hold(reads)  # blocks that make room are saved, and must not take theirs
        try:
            self.make_room(group, tenant, placement.needed, placement.keep, _with_donor(np.array([slot]), placement))
        except CapacityExceeded:
            if group.host is not None:
                group.host.unhold(reads)
            raise
        block, common = placement.partial
        if group.host is not None:
            group.host.reuse(placement.hits)
            if pool.mixed:
                group.host.reuse(np.concatenate((placement.windows, placement.checkpoint)))
        group.hold(placement.keep)
        fresh = pool.allocate(tenant, placement.needed)
        if group.state_blocks:
            fresh = self._give_state(group, slot, fresh, placement)
        if group.window_pages:
            fresh = self._give_windows(group, slot, fresh, placement)
        if common:
            group.copy_block(block, int(fresh[0]), common)
            pool.release(np.array([block], np.int64), group.next_step)
        table = np.concatenate([placement.hits, fresh])
        s.table[slot, : table.size] = table
        s.used[slot] = table.size
        s.pool[slot] = group.number
        s.resident_us[slot] = self._clock.now_us
        s.computed[slot] = s.scheduled[slot] = placement.cached_tokens(s.block_size)
        self._indexing.shared(group, slot, placement.hits)
        if reads:
            self._load(group, slot, placement, fresh, paced=paced)
        if common or reads:
            s.last_step[slot] = group.next_step
            pool.await_step(group.next_step)  # the copy protects the sequence from eviction until then
        self._row_changed(slot)

    def _load(self, group: Group, slot: int, placement: Placement, fresh: BlockIds, *, paced: bool = False) -> None:
        """Fill the first of the fresh blocks from the host, window blocks and the state too.

        What needs them has no KV before the step is acknowledged.
        """
        assert group.host is not None
        s, whole = self._sequences, int(placement.hits.size)
        targets: list[int] = fresh[: len(placement.host)].tolist()
        count = whole + len(placement.host)
        for number, ids in enumerate(placement.ring, count - len(placement.ring)):
            if not ids:
                targets += self._windows.between(group, slot, number, number + 1).tolist()
                whole = min(whole, number)
        if placement.host_checkpoint:
            targets += s.states_of(slot).tolist()
            whole = min(whole, count - 1)
        if whole < placement.hits.size:
            self._indexing.restart(slot)  # what comes hangs on entries that are there
        group.host.load(slot, placement.reads, targets, int(s.scheduled[slot]), paced=paced)
        s.computed[slot] = whole * s.block_size

    def _forget_load(self, slot: int) -> None:
        """Do not count KV that is on its way from the host to a resident sequence."""
        group = self._groups.get(int(self._sequences.pool[slot]))
        if group is not None and group.host is not None:
            group.host.forget(slot)

    def _give_state(self, group: Group, slot: int, fresh: BlockIds, placement: Placement) -> BlockIds:
        """Use the last of the fresh blocks for the sequence's recurrent state, and copy the checkpoint there.

        Returns:
            The other blocks.
        """
        s, kv = self._sequences, fresh.size - group.state_blocks
        s.states[slot, : group.state_blocks] = fresh[kv:]
        s.state_used[slot] = group.state_blocks
        self._blocks.kind[fresh[kv:]] = RECURRENT
        s.changed_states.append(slot)
        s.shared_end[slot] = placement.shared_end
        if placement.checkpoint.size:
            for source, target in zip(placement.checkpoint.tolist(), fresh[kv:].tolist(), strict=True):
                group.copy_held(source, target, self._blocks.block_size)
            group.pool.release(placement.checkpoint, group.next_step)
            s.last_step[slot] = group.next_step
            group.pool.await_step(group.next_step)
        return fresh[:kv]

    def _give_windows(self, group: Group, slot: int, fresh: BlockIds, placement: Placement) -> BlockIds:
        """Put shared window blocks into the ring of a sequence, and copy the leading tokens of those behind them.

        Returns:
            The fresh blocks that are left.
        """
        if placement.ring:
            return self._give_ring(group, slot, fresh, placement)
        sources = placement.partial_windows
        kv = fresh.size - sources.size
        first = placement.hits.size - placement.windows.size // group.window_pages
        self._windows.begin(group, slot, first, placement.windows, fresh[kv:])
        for source, target in zip(sources.tolist(), fresh[kv:].tolist(), strict=True):
            group.copy_block(source, target, placement.partial[1])
        group.pool.release(sources, group.next_step)
        return fresh[:kv]

    def _give_ring(self, group: Group, slot: int, fresh: BlockIds, placement: Placement) -> BlockIds:
        """Put shared window blocks into the ring of a sequence, and fresh ones for those that come from the host.

        Returns:
            The fresh blocks that are left.
        """
        kv = fresh.size - len(placement.host_windows)
        own = iter(fresh[kv:].tolist())
        ids = [block for shared in placement.ring for block in shared or islice(own, group.window_pages)]
        first = placement.hits.size + len(placement.host) - len(placement.ring)
        self._windows.begin(group, slot, first, np.array(ids, np.int64), NO_BLOCKS)
        return fresh[:kv]

    def note_reuse(self, slot: int) -> None:
        """Let the host tier know that a sequence with blocks goes on, later or with another request."""
        s = self._sequences
        group = self._groups.get(int(s.pool[slot]))
        if group is not None and group.host is not None:
            group.host.reuse(s.blocks_of(slot)[: int(s.computed[slot]) // s.block_size])
            if s.window_end[slot]:
                group.host.reuse(self._windows.of(slot))

    def release_kv(self, slot: int) -> int:
        """Release a sequence's blocks; its tokens stay. Return how many blocks have no holder left."""
        self.note_reuse(slot)
        return self._release_kv(slot)

    def _release_kv(self, slot: int) -> int:
        s = self._sequences
        if s.pool[slot] == NO_POOL:
            return 0
        group = self._groups[int(s.pool[slot])]
        if s.computed[slot] // s.block_size > s.hashed[slot]:  # index what it filled, so that it can be reused
            self._indexing.filled_by(group, slot)
        self._forget_load(slot)
        dead = group.release(s.blocks_of(slot), int(s.last_step[slot]))
        if s.window_end[slot]:
            dead += group.release(self._windows.of(slot), int(s.last_step[slot]))
        if s.state_used[slot]:
            self._checkpoints.leave(group, slot)
            dead += group.release(s.states_of(slot), int(s.last_step[slot]))
        if s.request[slot]:
            self._waits.wake(eviction_of(int(s.id[slot])))
        if s.last_step[slot] > group.pool.done_step:
            s.read_pool[slot], s.read_step[slot] = group.number, s.last_step[slot]
            group.pool.await_step(int(s.last_step[slot]))  # nothing else does if others hold its blocks too
        self.forget_kv(np.array([slot]))
        if s.idle_since_us[slot] or s.pinned[slot] or s.returned[slot]:
            self._idle.moved_down(slot, group)
        return dead

    def still_read(self, slot: int) -> bool:
        """Return whether a step in flight may read the row of a sequence that lost its blocks."""
        s = self._sequences
        group = self._groups.get(int(s.read_pool[slot]))
        return group is not None and bool(s.read_step[slot] > group.pool.done_step)

    def forget_kv(self, slots: Slots) -> None:
        """Clear the state of sequences that have lost their blocks: [n] slots."""
        s = self._sequences
        s.used[slots] = s.computed[slots] = s.scheduled[slots] = s.pending[slots] = s.last_step[slots] = 0
        s.hashed[slots] = s.parent[slots] = 0
        s.chain[slots] = 0
        s.pool[slots] = NO_POOL
        if np.count_nonzero(s.state_used[slots]):
            s.changed_states.extend(slots[s.state_used[slots] > 0].tolist())
            s.state_used[slots] = s.shared_end[slots] = 0
        s.window_first[slots] = s.window_end[slots] = 0
        s.changed_rows.append(slots)

    def remove(self, slot: int) -> int:
        """End a sequence. Return how many of its blocks have no holder left."""
        s = self._sequences
        self._idle.removed(slot)
        dead = self._release_kv(slot)
        s.end(slot, int(s.read_pool[slot]), int(s.read_step[slot]) if self.still_read(slot) else 0)
        return dead

    def must_move(self, slot: int) -> bool:
        """Return whether a resident sequence cannot continue with its recurrent state.

        The last token must be computed again to continue, or tokens were appended to a prompt whose chunks then end
        elsewhere.
        """
        s = self._sequences
        if s.pool[slot] == NO_POOL or not s.state_used[slot]:
            return False
        at, length = int(s.scheduled[slot]), int(s.length[slot])
        chunk = self._groups[int(s.pool[slot])].prompt_chunk
        if at >= length or s.computed[slot] < at:
            return True
        return not is_cut(s.tokens[slot, :length], at, chunk)

    def settles(self, slot: int) -> bool:
        """Return whether a step in flight computes just the last generated token of a sequence with a recurrent state.

        The state is then where the next turn begins, once the step is done. A state that goes further is of no use.
        """
        s = self._sequences
        last = int(s.length[slot]) - 1
        if not s.state_used[slot] or not s.computed[slot] == last == s.scheduled[slot] - 1:
            return False
        return bool(s.tokens[slot, last] >= GENERATED)

    def is_settling(self, slot: int) -> bool:
        """Return whether an idle sequence waits for the step that takes its recurrent state to its last token."""
        s = self._sequences
        if not s.state_used[slot] or s.scheduled[slot] == s.computed[slot]:
            return False
        return bool(s.last_step[slot] > self._groups[int(s.pool[slot])].pool.done_step)

    def is_loading(self, slot: int) -> bool:
        """Return whether KV of a resident sequence is on its way from the host."""
        group = self._groups.get(int(self._sequences.pool[slot]))
        return group is not None and group.host is not None and slot in group.host.loads

    def rewind(self, slot: int) -> None:
        """Discard the KV of the last token, which must be computed again to continue from it, and unacknowledged KV."""
        s = self._sequences
        last = int(s.length[slot]) - 1
        if s.computed[slot] > last:
            s.computed[slot] = last
            if s.hashed[slot] * s.block_size > last:
                self._indexing.restart(slot)
        self._forget_load(slot)
        s.scheduled[slot] = s.computed[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Cut an idle sequence off behind its first `length` tokens, with the KV of the others."""
        s = self._sequences
        if s.window_end[slot] and not self._windows.holds(
            self._groups[int(s.pool[slot])], slot, min(length, int(s.computed[slot]))
        ):
            self.release_kv(slot)  # what the tokens to come would see was released
        s.length[slot] = length
        if s.computed[slot] > length:
            s.computed[slot] = length
            if s.hashed[slot] * s.block_size > length:
                self._indexing.restart(slot)
        self.trim(slot)
        s.changed_lengths.append(np.array([slot]))

    def trim(self, slot: int, settles: bool = False) -> None:
        """Release blocks reserved for tokens that will not come, and discard unacknowledged KV.

        Args:
            slot: The slot of the sequence.
            settles: Keep what is in flight, which will be acknowledged as that of an idle sequence.
        """
        s = self._sequences
        if not settles and s.state_used[slot] and s.scheduled[slot] > s.computed[slot]:
            self.release_kv(slot)  # its state is further
        elif not settles and s.window_end[slot] and self.is_loading(slot):
            self.release_kv(slot)  # it has the windows of what comes, not those before
        s.pending[slot] = 0
        if not settles:
            self._forget_load(slot)
            s.scheduled[slot] = s.computed[slot]
        self._release_beyond(slot, s.blocks_for(int(s.length[slot])))
        if s.window_end[slot]:  # those of steps in flight would count against a ceiling that has no room for them
            group = self._groups[int(s.pool[slot])]
            self._windows.trim(group, slot, int(s.scheduled[slot]) // s.block_size + 1)
        self._row_changed(slot)

    def give_back(self, group: Group, slots: Slots) -> None:
        """Release the blocks that rows of a group got for drafts and that hold no token.

        Args:
            group: The group.
            slots: The slots of the rows, [n], none with pending tokens.
        """
        s = self._sequences
        needed = -(-s.length[slots] // s.block_size)
        more = s.used[slots] > needed
        slots, needed = slots[more], needed[more]
        if not slots.size:
            return
        s.changed_rows.append(slots)
        rows = zip(slots.tolist(), needed.tolist(), s.used[slots].tolist(), strict=True)
        if group.window_pages:
            for slot, keep, _ in rows:
                self._release_beyond(slot, keep)
            return
        # All at once takes as long as one row. Blocks become free from the last one on, as if row came after row.
        parts = [s.table[slot, keep:used] for slot, keep, used in rows]
        group.release(np.concatenate(parts[::-1], dtype=np.int64), int(np.maximum.reduce(s.last_step[slots])))
        s.used[slots] = needed

    def _release_beyond(self, slot: int, keep: int) -> None:
        """Release all but the first `keep` blocks of a sequence."""
        s = self._sequences
        if s.pool[slot] == NO_POOL or s.used[slot] <= keep:
            return
        group = self._groups[int(s.pool[slot])]
        group.release(s.blocks_of(slot)[keep:], int(s.last_step[slot]))
        if s.window_end[slot]:
            self._windows.trim(group, slot, keep)
        s.used[slot] = keep

    def fork(self, slot: int, most: int | None = None) -> int:
        """Create a sequence that shares tokens and blocks of `slot`. KV is copied when one side writes.

        If the model keeps a recurrent state, which cannot be shared, the new sequence gets a copy of it. Without room,
        and if a step in flight takes the state further, only the tokens are shared.

        Args:
            slot: The sequence's slot.
            most: How many leading tokens to share; None: all.

        Returns:
            The slot of the new sequence.
        """
        s = self._sequences
        child = s.create(int(s.tenant[slot]), int(s.salt[slot]))
        length = int(s.length[slot]) if most is None else most
        s.extend(child, s.tokens[slot, :length], s.logprobs[slot, :length])
        if s.pool[slot] != NO_POOL and self._can_share(slot, child, length):
            group, used = self._groups[int(s.pool[slot])], s.blocks_for(length)
            ids = s.table[slot, :used].astype(np.int64)
            group.hold(ids)
            s.table[child, :used] = ids
            for array in (s.pool, s.hashed, s.chain, s.parent):
                array[child] = array[slot]
            s.last_step[child] = max(int(s.last_step[slot]), int(s.last_step[child]))
            s.used[child] = used
            if s.window_end[slot]:
                self._share_windows(group, slot, child, used)
            s.resident_us[child] = self._clock.now_us
            s.computed[child] = s.scheduled[child] = min(int(s.computed[slot]), length)
            if s.hashed[child] * s.block_size > length:
                self._indexing.restart(child)
        self._row_changed(child)
        return child

    def _can_share(self, slot: int, child: int, length: int) -> bool:
        """Return whether a fork can go on with its parent's KV. It has then a copy of the state, if there is one."""
        s = self._sequences
        group = self._groups[int(s.pool[slot])]
        if group.window_pages and not self._windows.holds(group, slot, min(int(s.computed[slot]), length)):
            return False
        return not s.state_used[slot] or self._copy_state(slot, child, length)

    def _share_windows(self, group: Group, slot: int, child: int, used: int) -> None:
        """Let a fork hold its parent's window blocks, as far as it has their tokens and their KV is acknowledged."""
        s = self._sequences
        first, written = int(s.window_first[slot]), int(s.computed[slot]) // s.block_size + 1
        end = max(first, min(int(s.window_end[slot]), used, written))
        ids = self._windows.between(group, slot, first, end)
        group.hold(ids)
        self._windows.begin(group, child, first, ids, NO_BLOCKS)

    def _copy_state(self, slot: int, child: int, length: int) -> bool:
        """Give a fork a copy of its parent's state. Return False, with nothing changed, if that is impossible."""
        s = self._sequences
        group = self._groups[int(s.pool[slot])]
        if not s.scheduled[slot] == s.computed[slot] <= length:
            return False
        tenant, needed = int(s.tenant[slot]), group.state_blocks
        if not group.pool.has(tenant, needed, NO_BLOCKS, Spare(group.running, 0)):
            return False
        source = Placement(group, NO_BLOCKS, (-1, 0), needed)
        source.checkpoint = s.states_of(slot)
        group.hold(source.checkpoint)
        self._give_state(group, child, group.pool.allocate(tenant, needed), source)
        return True

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
        victims, supply = self._eviction.victims(group, tenant, count, keep, asking, spare)
        if not supply.has(tenant, count, spare):
            raise supply.shortage(tenant, count, spare)
        return victims

    def make_room(self, group: Group, tenant: int, count: int, keep: BlockIds, asking: Slots | int) -> None:
        """Evict whole idle sequences, least recently used first, until `tenant` can have `count` blocks."""
        for slot in self.check_room(group, tenant, count, keep, asking).tolist():
            self.release_kv(slot)
            self.evicted_total += 1

    def _row_changed(self, slot: int) -> None:
        s = self._sequences
        used = int(s.used[slot])
        s.changed_rows.append(np.array([slot]))
        if used:
            s.changed_cells.append((np.array([slot]), slice(used)))


def _with_donor(asking: Slots, placement: Placement) -> Slots:
    return asking if placement.donor == NO_DONOR else np.append(asking, placement.donor)
