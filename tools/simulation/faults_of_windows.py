"""Faults to plant in how the KV of layers with a sliding window is placed, released and reused; see `faults`.

They need worlds with such a model, so they are apart from the faults of all worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache.entry_eviction import EntryEviction
from kvforge.coordinator.core.cache.entry_parts import NO_KEY
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.residency import Residency
from kvforge.coordinator.core.cache.windows import Windows
from kvforge.protocol.tables import ring_items
from tools.simulation.faults import Patch

FAULTS_OF_WINDOWS: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_WINDOWS[make.__name__] = make
    return make


@fault
def window_released_a_block_early() -> list[Patch]:
    """Window blocks are released while a token to come sees them."""
    real = Windows.out_of_sight

    def out_of_sight(self: Windows, group: Group, slots: Any) -> Any:
        group.window -= self._size
        try:
            return real(self, group, slots)
        finally:
            group.window += self._size

    return [(Windows, "out_of_sight", out_of_sight)]


@fault
def window_released_for_what_is_planned() -> list[Patch]:
    """Window blocks are released behind the tokens that are planned, not behind those that are acknowledged."""
    real = Windows.out_of_sight

    def out_of_sight(self: Windows, group: Group, slots: Any) -> Any:
        s, computed = self._sequences, self._sequences.computed
        s.computed = np.where(s.running, s.scheduled, computed)
        try:
            return real(self, group, slots)
        finally:
            s.computed = computed

    return [(Windows, "out_of_sight", out_of_sight)]


@fault
def windows_never_released() -> list[Patch]:
    """Window blocks stay until the sequence ends."""

    def release_behind(self: Windows, group: Group, slots: Any, numbers: Any) -> None:
        pass

    return [(Windows, "release_behind", release_behind)]


@fault
def hit_without_windows() -> list[Patch]:
    """A hit takes all blocks of a prefix, whether window blocks for its end are cached or not."""

    def usable(self: Windows, group: Group, matched: Any) -> Any:
        return np.ones(matched.size + 1, np.bool_)

    def in_sight(self: Windows, group: Group, shared: Any, tokens: int) -> Any:
        found, nothing = group.pool.parts.windows, tuple(range(group.pool.base, group.pool.base + group.window_pages))
        keys = group.index.keys(shared[self.first(group, tokens) :]).tolist()
        return np.array([block for key in keys for block in found.get(key, nothing)], np.int64)

    return [(Windows, "usable", usable), (Windows, "in_sight", in_sight)]


@fault
def hit_with_a_window_one_block_short() -> list[Patch]:
    """A hit takes one window block fewer than is in sight."""
    usable, in_sight = Windows.usable, Windows.in_sight

    def short(real: Any) -> Any:
        def with_less(self: Windows, group: Group, *arguments: Any) -> Any:
            group.window -= self._size
            try:
                return real(self, group, *arguments)
            finally:
                group.window += self._size

        return with_less

    return [(Windows, "usable", short(usable)), (Windows, "in_sight", short(in_sight))]


@fault
def windows_of_another_block_indexed() -> list[Patch]:
    """The window blocks of the block before hang on an entry."""
    real = Windows.note_indexed

    def note_indexed(self: Windows, group: Group, slots: Any, numbers: Any, keys: list[int]) -> None:
        before = numbers - 1
        known = self.has(slots, before)
        real(self, group, slots, np.where(known, before, numbers), keys)

    return [(Windows, "note_indexed", note_indexed)]


@fault
def ring_one_place_off() -> list[Patch]:
    """A sequence that moves in has its shared window blocks in the places of the next ones."""
    real = Windows.begin

    def begin(self: Windows, group: Group, slot: int, first: int, shared: Any, fresh: Any) -> None:
        real(self, group, slot, first, shared, fresh)
        count = (shared.size + fresh.size) // group.window_pages
        if count > 1:
            ring = ring_items(self._sequences.states, group.state_blocks, group.window_pages)
            places = np.arange(first, first + count) % group.window_blocks
            ring[slot, places] = ring[slot, np.roll(places, 1)]

    return [(Windows, "begin", begin)]


@fault
def pages_of_a_window_swapped() -> list[Patch]:
    """Window blocks of one block are in the order of another step."""
    real = Windows.in_sight

    def in_sight(self: Windows, group: Group, shared: Any, tokens: int) -> Any:
        return real(self, group, shared, tokens).reshape(-1, group.window_pages)[:, ::-1].reshape(-1)

    return [(Windows, "in_sight", in_sight)]


@fault
def windows_not_published() -> list[Patch]:
    """Cells of rings are changed and not written to the shared tables."""
    real = Windows.put

    def put(self: Windows, *arguments: Any) -> None:
        real(self, *arguments)
        self._sequences.changed_rings.clear()

    return [(Windows, "put", put)]


@fault
def windows_not_copied() -> list[Patch]:
    """Copy-on-write gives a row window blocks of its own without their content."""
    real = Windows.replace

    def replace(self: Windows, group: Group, slot: int, number: int, fresh: list[int]) -> list[int]:
        old = real(self, group, slot, number, fresh)
        copy_block = group.copy_block
        left = len(old)

        def without(source: int, target: int, tokens: int) -> int:
            nonlocal left
            if source not in old:
                return copy_block(source, target, tokens)
            left -= 1
            if not left:
                del group.copy_block
            return source

        group.copy_block = without  # type: ignore[method-assign]
        return old

    return [(Windows, "replace", replace)]


@fault
def windows_outlive_their_block() -> list[Patch]:
    """The entry of a block is removed, and the window blocks that hang on it stay."""
    real = EntryEviction.remove_entry

    def remove_entry(self: EntryEviction, block: int, gone: list[int]) -> None:
        kept, self._parts.windows = self._parts.windows, {}
        real(self, block, gone)
        self._parts.windows = kept

    return [(EntryEviction, "remove_entry", remove_entry)]


@fault
def part_of_a_window_evicted() -> list[Patch]:
    """Window blocks of one block are evicted one by one."""
    real = EntryEviction.evict_with_parts

    def evict(self: EntryEviction, block: int, gone: list[int]) -> None:
        parts = self._parts
        key = parts.window_keys.item(block)
        if key == NO_KEY or len(parts.windows[key]) == 1:
            real(self, block, gone)
            return
        parts.windows[key] = tuple(other for other in parts.windows[key] if other != block)
        parts.window_keys[block] = NO_KEY
        self._blocks.indexed[block] = False
        self.uncache((block,), gone)

    return [(EntryEviction, "evict_with_parts", evict)]


@fault
def fork_behind_the_window() -> list[Patch]:
    """A fork shares the KV of its parent although the parent has released what the fork sees."""

    def holds(self: Windows, group: Group, slot: int, tokens: int) -> bool:
        return True

    def can_share(self: Residency, slot: int, child: int, length: int) -> bool:
        return not self._sequences.state_used[slot] or self._copy_state(slot, child, length)

    return [(Windows, "holds", holds), (Residency, "_can_share", can_share)]


@fault
def windows_of_released_sequences_kept() -> list[Patch]:
    """A sequence that loses its blocks keeps its window blocks."""

    def of(self: Windows, slot: int) -> Any:
        return np.zeros(0, np.int64)

    return [(Windows, "of", of)]
