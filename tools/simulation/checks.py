"""Invariants cheap enough to check after every event, implemented independently of the core's own checks.

Most use lists and bytes, because numpy takes twice as long for a few dozen numbers.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from kvforge.coordinator.core.cache.blocks import CACHED, CHECKPOINT, FREE, KV, QUARANTINED, REFERENCED, WINDOW
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.machine import Machine
from kvforge.protocol.messages import Step
from kvforge.protocol.tables import TablesWriter, ring_items
from tools.simulation.isolation import Writers
from tools.simulation.settings import tenant_of


def _some(holds: npt.NDArray[np.bool_]) -> bool:
    """Return any(); faster than numpy for a few dozen values."""
    return b"\1" in holds.tobytes()


def _marks(*states: int) -> bytes:
    """Return a translation table that maps block states to 1 if they are among `states`."""
    return bytes(state in states for state in range(256))


NO_SLOTS = np.zeros(0, np.bool_)
IS_REFERENCED, IS_KEPT = _marks(REFERENCED), _marks(REFERENCED, QUARANTINED)


class Checker:
    """Checks one machine against itself and against its published tables."""

    def __init__(self, machine: Machine, tables: TablesWriter) -> None:
        self._machine, self._tables = machine, tables
        self._blocks = machine.cache.blocks.refcount.size
        assert machine.cache.blocks.state.itemsize == 1
        self._flying: dict[int, deque[tuple[int, array[int]]]] = {}
        self._payers: dict[int, set[str]] = {}
        self._written: dict[int, dict[int, int]] = {}  # steps that last copied to a block, by epoch
        self._stateful = machine.limits.bounds.state_blocks_max > 1
        self._writers = Writers(machine) if machine.limits.cache.zero_on_tenant_change else None

    def goes_on(self, before: Checker) -> None:
        """Take over the steps in flight of the machine that was rebuilt."""
        self._flying, self._payers, self._written = before._flying, before._payers, before._written

    def lengths(self) -> None:
        """Check that every sequence holds the blocks of its length, and KV for at most its tokens."""
        s = self._machine.cache.sequences
        columns = (s.length, s.pending, s.used, s.pool, s.computed, s.scheduled)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for length, pending, used, pool, computed, scheduled in rows:
            tokens = length + pending
            assert used == (0 if pool < 0 else -(-tokens // s.block_size)), "a length does not match its blocks"
            assert computed <= scheduled <= tokens, "KV beyond the tokens"

    def light(self) -> None:
        """Check design section 3, 1 to 5.

        Holder counts are exact, states match counts, every pool adds up, and free lists hold each free block once.
        """
        s, blocks = self._machine.cache.sequences, self._machine.cache.blocks
        holders = [0] * self._blocks
        for row, used in zip(s.table.tolist(), s.used.tolist(), strict=True):
            for block in row[:used]:
                holders[block] += 1
        for row, used in zip(s.states.tolist(), s.state_used.tolist(), strict=True) if self._stateful else ():
            for block in row[:used]:
                holders[block] += 1
        for group in self._machine.cache.groups.values():
            for forming in group.forming:
                for block in forming.blocks:
                    holders[block] += 1
            if group.window_pages:
                for slot in np.flatnonzero(s.pool == group.number).tolist():
                    for block in self._windows(group, slot, int(s.window_first[slot]), int(s.window_end[slot])):
                        holders[block] += 1
        for block, names in blocks.external.items():
            holders[block] += len(names)
        counts = blocks.refcount.tolist()
        assert holders == counts, f"holders {holders}, counts {counts}"
        states = blocks.state.tobytes()
        assert states.translate(IS_REFERENCED) == (blocks.refcount > 0).tobytes(), "a state does not match its count"
        if blocks.external or self._payers:
            self._charged()
        if s.pinned.any():
            self._pinned()
        for group in self._machine.cache.groups.values():
            pool = group.pool
            own = states[pool.base : pool.base + pool.count]
            assert own.count(FREE) == pool.free, "free"
            listed = pool.free_ids.tolist()
            assert len(set(listed)) == pool.free, "a free list holds a block twice"
            assert {states[block] for block in listed} <= {FREE}, "a free list holds a block that is not free"
            assert own.count(CACHED) == pool.cached, "cached"
            assert own.count(QUARANTINED) == pool.quarantined, "quarantined"
            if group.sent:
                self._untouchable(group, states.translate(IS_KEPT))

    def _windows(self, group: Group, slot: int, first: int, end: int) -> list[int]:
        """Return the window blocks of a row for its blocks [first, end)."""
        row: list[int] = self._machine.cache.sequences.states[slot].tolist()
        pages, ring = group.window_pages, group.window_blocks
        return [
            row[group.state_blocks + number % ring * pages + i] for number in range(first, end) for i in range(pages)
        ]

    def _pinned(self) -> None:
        """Check that pins hold no more than their share of a pool and of their tenant's ceiling."""
        cache = self._machine.cache
        s, share = cache.sequences, self._machine.limits.bounds.pinned_percent_max / 100
        for group in cache.groups.values():
            held: dict[int, set[int]] = {}
            for slot in np.flatnonzero(s.pinned & (s.pool == group.number)).tolist():
                held.setdefault(int(s.tenant[slot]), set()).update(s.blocks_of(slot).tolist())
            together = len(set().union(*held.values()))
            assert together <= share * group.pool.count, f"pins hold {together} blocks of {group.name}"
            for tenant, own in held.items():
                assert len(own) <= share * int(cache.tenants.ceiling[tenant]), (
                    f"pins of a tenant hold {len(own)} blocks"
                )

    def _charged(self) -> None:
        """Check that a named block is charged to a tenant that named it, not to the one that computed it."""
        cache = self._machine.cache
        named = cache.blocks.external.items()
        self._payers = {b: self._payers.get(b, set()) | {tenant_of(name) for name in names} for b, names in named}
        for block, payers in self._payers.items():
            owner = cache.tenants.names[int(cache.blocks.owner[block])]
            assert owner in payers, f"block {block} is charged to {owner}, but named by {sorted(payers)}"

    def _untouchable(self, group: Any, kept: bytes) -> None:
        """Check that no block of a step in flight is free, or cached and therefore about to be reallocated.

        Args:
            group: the worker group.
            kept: for each block, whether it is neither free nor cached.
        """
        flying = self._flying.setdefault(group.epoch, deque())
        while flying and flying[0][0] < group.sent[0].step_id:
            flying.popleft()
        for step_id, ids in flying:
            assert all(map(kept.__getitem__, ids)), f"step {step_id} may touch a released block"

    def planned(self, group: Any, step: Step) -> None:
        """Check that a new step writes only blocks with one holder and no index entry; record all that it touches."""
        s, blocks = self._machine.cache.sequences, self._machine.cache.blocks
        touched: list[int] = []
        written: list[int] = []
        rows = zip(s.table[step.slots].tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        for row, start, count in rows:
            end = -(-(start + count) // s.block_size)
            touched += row[:end]
            written += row[start // s.block_size : end]
        if self._stateful:
            states = s.states[step.slots][:, : group.state_blocks].reshape(-1).tolist()
            touched += states
            written += states
            self._checkpoints(group, step)
        if group.window_pages:
            for slot, start, count in zip(*(a.tolist() for a in (step.slots, step.starts, step.counts)), strict=True):
                end, size = -(-(start + count) // s.block_size), s.block_size
                touched += self._windows(group, slot, max(0, start + 1 - group.window) // size, end)
                written += self._windows(group, slot, start // size, end)
        holders = blocks.refcount[written].tolist()
        assert holders.count(1) == len(holders), f"step {step.step_id} writes a shared block"
        assert len(set(written)) == len(written), f"step {step.step_id} writes a block twice"
        assert not _some(blocks.indexed[written]), f"step {step.step_id} writes an indexed block"
        copies = step.copies.tolist()
        flying = self._flying.setdefault(group.epoch, deque())
        touched += step.host_reads[0::4].tolist()
        flying.append((step.step_id, array("q", [*touched, *copies[0::3], *copies[1::3]])))
        if self._writers is not None:
            self._writers.planned(group, step)

    def _checkpoints(self, group: Any, step: Step) -> None:
        """Check that states are copied from checkpoints that an acknowledged step wrote, by the steps seen so far."""
        kind, size = self._machine.cache.blocks.kind, self._machine.cache.sequences.block_size
        written = self._written.setdefault(group.epoch, {})
        for source, target, tokens in step.copies.reshape(-1, 3).tolist():
            whole = kind[source] != kind[target] or kind[source] not in (KV, WINDOW)
            assert not whole or tokens == size, "a part of a state is copied"
            if kind[source] == CHECKPOINT and source in written:
                assert written[source] <= group.pool.done_step, f"step {step.step_id} hits a checkpoint in the making"
            written[target] = step.step_id

    def turned(self, now_us: int) -> None:
        """Check after a turn that no expired sequence is left, and that no block waits for a step that was not sent."""
        s, cache = self._machine.cache.sequences, self._machine.cache
        limited = s.owned & (s.idle_ttl_us > 0) if any(s.idle_ttl_us.tolist()) else NO_SLOTS
        if _some(limited):
            over = limited & (s.request == 0) & (s.accessed_us + s.idle_ttl_us <= now_us)
            assert not _some(over), f"sequence {s.id[over][0]} outlives its time to live"
        for group in cache.groups.values():
            if not group.sent and not group.away:
                waiting = [slot for pool, _, slot in s.quarantine if pool == group.number]
                assert not (group.pool.quarantined or waiting), f"{group.name} waits for a step that was never sent"

    def full(self) -> None:
        """Run the core's own invariant checks."""
        self._machine.check_invariants()

    def published(self) -> None:
        """Check that readers of the published tables see the core's state."""
        s, blocks, tables = self._machine.cache.sequences, self._machine.cache.blocks, self._tables
        assert not any(version & 1 for version in tables.row_version.tolist()), "a row is locked after publishing"
        assert tables.row_length.tolist() == s.length.tolist(), "a length is not published"
        used = s.used.tolist()
        assert tables.row_blocks.tolist() == used, "a count of blocks is not published"
        assert tables.row_sequence.tolist() == s.id.tolist(), "a sequence id is not published"
        rows = zip(tables.block_table.tolist(), s.table.tolist(), used, strict=True)
        wrong = [slot for slot, (stored, row, width) in enumerate(rows) if stored[:width] != row[:width]]
        assert not wrong, f"row {wrong[0]} is published with wrong blocks"
        if self._stateful:
            for slot in np.flatnonzero(s.window_end).tolist():
                group = self._machine.cache.groups[int(s.pool[slot])]
                places = np.arange(s.window_first[slot], s.window_end[slot]) % group.window_blocks
                stored, known = (
                    ring_items(table, group.state_blocks, group.window_pages)[slot, places].tobytes()
                    for table in (tables.state_table, s.states)
                )
                assert stored == known, f"row {slot} is published with wrong window blocks"
            held = s.state_used.tolist()
            assert tables.row_states.tolist() == held, "a count of state blocks is not published"
            for slot, width in enumerate(held):
                stored = tables.state_table[slot, :width].tolist()
                assert stored == s.states[slot, :width].tolist(), f"row {slot} is published with wrong state blocks"
        assert tables.block_refcount.tolist() == blocks.refcount.tolist(), "a reference count is not published"
        assert tables.block_state.tolist() == blocks.state.tolist(), "a state of a block is not published"
        stored, known = tables.block_generation.tolist(), blocks.generation.tolist()
        if stored != known:  # a new table has no data about lost pools
            pools = [group.pool for group in self._machine.cache.groups.values()]
            there = {block for pool in pools for block in range(pool.base, pool.base + pool.count)}
            wrong = [b for b, (says, is_) in enumerate(zip(stored, known, strict=True)) if says != is_]
            assert not any(stored[block] or block in there for block in wrong), "a generation is not published"


class Generations:
    """Checks that a released block gets a new generation, so that stale references never reach new content."""

    def __init__(self, machine: Machine) -> None:
        self._blocks = machine.cache.blocks
        self._was_free, self._before = self._blocks.state == FREE, self._blocks.generation.copy()
        self._seen = self._blocks.state.tobytes(), self._before.tobytes()

    def check(self) -> None:
        """Compare with the state after the previous event."""
        blocks = self._blocks
        seen = blocks.state.tobytes(), blocks.generation.tobytes()
        if seen == self._seen:
            return
        free = blocks.state == FREE
        stale = free & ~self._was_free & (blocks.generation == self._before)
        assert not _some(stale), f"block {np.flatnonzero(stale)[0]} was freed and keeps its generation"
        assert not _some(blocks.generation < self._before), "a generation decreased"
        self._seen, self._was_free, self._before = seen, free, blocks.generation.copy()
