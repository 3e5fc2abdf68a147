"""Faults to plant in how recurrent states are placed, copied and reused; see `faults`.

They need worlds with such a model, so they are apart from the faults of all worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvforge.coordinator.core.cache import states
from kvforge.coordinator.core.cache.checkpoints import Checkpoints
from kvforge.coordinator.core.cache.continuing import Continuing
from kvforge.coordinator.core.cache.entry_eviction import EntryEviction
from kvforge.coordinator.core.cache.entry_parts import NO_KEY
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.placement import NO_DONOR, Placement
from kvforge.coordinator.core.cache.planner import Planner
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
    real = Planner._plan_with_state

    def plan(self: Planner, group: Group, salt: int, tokens: Any, hashes: Any, shared_max: int | None) -> Placement:
        found = real(self, group, salt, tokens, hashes, shared_max)
        matched, count = group.index.match(salt, tokens, hashes), found.hits.size
        if count and matched.size > count and (count + 1) * self._blocks.block_size < tokens.size:
            found.hits, found.needed = matched[: count + 1], found.needed - 1
        return found

    return [(Planner, "_plan_with_state", plan)]


@fault
def checkpoint_never_acknowledged() -> list[Patch]:
    """A checkpoint becomes an entry as soon as its KV block is indexed, before its copy was acknowledged."""
    real = Checkpoints.computed

    def computed(self: Checkpoints, group: Group) -> None:
        real(self, group)
        for forming in group.forming:
            known = forming.key in group.pool.parts.checkpoints or not group.index.alive(forming.key)
            if forming.key != NO_KEY and not known:
                group.pool.add_checkpoint(forming.key, forming.blocks)

    return [(Checkpoints, "computed", computed)]


@fault
def state_not_restored_after_a_rewind() -> list[Patch]:
    """A sequence that loses tokens, or KV in flight, goes on with the state that it has."""
    real = Residency.trim

    def trim(self: Residency, slot: int, settles: bool = False) -> None:
        s = self._sequences
        s.scheduled[slot] = s.computed[slot]
        real(self, slot, settles)

    return [(Residency, "trim", trim)]


@fault
def fork_shares_its_parents_state() -> list[Patch]:
    """A fork gets its parent's blocks of the state in place of a copy."""
    real = Residency.fork

    def fork(self: Residency, slot: int, most: int | None = None) -> int:
        child, s = real(self, slot, most), self._sequences
        if s.state_used[child]:
            group = self._groups[int(s.pool[slot])]
            group.release(s.states_of(child), group.next_step)
            group.hold(s.states_of(slot))
            s.states[child] = s.states[slot]
        return child

    return [(Residency, "fork", fork)]


@fault
def checkpoint_outlives_its_block() -> list[Patch]:
    """The entry of a KV block is removed, and the checkpoint that hangs on it stays."""

    def remove_entry(self: EntryEviction, block: int) -> None:
        self._index.remove(block)

    return [(EntryEviction, "remove_entry", remove_entry)]


@fault
def part_of_a_checkpoint_evicted() -> list[Patch]:
    """A checkpoint is evicted block by block."""
    real = EntryEviction.evict_with_parts

    def evict(self: EntryEviction, block: int, gone: list[int]) -> None:
        parts = self._parts
        key = parts.checkpoint_of.get(block)
        if key is None or len(parts.checkpoints[key]) == 1:
            real(self, block, gone)
            return
        parts.checkpoints[key] = tuple(other for other in parts.checkpoints[key] if other != block)
        del parts.checkpoint_of[block]
        self._blocks.indexed[block] = False
        self.uncache((block,), gone)

    return [(EntryEviction, "evict_with_parts", evict)]


@fault
def prompt_cut_anywhere() -> list[Patch]:
    """Chunks of prompts end where the budget ends."""
    real = states.chunk_end

    def chunk_end(tokens: Any, start: int, room: int, chunk: int) -> int:
        return real(tokens, start, room, 1)

    return [(scheduler, "chunk_end", chunk_end)]


@fault
def kept_state_taken_at_another_position() -> list[Patch]:
    """The next turn takes the state of a kept sequence for as many tokens as both have in common."""
    real = Continuing.placement

    def placement(self: Continuing, group: Group, *arguments: Any) -> Placement | None:
        sequence_id, _, tokens, most = arguments
        found, s = real(self, group, *arguments), self._sequences
        slot = s.slot_of.get(sequence_id, NO_DONOR)
        if found is not None or slot == NO_DONOR or s.pool[slot] != group.number:
            return found
        full = min(most, int(s.computed[slot])) // s.block_size
        same = tokens[: full * s.block_size].tobytes() == s.tokens[slot, : full * s.block_size].tobytes()
        if not full or not same:
            return None
        needed = s.blocks_for(tokens.size) - full + group.state_blocks
        found = Placement(group, s.blocks_of(slot)[:full], (-1, 0), needed, slot)
        found.checkpoint = s.states_of(slot)
        return found

    return [(Continuing, "placement", placement)]


@fault
def state_beyond_the_last_token_kept() -> list[Patch]:
    """A sequence keeps its state although steps in flight take it to tokens that it does not have."""

    def settles(self: Residency, slot: int) -> bool:
        s = self._sequences
        return bool(s.state_used[slot]) and 0 < s.computed[slot] < s.scheduled[slot] <= s.length[slot] + s.pending[slot]

    def must_move(self: Residency, slot: int) -> bool:
        self._sequences.scheduled[slot] = self._sequences.computed[slot]
        return False

    return [(Residency, "settles", settles), (Residency, "must_move", must_move)]
