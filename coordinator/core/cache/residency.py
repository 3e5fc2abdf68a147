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
from ..limits import Limits
from ..waits import Waits, eviction_of
from . import host_hits
from .blocks import NO_BLOCKS, RECURRENT, BlockIds, Blocks
from .checkpoints import Checkpoints
from .eviction import Eviction
from .groups import Group
from .hashing import Hashes
from .indexing import Indexing
from .placement import NO_DONOR, Placement
from .prefix_cache import root_key
from .sequences import NO_POOL, Sequences, Slots, Tokens
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
        limits: Limits,
        sequences: Sequences,
        blocks: Blocks,
        groups: dict[int, Group],
        indexing: Indexing,
        eviction: Eviction,
        waits: Waits,
        checkpoints: Checkpoints,
        windows: Windows,
    ) -> None:
        self._clock, self._limits, self._sequences, self._blocks = clock, limits, sequences, blocks
        self._groups, self._indexing, self._eviction, self._waits = groups, indexing, eviction, waits
        self._checkpoints, self._windows = checkpoints, windows
        self.evicted_total = 0

    def plan_placement(
        self,
        group: Group,
        salt: int,
        tokens: Tokens,
        hashes: Hashes,
        shared_max: int | None = None,
        *,
        host: bool = True,
    ) -> Placement:
        """Plan a placement for `tokens` in the group, without changes.

        Args:
            group: The group.
            salt: The salt of the prefix chain.
            tokens: Token ids, [n] int32.
            hashes: The hashes of their full blocks.
            shared_max: How many leading tokens may come from cached blocks; None: all but the last.
            host: Whether the host tier counts, if the pool has blocks of several kinds. In others it does.
        """
        most = tokens.size - 1 if shared_max is None else min(shared_max, tokens.size - 1)
        if group.pool.mixed:
            plan = self._plan_with_state if group.state_blocks else self._plan_with_windows
            found = plan(group, salt, tokens, hashes, shared_max)
            if group.host is None or not host:
                return found
            return self._plan_from_host(found, salt, tokens, hashes, most // self._blocks.block_size)
        size, partial_tokens_min = self._blocks.block_size, self._limits.cache.partial_tokens_min
        hits = group.index.match(salt, tokens, hashes)[: most // size]
        partial = (-1, 0)
        rest = tokens[hits.size * size : most]
        needed = self._sequences.blocks_for(tokens.size) - hits.size
        if group.host is not None and (entries := group.host.match(salt, tokens, hashes, hits.size, most // size)):
            found = Placement(group, hits, partial, needed)
            found.host = entries
            return found
        if rest.size >= partial_tokens_min:
            parent = group.index.key(int(hits[-1])) if hits.size else root_key(salt)
            block, common = group.index.match_partial(parent, rest)
            if common >= partial_tokens_min:
                partial = (block, common)
        return Placement(group, hits, partial, needed)

    def _plan_with_state(
        self, group: Group, salt: int, tokens: Tokens, hashes: Hashes, shared_max: int | None
    ) -> Placement:
        """Plan a placement with as many cached blocks as a checkpoint of the recurrent state is behind."""
        size, pool = self._blocks.block_size, group.pool
        needed = self._sequences.blocks_for(tokens.size) + group.state_blocks
        most = tokens.size - 1 if shared_max is None else min(shared_max, tokens.size - 1)
        matched = group.index.match(salt, tokens, hashes)[: most // size]
        count = self._checkpoints.last(group, matched)
        while count and group.window_pages and not self._windows.usable(group, matched)[count]:
            count = self._checkpoints.last(group, matched[: count - 1])
        shared_end = self._checkpoints.positions(group).last(tokens, matched.size * size) if matched.size else 0
        shared_end = shared_end if shared_end > count * size else 0
        without = Placement(group, NO_BLOCKS, (-1, 0), needed)
        if group.window_pages:
            self._with_ahead(without, tokens.size)
        without.shared_end = shared_end
        if not count:
            return without
        blocks = np.array(pool.checkpoints[group.index.key(int(matched[count - 1]))], np.int64)
        found = Placement(group, matched[:count], (-1, 0), needed - count, NO_DONOR, without)
        found.checkpoint, found.shared_end = blocks, shared_end
        return self._with_hits(found, tokens.size) if group.window_pages else found

    def _plan_from_host(self, otherwise: Placement, salt: int, tokens: Tokens, hashes: Hashes, end: int) -> Placement:
        """Plan a placement with what the host tier has beyond the pool, if that is more tokens than `otherwise` has."""
        group, size = otherwise.group, self._blocks.block_size
        found = host_hits.find_in_both(
            group, salt, tokens, hashes, int(otherwise.hits.size), end, first_of=self._windows.first
        )
        if found is None:
            return otherwise
        count = found.hits.size + len(found.host)
        fresh = self._sequences.blocks_for(tokens.size) - found.hits.size + group.state_blocks
        placement = Placement(group, found.hits, (-1, 0), int(fresh), NO_DONOR, otherwise)
        placement.host, placement.ring, placement.host_windows = found.host, found.ring, found.host_windows
        placement.host_checkpoint = found.host_checkpoint
        placement.checkpoint = np.array(found.checkpoint, np.int64)
        if group.state_blocks:
            last = self._checkpoints.positions(group).last(tokens, found.known * size)
            placement.shared_end = last if last > count * size else 0
        if not group.window_pages:
            return placement
        placement.windows = np.array([block for ids in found.ring for block in ids], np.int64)
        placement.needed += len(found.host_windows)
        return self._with_ahead(placement, tokens.size)

    def _plan_with_windows(
        self, group: Group, salt: int, tokens: Tokens, hashes: Hashes, shared_max: int | None
    ) -> Placement:
        """Plan a placement with as many cached blocks as window blocks for their last tokens are cached."""
        size, partial_tokens_min, pool = self._blocks.block_size, self._limits.cache.partial_tokens_min, group.pool
        most = tokens.size - 1 if shared_max is None else min(shared_max, tokens.size - 1)
        matched = group.index.match(salt, tokens, hashes)[: most // size]
        count = int(self._windows.usable(group, matched).nonzero()[0][-1])
        hits, needed = matched[:count], self._sequences.blocks_for(tokens.size) - count
        found = self._with_hits(Placement(group, hits, (-1, 0), needed), tokens.size)
        rest = tokens[count * size : most]
        if count < matched.size or rest.size < partial_tokens_min:
            return found
        parent = group.index.key(int(hits[-1])) if count else root_key(salt)
        block, common = group.index.match_partial(parent, rest)
        if common < partial_tokens_min or (key := group.index.key(block)) not in pool.windows:
            return found
        copied = Placement(group, hits, (block, common), needed + group.window_pages, NO_DONOR, found)
        copied.partial_windows = np.array(pool.windows[key], np.int64)
        return self._with_hits(copied, tokens.size)

    def _with_hits(self, placement: Placement, tokens: int) -> Placement:
        """Add the window blocks in sight behind the shared tokens to a placement for so many tokens."""
        cached = placement.cached_tokens(self._blocks.block_size)
        placement.windows = self._windows.in_sight(placement.group, placement.hits, cached)
        return self._with_ahead(placement, tokens)

    def _with_ahead(self, placement: Placement, tokens: int) -> Placement:
        """Add to a placement what its first steps take for windows."""
        group, s = placement.group, self._sequences
        held = placement.windows.size + placement.partial_windows.size + len(placement.host_windows)
        placement.ahead = max(0, self._windows.most(group, s.blocks_for(tokens)) - held)
        return placement

    def plan_fork(self, group: Group, slot: int, tokens: int) -> Placement | None:
        """Plan a placement for a sequence that shares the first `tokens` tokens of `slot`, which all have KV there.

        Returns:
            The placement; None if the slot has released what the sequence would see.
        """
        s, size = self._sequences, self._blocks.block_size
        full, rest = divmod(tokens - 1, size)
        partial = (int(s.table[slot, full]), rest) if rest else (-1, 0)
        found = Placement(group, s.blocks_of(slot)[:full], partial, s.blocks_for(tokens) - full)
        if not group.window_pages:
            return found
        return self.share_windows(found, slot, tokens - 1, tokens)

    def share_windows(self, placement: Placement, slot: int, shared: int, tokens: int) -> Placement | None:
        """Add the window blocks of a sequence to a placement that shares its first tokens.

        Args:
            placement: The placement.
            slot: The slot of the sequence.
            shared: How many tokens are shared.
            tokens: How many tokens the new sequence has.

        Returns:
            The placement; None if the sequence has released what is in sight there.
        """
        group, windows = placement.group, self._windows
        full, first = int(placement.hits.size), windows.first(group, shared)
        if not windows.holds(group, slot, shared):
            return None
        placement.windows = windows.between(group, slot, first, full)
        if placement.partial[1]:
            placement.partial_windows = windows.between(group, slot, full, full + 1)
            placement.needed += group.window_pages
        return self._with_ahead(placement, tokens)

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

    def move_in(self, slot: int, placement: Placement) -> None:
        """Give a non-resident sequence its blocks, evicting idle sequences as needed.

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
            self._load(group, slot, placement, fresh)
        if common or reads:
            s.last_step[slot] = group.next_step
            pool.await_step(group.next_step)  # the copy protects the sequence from eviction until then
        self._row_changed(slot)

    def _load(self, group: Group, slot: int, placement: Placement, fresh: BlockIds) -> None:
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
        group.host.load(slot, placement.reads, targets, int(s.scheduled[slot]))
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
        self.forget_kv(np.array([slot]))
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

    def give_back(self, slots: Slots) -> None:
        """Release the blocks that rows got for drafts and that hold no token: [n] slots without pending tokens."""
        s = self._sequences
        needed = -(-s.length[slots] // s.block_size)
        more = s.used[slots] > needed
        for slot, keep in zip(slots[more].tolist(), needed[more].tolist(), strict=True):
            self._release_beyond(slot, keep)
        s.changed_rows.append(slots[more])

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
            raise pool.shortage(tenant, count, supply, spare)
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
