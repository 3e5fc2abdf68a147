"""Windows: the KV of layers that see only the last tokens of a sequence, in blocks of their own.

A model may have layers that see all tokens, and layers that see `window` tokens. The KV of the former is in the block
table. That of the latter, for each block of the table, is in `window_pages` further blocks, and only for the blocks
that a token to come can see: `window_first` to `window_end` of the sequence. They are reserved for the tokens that a
step writes, and released as soon as the tokens behind their last one are acknowledged. One token more than the window
is kept, because the last token may be computed again.

The ids are in the ring of the sequence, a part of its row in the table of states: block j has the columns of
j % `window_blocks`. The ring is long enough for all blocks that steps in flight see and write, so a column is reused
only when no step reads it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvforge.protocol.tables import ring_items

from .blocks import NO_BLOCKS, WINDOW, BlockIds, Blocks
from .groups import Group
from .leaving_rows import LeavingRows
from .sequences import NO_SLOTS, ONE, ZERO, ChangedRings, Sequences, Slots

NO_CELLS = (NO_SLOTS, NO_SLOTS)


def ring_blocks(window: int, ahead: int, block_size: int, blocks_max: int) -> int:
    """Return how many consecutive blocks the ring of a sequence must name.

    Args:
        window: Tokens that the layers see.
        ahead: How many tokens steps in flight may take a sequence beyond its acknowledged ones.
        block_size: Tokens of a block.
        blocks_max: Blocks of the longest sequence.
    """
    return min(-(-(window + ahead) // block_size) + 2, blocks_max)


class Layout(Protocol):
    """How much a model's windows take; see `Group`."""

    @property
    def window(self) -> int:
        """Tokens that the layers see."""

    @property
    def window_pages(self) -> int:
        """Blocks for one block of tokens; 0 without such layers."""


class Windows:
    """Places the window blocks of sequences, and releases those behind the window.

    Attributes:
        present: Some group has had windows. Nothing else is looked at before.
        rings: Views of the table of states; see `ring_items`.
    """

    def __init__(self, sequences: Sequences, blocks: Blocks, groups: dict[int, Group], step_tokens: int) -> None:
        self._sequences, self._blocks, self._groups = sequences, blocks, groups
        self._step_tokens, self._size = step_tokens, sequences.block_size
        self.rings: dict[tuple[int, int], npt.NDArray[np.void]] = {}

    @property
    def present(self) -> bool:
        """Whether a group has windows."""
        return any(group.window_pages for group in self._groups.values())

    # ----------------------------------------------------------------------------------------------------- what is due

    def first(self, group: Group, tokens: int) -> int:
        """Return the first block that a sequence with KV of so many tokens must hold."""
        return max(0, tokens - group.window) // self._size

    def most(self, layout: Layout, blocks: int) -> int:
        """Return how many blocks of a pool the windows of a sequence take while it grows to `blocks` blocks.

        One step after the other: those that run ahead may take more.
        """
        if not layout.window_pages:
            return 0
        return min(blocks, -(-(layout.window + self._step_tokens) // self._size) + 1) * layout.window_pages

    def longest(self, layout: Layout, count: int) -> int:
        """Return the most blocks of KV that a sequence can have if these and its windows have `count` blocks."""
        pages = layout.window_pages
        return max(0, count // (1 + pages), count - self.most(layout, count)) if pages else max(0, count)

    def holds(self, group: Group, slot: int, tokens: int) -> bool:
        """Return whether a sequence, or one that shares its blocks, can go on from its first `tokens` tokens."""
        s = self._sequences
        if not group.window_pages:
            return True
        return bool(s.window_first[slot] <= self.first(group, tokens))

    # --------------------------------------------------------------------------------------------------------- content

    def _ring(self, group: Group) -> npt.NDArray[np.void]:
        """Return the rings of all sequences as `ring_items` does: [slots, blocks]."""
        columns = group.state_blocks, group.window_pages
        if (ring := self.rings.get(columns)) is None:
            ring = self.rings[columns] = ring_items(self._sequences.states, *columns)
        return ring

    def ids(self, group: Group, slots: Slots, numbers: Slots) -> BlockIds:
        """Return the window blocks of blocks of sequences: [n] each, [n * window_pages] int64."""
        ring = self._ring(group)
        ids: BlockIds = ring[slots, numbers % group.window_blocks].view(np.int32).astype(np.int64)
        return ids

    def between(self, group: Group, slot: int, first: int, end: int) -> BlockIds:
        """Return the window blocks of a sequence for blocks [first, end), in order: [n * window_pages] int64."""
        if first >= end:
            return NO_BLOCKS
        numbers = np.arange(first, end)
        return self.ids(group, np.full(numbers.size, slot), numbers)

    def of(self, slot: int) -> BlockIds:
        """Return all window blocks that a sequence holds, in order: [n] int64."""
        s = self._sequences
        end = int(s.window_end[slot])
        if not end:
            return NO_BLOCKS
        return self.between(self._groups[int(s.pool[slot])], slot, int(s.window_first[slot]), end)

    def held(self, slots: Slots) -> Slots:
        """Return how many window blocks each sequence holds: [n]."""
        s = self._sequences
        counts = s.window_end[slots] - s.window_first[slots]
        pages = {number: group.window_pages for number, group in self._groups.items()}
        each: Slots = counts * np.array([pages.get(pool, 0) for pool in s.pool[slots].tolist()], np.int64)
        return each

    # ------------------------------------------------------------------------------------------------------------ hits

    def usable(self, group: Group, matched: BlockIds) -> npt.NDArray[np.bool_]:
        """Return for each number of leading blocks whether the window blocks in sight behind them are cached.

        Args:
            group: The group.
            matched: Indexed blocks of a prefix, [n].

        Returns:
            [n + 1] bool. The first is always true.
        """
        windows, counts = group.pool.parts.windows, np.arange(matched.size + 1)
        has = np.array([key in windows for key in group.index.keys(matched).tolist()], np.bool_)
        without = np.concatenate(([0], np.where(has, 0, counts[1:])))  # 1 + the last block without, up to each
        first = np.maximum(counts * self._size - group.window, 0) // self._size
        usable: npt.NDArray[np.bool_] = np.maximum.accumulate(without) <= first
        return usable

    def in_sight(self, group: Group, shared: BlockIds, tokens: int) -> BlockIds:
        """Return cached window blocks of indexed blocks of a prefix.

        Args:
            group: The group.
            shared: The indexed blocks, [n].
            tokens: How many tokens have KV in these and in a partial copy. Only what is in sight behind them counts.

        Returns:
            Ids in order, [n] int64.
        """
        keys = group.index.keys(shared[self.first(group, tokens) :]).tolist()
        return np.array([block for key in keys for block in group.pool.parts.windows[key]], np.int64)

    def note_indexed(self, group: Group, slots: Slots, numbers: Slots, keys: list[int]) -> None:
        """Hang the window blocks of sequences on the entries of their blocks.

        Args:
            group: The group of all.
            slots: [n].
            numbers: Numbers of indexed blocks in their sequences, [n].
            keys: Keys of their entries, [n].
        """
        held = self.has(slots, numbers)
        if np.count_nonzero(held) < held.size:
            slots, numbers, keys = slots[held], numbers[held], [key for key, has in zip(keys, held, strict=True) if has]
        if slots.size:
            group.pool.parts.add_windows(keys, self.ids(group, slots, numbers).reshape(-1, group.window_pages))

    # --------------------------------------------------------------------------------------------------------- changes

    def put(self, group: Group, slots: Slots, numbers: Slots, ids: BlockIds) -> None:
        """Write window blocks into the rings of sequences.

        Args:
            group: The group of all.
            slots: [n].
            numbers: Numbers of blocks in their sequences, [n].
            ids: Their window blocks, [n * window_pages].
        """
        s, ids32, places = self._sequences, ids.astype(np.int32), numbers % group.window_blocks
        ring = self._ring(group)
        ring[slots, places] = ids32.view(ring.dtype)
        self._blocks.kind[ids] = WINDOW
        s.changed_rings.append(ChangedRings(slots, places, ids32, group.state_blocks, group.window_pages))

    def begin(self, group: Group, slot: int, first: int, shared: BlockIds, fresh: BlockIds) -> None:
        """Give a sequence that moves in its window blocks, which it holds already.

        Args:
            group: Its group.
            slot: Its slot.
            first: The number of the first block that has some.
            shared: Those of full blocks that others have too.
            fresh: Those of the block behind these, if a part of it is copied.
        """
        s, ids = self._sequences, np.concatenate((shared, fresh))
        count = ids.size // group.window_pages
        s.window_first[slot], s.window_end[slot] = first, first + count
        if count:
            self.put(group, np.full(count, slot), np.arange(first, first + count), ids)

    def missing(self, slots: Slots, ends: Slots, lengths: Slots) -> Slots:
        """Return how many blocks lack their window blocks if a step writes positions before `ends`: [n].

        Args:
            slots: [n].
            ends: Ends of the positions that the step writes, [n].
            lengths: Tokens that the sequences shall have room for then, [n].
        """
        s, size = self._sequences, self._size
        upto = np.minimum(-(-lengths // size), ends // size + 1)  # the token that the step samples is written next
        more: Slots = np.maximum(upto - s.window_end[slots], 0)
        if len(self._groups) > 1:
            without = [number for number, group in self._groups.items() if not group.window_pages]
            more[np.isin(s.pool[slots], without)] = 0
        return more

    def extend_each(self, group: Group, slots: Slots, end: Slots, fresh: BlockIds) -> None:
        """Add fresh window blocks for one further block of each of [n] slots, which have them up to block end[i]."""
        self.put(group, slots, end, fresh)
        self._sequences.window_end[slots] = end + ONE

    def extend(self, group: Group, slots: Slots, more: Slots, fresh: BlockIds) -> None:
        """Add fresh window blocks for more[i] further blocks of slots[i]: [n], [n], [sum(more) * window_pages]."""
        s = self._sequences
        end = s.window_end[slots]
        self.put(group, *_consecutive(slots, more, end), fresh)
        s.window_end[slots] = end + more

    def unwritable(self, slots: Slots, start: Slots, end: Slots | None) -> tuple[Slots, Slots]:
        """Find blocks with window blocks that must not be written; arguments and result as in `BlockTables`."""
        s, blocks = self._sequences, self._blocks
        low = np.maximum(start // self._size, s.window_first[slots])
        high = start // self._size + 1 if end is None else -(-end // self._size)
        widths = np.maximum(np.minimum(high, s.window_end[slots]) - low, 0)
        if not np.count_nonzero(widths):
            return NO_CELLS
        rows, numbers = _consecutive(np.arange(slots.size), widths, low)
        bad = np.zeros(rows.size, np.bool_)
        pools = s.pool[slots[rows]]
        for number in set(pools.tolist()):
            mine = pools == number
            group = self._groups[number]
            ids = self.ids(group, slots[rows[mine]], numbers[mine]).reshape(-1, group.window_pages)
            bad[mine] = ((blocks.refcount[ids] > 1) | blocks.indexed[ids]).any(axis=1)
        return rows[bad], numbers[bad]

    def has(self, slots: Slots, columns: Slots) -> npt.NDArray[np.bool_]:
        """Return whether sequences hold window blocks for these of their blocks: [n] each."""
        s = self._sequences
        held: npt.NDArray[np.bool_] = (s.window_first[slots] <= columns) & (columns < s.window_end[slots])
        return held

    def out_of_sight(self, group: Group, slots: Slots) -> tuple[Slots, Slots]:
        """Return the blocks with window blocks that no token to come can see, now that further tokens are acknowledged.

        Most turns find none, or one of each of few rows.

        Args:
            group: The group.
            slots: The rows of a step that was acknowledged, [n]. They may have left the group meanwhile.

        Returns:
            Slots and numbers of blocks, [m] each, those of a slot in order.
        """
        s, size, sampled = self._sequences, self._size, group.sampled_rows
        steady = sampled if sampled is not None and sampled.rows is slots else None
        if steady is not None and steady.leaving is not None:
            return steady.leaving.next(s.window_first)
        before = s.window_first[slots]
        in_sight = before * size + (group.window + size) - s.computed[slots]
        (at,) = ((in_sight <= ZERO) & (s.window_end[slots] > ZERO) & (s.pool[slots] == group.number)).nonzero()
        counts = ONE + -in_sight[at] // size
        if steady is not None:
            in_sight[at] += counts * size
            steady.leaving = LeavingRows(slots, in_sight, size)
        return _consecutive(slots[at], counts, before[at])

    def unindexed(self, slots: Slots, numbers: Slots) -> bool:
        """Return whether one of these full blocks, [n] each, is not indexed yet."""
        return bool(np.count_nonzero(numbers >= self._sequences.hashed[slots]))

    def release_behind(self, group: Group, slots: Slots, numbers: Slots) -> None:
        """Release window blocks that are out of sight. Steps in flight begin behind these tokens.

        Args:
            group: The group of all.
            slots: [n].
            numbers: The first blocks that they hold window blocks for, [n], those of a slot in order.
        """
        s = self._sequences
        ids = self.ids(group, slots, numbers)
        s.window_first[slots] = numbers + ONE
        if group.release_sole(ids):
            return
        if np.unique(ids).size == ids.size:
            group.release(ids, 0)
            return
        each = ids.reshape(slots.size, -1)
        for slot in dict.fromkeys(slots.tolist()):  # forks share them
            group.release(each[slots == slot].reshape(-1), 0)

    def trim(self, group: Group, slot: int, keep: int) -> None:
        """Release the window blocks of a sequence from block `keep` on."""
        s = self._sequences
        if s.window_end[slot] > keep:
            keep = max(keep, int(s.window_first[slot]))
            group.release(self.between(group, slot, keep, int(s.window_end[slot])), int(s.last_step[slot]))
            s.window_end[slot] = keep

    def replace(self, group: Group, slot: int, number: int, fresh: list[int]) -> list[int]:
        """Replace the window blocks of a block by fresh ones, and return those it had."""
        old: list[int] = self.between(group, slot, number, number + 1).tolist()
        self.put(group, np.array([slot]), np.array([number]), np.array(fresh, np.int64))
        return old

    # ------------------------------------------------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Check that sequences hold window blocks for all that a token to come can see, and for what is written."""
        s = self._sequences
        assert (s.window_first <= s.window_end).all() and (s.window_end <= s.used).all(), "window blocks without KV"
        for slot in s.slot_of.values():
            group = self._groups.get(int(s.pool[slot]))
            first, end = int(s.window_first[slot]), int(s.window_end[slot])
            if group is None or not group.window_pages:
                assert not end, "window blocks without a window"
                continue
            computed, ids = int(s.computed[slot]), self.of(slot)
            assert first >= self.first(group, computed), "a block out of sight is held"
            assert end - first <= group.window_blocks, "a ring holds more blocks than it has places"
            loading = group.host is not None and slot in group.host.loads  # goes on behind what it gets, or not at all
            known = int(s.scheduled[slot]) if loading else computed
            assert first * s.block_size <= max(0, known + 1 - group.window), "a block in sight was released"
            assert end >= s.blocks_for(int(s.scheduled[slot])), "KV is written without window blocks"
            assert len(set(ids.tolist())) == ids.size, "a window block is twice in one ring"
            assert (self._blocks.kind[ids] == WINDOW).all(), "a ring names a block of another kind"


def _consecutive(rows: Slots, counts: Slots, first: Slots) -> tuple[Slots, Slots]:
    """Return counts[i] times rows[i], and as many consecutive numbers from first[i]: [n] each, [sum(counts)] twice."""
    if np.count_nonzero(counts == ONE) == counts.size:  # decodes
        return rows, first
    repeated = np.repeat(rows, counts)
    numbers = np.arange(repeated.size) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return repeated, numbers
