"""Invariants that are cheap enough for every event: a second opinion, written apart from the core's own checks."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.core.cache.blocks import CACHED, FREE, QUARANTINED, REFERENCED
from coordinator.core.machine import Machine
from kvforge.protocol.messages import Step
from kvforge.protocol.tables import TablesWriter
from tests.simulation.isolation import Writers
from tests.simulation.settings import tenant_of


def _every(holds: npt.NDArray[np.bool_]) -> bool:
    """all(), which for a few dozen takes several times as long."""
    return b"\0" not in holds.tobytes()


def _some(holds: npt.NDArray[np.bool_]) -> bool:
    """any(), likewise."""
    return b"\1" in holds.tobytes()


class Checker:
    """Checks one machine against itself and against its published tables. Keeps scratch arrays of the right shape."""

    def __init__(self, machine: Machine, tables: TablesWriter) -> None:
        self._machine, self._tables = machine, tables
        sequences = machine.cache.sequences
        self._columns = np.arange(sequences.table.shape[1])
        self._blocks = machine.cache.blocks.refcount.size
        assert machine.cache.blocks.state.itemsize == 1
        self._flying: dict[int, deque[tuple[int, Any]]] = {}
        self._payers: dict[int, set[str]] = {}
        self._writers = Writers(machine) if machine.limits.cache.zero_on_tenant_change else None

    def goes_on(self, before: Checker) -> None:
        """The machine was made anew where that one's was: the same steps are under way."""
        self._flying, self._payers = before._flying, before._payers

    def lengths(self) -> None:
        """Every sequence holds the blocks of its length, and KV for no more than its tokens."""
        s = self._machine.cache.sequences
        tokens = s.length + s.pending
        needed = (tokens + (s.block_size - 1)) // s.block_size
        assert _every(s.used == needed * (s.pool >= 0)), "blocks held disagree with a length"
        assert _every((s.computed <= s.scheduled) & (s.scheduled <= tokens)), "KV beyond the tokens"

    def light(self) -> None:
        """Design section 3, 1 to 5, in two dozen numpy calls: holders are counted exactly, states agree with counts,
        every pool adds up, and free lists hold free blocks once each."""
        s, blocks = self._machine.cache.sequences, self._machine.cache.blocks
        used = self._columns < s.used[:, None]
        holders = np.bincount(s.table[used], minlength=self._blocks)
        for block, names in blocks.external.items():
            holders[block] += len(names)
        assert _every(holders == blocks.refcount), f"holders {holders.tolist()}, counts {blocks.refcount.tolist()}"
        referenced, is_free = blocks.state == REFERENCED, blocks.state == FREE
        assert _every(referenced == (holders > 0)), "a state disagrees with its count"
        if blocks.external or self._payers:
            self._charged()
        for group in self._machine.cache.groups.values():
            pool = group.pool
            states = blocks.state[pool.base : pool.base + pool.count].tobytes()  # a byte for each block
            assert states.count(FREE) == pool.free, "free"
            listed = pool._stack[: pool.free]
            assert len(set(listed.tolist())) == pool.free, "a free list holds a block twice"
            assert _every(is_free[listed]), "a free list holds a block that is not free"
            assert states.count(CACHED) == pool.cached, "cached"
            assert states.count(QUARANTINED) == pool.quarantined, "quarantined"
            if group.sent:
                self._untouchable(group, referenced | (blocks.state == QUARANTINED))

    def _charged(self) -> None:
        """A block that has names is charged to a tenant that named it, not to the one that computed it."""
        cache = self._machine.cache
        named = cache.blocks.external.items()
        self._payers = {b: self._payers.get(b, set()) | {tenant_of(name) for name in names} for b, names in named}
        for block, payers in self._payers.items():
            owner = cache.tenants.names[int(cache.blocks.owner[block])]
            assert owner in payers, f"block {block} is charged to {owner}, and {sorted(payers)} named it"

    def _untouchable(self, group: Any, kept: npt.NDArray[np.bool_]) -> None:
        """No block that a step under way may touch is free, or cached and so about to be given to someone else.

        kept: [blocks], which are neither.
        """
        flying = self._flying.setdefault(group.epoch, deque())
        while flying and flying[0][0] < group.sent[0].step_id:
            flying.popleft()
        for step_id, ids in flying:
            assert _every(kept[ids]), f"step {step_id} may touch a block that was given up"

    def planned(self, group: Any, step: Step) -> None:
        """Each block that a new step writes has one holder and is not indexed. Keeps in mind what it touches."""
        s, blocks = self._machine.cache.sequences, self._machine.cache.blocks
        touched: list[int] = []
        written: list[int] = []
        rows = zip(s.table[step.slots].tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        for row, start, count in rows:
            end = -(-(start + count) // s.block_size)
            touched += row[:end]
            written += row[start // s.block_size : end]
        assert _every(blocks.refcount[written] == 1), f"step {step.step_id} writes a block that another one holds"
        assert not _some(blocks.indexed[written]), f"step {step.step_id} writes a block of the prefix index"
        copies = step.copies.tolist()
        flying = self._flying.setdefault(group.epoch, deque())
        flying.append((step.step_id, np.array([*touched, *copies[0::3], *copies[1::3]], np.int64)))
        if self._writers is not None:
            self._writers.planned(group, step)

    def turned(self, now_us: int) -> None:
        """After a Turn no sequence is there whose time to live is over, and nothing waits for a step that no worker
        was sent."""
        s, cache = self._machine.cache.sequences, self._machine.cache
        limited = s.owned & (s.idle_ttl_us > 0)
        if _some(limited):
            over = limited & (s.request == 0) & (s.accessed_us + s.idle_ttl_us <= now_us)
            assert not _some(over), f"sequence {s.id[over][0]} outlives its time to live"
        for group in cache.groups.values():
            if not group.sent and not group.away:
                waiting = [slot for pool, _, slot in s._quarantine if pool == group.number]
                assert not (group.pool.quarantined or waiting), f"{group.name} waits for a step that was never sent"

    def full(self) -> None:
        """Everything the core can say about itself."""
        self._machine.check_invariants()

    def published(self) -> None:
        """What readers see is what the core knows."""
        s, blocks, tables = self._machine.cache.sequences, self._machine.cache.blocks, self._tables
        assert not _some(tables.row_version & 1 != 0), "a row was left open"
        # As lists: there are few, and numpy would make other types of them first.
        assert tables.row_length.tolist() == s.length.tolist(), "a length is not published"
        assert tables.row_blocks.tolist() == s.used.tolist(), "a count of blocks is not published"
        assert tables.row_sequence.tolist() == s.id.tolist(), "a sequence id is not published"
        wrong = (tables.block_table != s.table) & (self._columns < s.used[:, None])
        assert not _some(wrong), f"row {np.argwhere(wrong)[0][0]} is published with other blocks"
        assert _every(tables.block_refcount == blocks.refcount), "a reference count is not published"
        wrong = tables.block_generation != blocks.generation
        for group in self._machine.cache.groups.values():
            pool = group.pool
            assert not _some(wrong[pool.base : pool.base + pool.count]), "a generation is not published"
        # Of pools that are gone a new table says nothing.
        assert not _some(wrong & (tables.block_generation != 0)), "a generation is not published"


class Generations:
    """A block that is given up gets a new generation: an old name never names new content."""

    def __init__(self, machine: Machine) -> None:
        self._blocks = machine.cache.blocks
        self._was_free = self._blocks.state == FREE
        self._before = self._blocks.generation.copy()

    def check(self) -> None:
        """Compares with the event before."""
        blocks = self._blocks
        free = blocks.state == FREE
        stale = free & ~self._was_free & (blocks.generation == self._before)
        assert not _some(stale), f"block {np.flatnonzero(stale)[0]} was freed and keeps its generation"
        assert _every(blocks.generation >= self._before), "a generation went back"
        self._was_free = free
        self._before = blocks.generation.copy()
