"""Faults to plant in how recurrent states are placed, copied and reused; see `faults`.

They need worlds with such a model, so they are apart from the faults of all worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache import states
from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.checkpoints import Checkpoints
from kvforge.coordinator.core.cache.groups import NO_KEY, Group
from kvforge.coordinator.core.cache.placement import Placement
from kvforge.coordinator.core.cache.residency import Residency
from kvforge.coordinator.core.scheduling import scheduler
from tools.simulation.faults import Patch

FAULTS_OF_STATES: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_STATES[make.__name__] = make
    return make


@fault
def checkpoint_one_block_off() -> list[Patch]:
    """A hit takes one block more than the checkpoint is behind."""
    real = Residency._plan_with_state

    def plan(self: Residency, group: Group, salt: int, tokens: Any, hashes: Any, shared_max: int | None) -> Placement:
        found = real(self, group, salt, tokens, hashes, shared_max)
        matched, count = group.index.match(salt, tokens, hashes), found.hits.size
        if count and matched.size > count and (count + 1) * self._blocks.block_size < tokens.size:
            found.hits, found.needed = matched[: count + 1], found.needed - 1
        return found

    return [(Residency, "_plan_with_state", plan)]


@fault
def checkpoint_never_acknowledged() -> list[Patch]:
    """A checkpoint becomes an entry as soon as its KV block is indexed, before its copy was acknowledged."""
    real = Checkpoints.computed

    def computed(self: Checkpoints, group: Group) -> None:
        real(self, group)
        for forming in group.forming:
            known = forming.key in group.pool.checkpoints or not group.index.alive(forming.key)
            if forming.key != NO_KEY and not known:
                group.pool.add_checkpoint(forming.key, forming.blocks)

    return [(Checkpoints, "computed", computed)]


@fault
def state_not_restored_after_a_rewind() -> list[Patch]:
    """A sequence that loses tokens, or KV in flight, goes on with the state that it has."""
    real = Residency.trim

    def trim(self: Residency, slot: int) -> None:
        s = self._sequences
        s.scheduled[slot] = s.computed[slot]
        real(self, slot)

    return [(Residency, "trim", trim)]


@fault
def fork_shares_its_parents_state() -> list[Patch]:
    """A fork holds its parent's blocks of the state in place of its own."""
    real = Residency.fork

    def fork(self: Residency, slot: int, most: int | None = None) -> int:
        child, s = real(self, slot, most), self._sequences
        used = int(s.state_used[slot])
        if used and s.pool[child] < 0 and not s.running[slot]:
            group = self._groups[int(s.pool[slot])]
            group.hold(np.concatenate([s.blocks_of(slot), s.states_of(slot)]))
            for array in (s.pool, s.used, s.state_used, s.hashed, s.chain, s.parent, s.last_step):
                array[child] = array[slot]
            for array in (s.computed, s.scheduled):
                array[child] = array[slot]
            s.table[child], s.states[child] = s.table[slot], s.states[slot]
            s.changed_states.append(child)
            self._row_changed(child)
        return child

    return [(Residency, "fork", fork)]


@fault
def checkpoint_outlives_its_block() -> list[Patch]:
    """The entry of a KV block is removed, and the checkpoint that hangs on it stays."""

    def remove_entry(self: BlockPool, block: int) -> None:
        self.index.remove(block)

    return [(BlockPool, "_remove_entry", remove_entry)]


@fault
def part_of_a_checkpoint_evicted() -> list[Patch]:
    """A checkpoint is evicted block by block."""
    real = BlockPool._evict_with_checkpoint

    def evict(self: BlockPool, block: int) -> None:
        key = self._checkpoint_of.get(block)
        if key is None or len(self.checkpoints[key]) == 1:
            real(self, block)
            return
        self.checkpoints[key] = tuple(other for other in self.checkpoints[key] if other != block)
        del self._checkpoint_of[block]
        self.blocks.indexed[block] = False
        self._free_cached(np.array([block], np.int64))

    return [(BlockPool, "_evict_with_checkpoint", evict)]


@fault
def prompt_cut_anywhere() -> list[Patch]:
    """Chunks of prompts end where the budget ends."""
    real = states.chunk_end

    def chunk_end(tokens: Any, start: int, room: int, chunk: int) -> int:
        return real(tokens, start, room, 1)

    return [(scheduler, "chunk_end", chunk_end)]
