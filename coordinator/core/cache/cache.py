"""The KV cache: sequences over blocks, as they grow. Every change of a block table happens here or in `residents`.

A table's last block is written only while it has one holder and is not indexed; otherwise it is copied first. What
raises has changed nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded

from .blocks import NO_BLOCKS, BlockIds
from .groups import Group
from .residents import Residents
from .sequences import NO_POOL, Slots

Tokens = npt.NDArray[np.int32]


class Cache(Residents):
    """All of it: who lives where (`Residents`), and that they grow."""

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
        s.accesses[slots] += 1
        if counts.size == tokens.size:
            s.append(slots, after - 1, tokens)
            return
        for slot, own in zip(slots.tolist(), np.split(tokens, np.cumsum(counts)[:-1]), strict=True):
            s.extend(slot, own)

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
        s.append(np.array([slot]), length, token)
        s.accesses[slot] += 1
        return True

    def reserve(self, slots: Slots, start: Slots, end: Slots, lengths: Slots) -> None:
        """Makes the resident ones of `slots` able to write positions [start, end) and to hold `lengths` tokens.

        slots: [n] distinct, all of one tenant; start, end, lengths: [n]. Blocks in the range that are shared or
        indexed are replaced by copies. All or nothing; raises CapacityExceeded.
        """
        s = self.sequences
        resident = s.pool[slots] != NO_POOL
        if np.count_nonzero(resident) != slots.size:
            slots, start, end, lengths = slots[resident], start[resident], end[resident], lengths[resident]
        more = -(-lengths // s.block_size) - s.used[slots]
        copy_rows, copy_columns = self._to_copy(slots, *self.unwritable(slots, start, end))
        if not copy_rows.size and not np.count_nonzero(more):
            return
        needed = more + np.bincount(copy_rows, minlength=slots.size) if copy_rows.size else more
        tenant, pools = int(s.tenant[slots[0]]), s.pool[slots]
        assert not np.count_nonzero(s.tenant[slots] != tenant)
        parts: list[tuple[Group, npt.NDArray[np.bool_], int]] = []
        for number in sorted(set(pools.tolist())):
            rows = pools == number
            parts.append((self.groups[number], rows, int(np.add.reduce(needed[rows]))))
        for group, _, count in parts:
            self.check_room(group, tenant, count, NO_BLOCKS, slots)
        for group, rows, count in parts:
            self.make_room(group, tenant, count, NO_BLOCKS, slots)
            fresh = group.pool.allocate(tenant, count)
            if not copy_rows.size:  # most grow by a block, and copy none
                self._extend(slots[rows], more[rows], fresh)
                continue
            mine = rows[copy_rows]
            copies = int(np.count_nonzero(mine))
            cells = zip(slots[copy_rows[mine]].tolist(), copy_columns[mine].tolist(), fresh.tolist(), strict=False)
            for slot, column, block in cells:
                self._replace_block(group, slot, column, block)
            self._extend(slots[rows], more[rows], fresh[copies:])

    def _to_copy(self, slots: Slots, rows: Slots, columns: Slots) -> tuple[Slots, Slots]:
        """Which of the blocks that the rows may not write must be copied. A block that nobody but these rows holds is
        kept by the last of them."""
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
        """Gives one more block to each of `slots`, all of the group, if that takes nothing from anybody.

        Returns False if it would; then nothing has changed.
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

    def unwritable(self, slots: Slots, start: Slots, end: Slots | None = None) -> tuple[Slots, Slots]:
        """The blocks that positions [start, end) fall into and that may not be written: shared, or indexed. end: None
        for one position each.

        Returns (row, column) pairs: row indexes `slots`, column is the index in its table. A fixed number of numpy
        operations whatever the ranges.
        """
        s, blocks = self.sequences, self.blocks
        first = start // s.block_size
        if end is None or not np.count_nonzero((end - 1) // s.block_size != first):  # decodes: one block each
            (inside,) = (first < s.used[slots]).nonzero()
            columns = first[inside]
            ids = s.table[slots[inside], columns]
            bad = (blocks.refcount[ids] > 1) | blocks.indexed[ids]
            return inside[bad], columns[bad]
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
        group.release(np.array([old], np.int64), last)
        s.table[slot, column] = fresh
        s.changed_cells.append((np.array([slot]), np.array([column])))
        s.changed_rows.append(np.array([slot]))
