"""Block tables of growing sequences. Only this file and `residency` change a block table.

The last block of a table is written only while it has one holder and is not indexed; otherwise it is copied first. A
call that raises has changed nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded

from .blocks import NO_BLOCKS, BlockIds, Blocks
from .groups import Group
from .residency import Residency
from .sequences import NO_POOL, ONE, Sequences, Slots, Tokens
from .tenants import Tenants
from .windows import Windows


class BlockTables:
    """Grows the block tables of sequences."""

    def __init__(
        self,
        sequences: Sequences,
        blocks: Blocks,
        groups: dict[int, Group],
        tenants: Tenants,
        residency: Residency,
        windows: Windows,
    ) -> None:
        self._sequences, self._blocks, self._groups = sequences, blocks, groups
        self._tenants, self._residency, self._windows = tenants, residency, windows

    def append(self, slots: Slots, tokens: Tokens, counts: Slots) -> None:
        """Append tokens to resident or non-resident sequences, all or nothing.

        Args:
            slots: Distinct slots, [n].
            tokens: New tokens, one sequence after the other, [sum(counts)] int32.
            counts: Number of new tokens for each slot, [n].

        Raises:
            CapacityExceeded: A context is too long, or blocks are missing.
        """
        s = self._sequences
        if counts.size == tokens.size and self.append_each(slots, tokens) is not None:
            return
        after = s.length[slots] + counts
        if (after > s.context_tokens_max).any():
            raise CapacityExceeded("context", int(after.max()), s.context_tokens_max, "start a new sequence")
        self.reserve(slots, s.length[slots], after, after, steps=False)
        s.accesses[slots] += 1
        if counts.size == tokens.size:
            s.append(slots, after - 1, tokens)
            return
        for slot, own in zip(slots.tolist(), np.split(tokens, np.cumsum(counts)[:-1]), strict=True):
            s.extend(slot, own)

    def append_each(self, slots: Slots, tokens: Tokens) -> Slots | None:
        """Append one token to each sequence if each has a block that it may write.

        Returns:
            The new lengths, [n]; None, with nothing changed, if a sequence needs a block or a copy.
        """
        s, blocks = self._sequences, self._blocks
        length = s.length.take(slots)
        column = length // s.block_size
        if not (column < s.used.take(slots)).all():
            return None
        ids = s.table[slots, column]
        if np.maximum.reduce(blocks.refcount.take(ids)) > 1 or blocks.indexed.take(ids).any():
            return None
        if self._windows.present and self._windows.unwritable(slots, length, None)[0].size:
            return None
        s.append(slots, length, tokens)
        s.accesses[slots] += 1
        return length + 1

    def append_one(self, slot: int, token: int) -> bool:
        """Append a token if that needs no block and no copy. Return False, with nothing changed, if it does."""
        s, blocks = self._sequences, self._blocks
        length = int(s.length[slot])
        if s.pool[slot] != NO_POOL:
            column = length // s.block_size
            if column >= s.used[slot]:
                return False
            block = s.table[slot, column]
            if blocks.refcount[block] > 1 or blocks.indexed[block]:
                return False
            if s.window_end[slot] and self._windows.unwritable(np.array([slot]), s.length[[slot]], None)[0].size:
                return False
        elif length >= s.context_tokens_max:
            return False
        s.append(np.array([slot]), length, token)
        s.accesses[slot] += 1
        return True

    def reserve(self, slots: Slots, start: Slots, end: Slots, lengths: Slots, steps: bool = True) -> None:
        """Make resident sequences able to write positions [start, end) and to hold `lengths` tokens: all or none.

        Non-resident slots are ignored. Shared or indexed blocks in the range are replaced by copies.

        Args:
            slots: Distinct slots of one tenant, [n].
            start: First position to write, [n].
            end: End of the positions to write, [n].
            lengths: Tokens to hold, [n].
            steps: The next step writes the positions, which takes window blocks for them.

        Raises:
            CapacityExceeded: Blocks are missing.
        """
        s = self._sequences
        resident = s.pool[slots] != NO_POOL
        if np.count_nonzero(resident) != slots.size:
            slots, start, end, lengths = slots[resident], start[resident], end[resident], lengths[resident]
        more = -(-lengths // s.block_size) - s.used[slots]
        copy_rows, copy_columns = self._to_copy(slots, *self.unwritable(slots, start, end))
        if slots.size and self._windows.present:
            self._reserve_with_windows(slots, more, copy_rows, copy_columns, end if steps else None, lengths)
            return
        if not copy_rows.size and not np.count_nonzero(more):
            return
        needed = more + np.bincount(copy_rows, minlength=slots.size) if copy_rows.size else more
        tenant, pools = int(s.tenant[slots[0]]), s.pool[slots]
        assert not np.count_nonzero(s.tenant[slots] != tenant)
        parts: list[tuple[Group, npt.NDArray[np.bool_], int]] = []
        for number in sorted(set(pools.tolist())):
            rows = pools == number
            parts.append((self._groups[number], rows, int(np.add.reduce(needed[rows]))))
        for group, _, count in parts:
            self._residency.check_room(group, tenant, count, NO_BLOCKS, slots)
        for group, rows, count in parts:
            self._residency.make_room(group, tenant, count, NO_BLOCKS, slots)
            fresh = group.pool.allocate(tenant, count)
            if not copy_rows.size:  # the common case: rows grow by a block without copies
                self._extend(slots[rows], more[rows], fresh)
                continue
            mine = rows[copy_rows]
            copies = int(np.count_nonzero(mine))
            cells = zip(slots[copy_rows[mine]].tolist(), copy_columns[mine].tolist(), fresh.tolist(), strict=False)
            for slot, column, block in cells:
                self._replace_block(group, slot, column, block)
            self._extend(slots[rows], more[rows], fresh[copies:])

    def _reserve_with_windows(
        self, slots: Slots, more: Slots, rows: Slots, columns: Slots, end: Slots | None, lengths: Slots
    ) -> None:
        """Add blocks and window blocks to the tables of sequences, and replace those that must be copied.

        Args:
            slots: Distinct slots of one tenant, [n].
            more: Blocks to add to each, [n].
            rows: Indices of slots with blocks to copy, [m].
            columns: These blocks, [m].
            end: Ends of the positions that the next step writes, [n]; None if it writes none.
            lengths: Tokens to hold, [n].
        """
        s, windows = self._sequences, self._windows
        seen = windows.missing(slots, end, lengths) if end is not None else np.zeros_like(slots)
        copied = windows.has(slots[rows], columns)
        tenant, pools = int(s.tenant[slots[0]]), s.pool[slots]
        assert not np.count_nonzero(s.tenant[slots] != tenant)
        parts: list[tuple[Group, npt.NDArray[np.bool_], npt.NDArray[np.bool_], int]] = []
        for number in sorted(set(pools.tolist())):
            group, mine = self._groups[number], pools == number
            cells = mine[rows]
            count = int(np.add.reduce(more[mine])) + int(np.count_nonzero(cells))
            count += group.window_pages * (int(np.add.reduce(seen[mine])) + int(np.count_nonzero(copied[cells])))
            if count:
                parts.append((group, mine, cells, count))
        for group, _, _, count in parts:
            self._residency.check_room(group, tenant, count, NO_BLOCKS, slots)
        for group, mine, cells, count in parts:
            self._residency.make_room(group, tenant, count, NO_BLOCKS, slots)
            fresh = group.pool.allocate(tenant, count)
            own = zip(slots[rows[cells]].tolist(), columns[cells].tolist(), copied[cells].tolist(), strict=True)
            at = 0
            for slot, column, both in own:
                end_at = at + 1 + group.window_pages * both
                self._replace_block(group, slot, column, *fresh[at:end_at].tolist())
                at = end_at
            full = int(np.add.reduce(more[mine]))
            self._extend(slots[mine], more[mine], fresh[at : at + full])
            if group.window_pages:
                windows.extend(group, slots[mine], seen[mine], fresh[at + full :])

    def _to_copy(self, slots: Slots, rows: Slots, columns: Slots) -> tuple[Slots, Slots]:
        """Select which of the unwritable blocks need a copy. The last of the rows that hold a block alone keeps it."""
        if rows.size < 2 or self._windows.present:
            return rows, columns
        ids = self._sequences.table[slots[rows], columns]
        _, which, asked = np.unique(ids, return_inverse=True, return_counts=True)
        alone = (asked[which] == self._blocks.refcount[ids]) & ~self._blocks.indexed[ids]
        if not alone.any():
            return rows, columns
        last = np.zeros(asked.size, np.int64)
        np.maximum.at(last, which, np.arange(rows.size))
        kept = alone & (last[which] == np.arange(rows.size))
        return rows[~kept], columns[~kept]

    def needed(self, slot: int, start: int, end: int, length: int) -> int:
        """Return how many blocks a resident sequence needs to write [start, end) and to hold `length` tokens."""
        slots, ends = np.array([slot]), np.array([end])
        rows, columns = self.unwritable(slots, np.array([start]), ends)
        needed = self._sequences.blocks_for(length) - int(self._sequences.used[slot]) + int(rows.size)
        if not self._windows.present:
            return needed
        copied = np.count_nonzero(self._windows.has(slots[rows], columns))
        seen = self._windows.missing(slots, ends, np.array([length]))[0]
        return needed + int(seen + copied) * self._groups[int(self._sequences.pool[slot])].window_pages

    def grow(self, group: Group, slots: Slots, tenant: int = -1) -> bool:
        """Give one more block to each of `slots`, all of the group, if no eviction or preemption is needed.

        Args:
            group: The group.
            slots: Distinct slots, [n].
            tenant: The tenant of all, or -1 if they differ.

        Returns:
            False, with nothing changed, if the free blocks or the quota do not suffice.
        """
        s, pool, each = self._sequences, group.pool, 1 + group.window_pages
        owners = [tenant] if tenant >= 0 else s.tenant[slots].tolist()
        tenants = set(owners)
        if len(tenants) > 1 and (self._tenants.has_quotas or pool.free < slots.size * each):
            return False
        if len(tenants) == 1 and pool.available(owners[0]) < slots.size * each:
            return False
        for tenant in sorted(tenants):
            rows = slots if len(tenants) == 1 else slots[s.tenant[slots] == tenant]
            columns = s.used[rows]
            fresh = pool.allocate(tenant, rows.size * each)
            if each > 1:
                self._windows.extend_each(group, rows, columns, fresh[rows.size :])
                fresh = fresh[: rows.size]
            s.table[rows, columns] = fresh
            s.used[rows] = columns + ONE
            s.changed_cells.append((rows, columns))
        return True

    def grow_to(self, group: Group, slots: Slots, lengths: Slots) -> bool:
        """Give rows of one tenant blocks for `lengths` tokens, free or cached ones.

        Args:
            group: The group.
            slots: The slots of the rows, [n]. The blocks that they hold are not enough.
            lengths: Tokens of each, [n].

        Returns:
            False, with nothing changed, if the tenant could get them only by the eviction of a sequence, or not at all.
        """
        s, pool, tenant = self._sequences, group.pool, int(self._sequences.tenant[slots[0]])
        more = -(-lengths // s.block_size) - s.used[slots]
        count = int(np.add.reduce(more))
        if pool.available(tenant) < count * (1 + group.window_pages):
            return False
        fresh = pool.allocate(tenant, count * (1 + group.window_pages))
        self._extend(slots, more, fresh[:count])
        if group.window_pages:
            self._windows.extend(group, slots, more, fresh[count:])
        return True

    def unwritable(self, slots: Slots, start: Slots, end: Slots | None = None) -> tuple[Slots, Slots]:
        """Find blocks in positions [start, end) that must not be written because they are shared or indexed.

        A block counts if its window blocks are. Arguments and result are those of `_unwritable`.
        """
        rows, columns = self._unwritable(slots, start, end)
        if not self._windows.present:
            return rows, columns
        more_rows, more_columns = self._windows.unwritable(slots, start, end)
        if not more_rows.size:
            return rows, columns
        cells = np.concatenate(((rows, columns), (more_rows, more_columns)), axis=1)
        rows, columns = np.unique(cells, axis=1)
        return rows, columns

    def _unwritable(self, slots: Slots, start: Slots, end: Slots | None = None) -> tuple[Slots, Slots]:
        """Find blocks in positions [start, end) that must not be written because they are shared or indexed.

        Takes a fixed number of numpy operations, whatever the ranges.

        Args:
            slots: [n].
            start: First positions, [n].
            end: End positions, [n]; None for one position each.

        Returns:
            (row, column) index arrays: row indexes `slots`, column indexes the block table.
        """
        s, blocks = self._sequences, self._blocks
        first = start // s.block_size
        if end is None or not np.count_nonzero((end - 1) // s.block_size != first):  # decodes: one block for each row
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
        """Append more[i] of the `fresh` blocks to the table of slots[i]."""
        s = self._sequences
        rows = np.repeat(slots, more)
        columns = np.arange(rows.size) + np.repeat(s.used[slots] + more - np.cumsum(more), more)
        s.table[rows, columns] = fresh
        s.used[slots] += more
        s.changed_cells.append((rows, columns))
        s.changed_rows.append(slots)

    def _replace_block(self, group: Group, slot: int, column: int, fresh: int, *windows: int) -> None:
        """Copy-on-write: replace a block that the sequence may not write by `fresh`, with the KV it had there.

        Its window blocks, if it has some, are replaced by `windows`.
        """
        s = self._sequences
        old = [int(s.table[slot, column])]
        if windows:
            old += self._windows.replace(group, slot, column, list(windows))
        with_kv = min(int(s.scheduled[slot]) - column * s.block_size, s.block_size)
        last = int(s.last_step[slot])
        if with_kv > 0:
            origins = [group.copy_block(*pair, with_kv) for pair in zip(old, (fresh, *windows), strict=True)]
            last = s.last_step[slot] = group.next_step
            group.pool.await_step(last)
            group.pool.touch(origins, last)
        group.release(np.array(old, np.int64), last)
        s.table[slot, column] = fresh
        s.changed_cells.append((np.array([slot]), np.array([column])))
        s.changed_rows.append(np.array([slot]))
