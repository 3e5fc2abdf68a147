"""Pinned prefixes: the beginnings of prompts that later requests will have too, held for a time.

A pin is an idle sequence with a time to live, which shares the full blocks of the prompt's beginning. It is therefore
journalled, explained and removed as any sequence. Two rules make it a pin: `KeptSequences` never drops it, and
`Eviction` takes its blocks only where no row would give any, or where they go to a host tier.

A tenant's pins hold at most `pinned_percent_max` of its ceiling, or of the pool if it has none, and all tenants' pins
that much of the pool. A pin that does not fit is shortened to the blocks that do, or refused: the request then runs
without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..clock import Clock
from ..limits import Bounds
from .blocks import NO_BLOCKS, BlockIds
from .groups import Group
from .idle_tracker import IdleTracker
from .kept import KeptSequences
from .residency import Residency
from .sequences import NO_POOL, Sequences, Slots
from .tenants import Tenants


class PrefixPins:
    """Pins the beginnings of prompts that have been computed."""

    def __init__(
        self,
        clock: Clock,
        bounds: Bounds,
        sequences: Sequences,
        groups: dict[int, Group],
        residency: Residency,
        kept: KeptSequences,
        tenants: Tenants,
        idle: IdleTracker,
    ) -> None:
        self._clock, self._sequences, self._groups, self._residency = clock, sequences, groups, residency
        self._kept, self._tenants, self._idle = kept, tenants, idle
        self._percent = bounds.pinned_percent_max
        self._most = bounds.pinned_percent_max * bounds.sequences_max // 100

    def pin(self, slot: int, tokens: int, ttl_us: int) -> int:
        """Pin the beginning of a running request's sequence, or count a use of the pin that has it long enough.

        The new pin replaces shorter ones of the same beginning that would not outlive it.

        Args:
            slot: The slot of the request. Its prompt has been computed.
            tokens: How many leading tokens to pin, rounded down to full blocks.
            ttl_us: For how long after the last use.

        Returns:
            How many tokens are pinned; 0 for none.
        """
        s = self._sequences
        group, size = self._groups[int(s.pool[slot])], s.block_size
        full = min(tokens, int(s.computed[slot])) // size
        # A recurrent state has no beginning to share, and windows of it are gone where a longer prompt was computed.
        if not full or not self._percent or group.state_blocks or group.window_pages:
            return 0
        end_us = self._clock.now_us + ttl_us
        alike = self._alike(slot, group, full * size)
        for other in alike.tolist():
            longer, left_us = int(s.length[other]) - full * size, int(self._ends_us(other)) - self._clock.now_us
            if longer == 0 or (longer > 0 and left_us >= ttl_us):
                s.touch(other)
                self._idle.continued(other)
                s.keep_idle(other, max(left_us, int(s.idle_ttl_us[other]) if longer else ttl_us))
                return full * size
        covered = alike[(s.length[alike] < full * size) & (self._ends_us(alike) <= end_us)]
        full = self._fitting(slot, group, full)
        if not full or int(np.count_nonzero(s.pinned)) - covered.size >= self._most:
            return 0
        for other in covered.tolist():
            self._residency.remove(other)
        if not self._kept.could_free(1):
            return 0
        self._kept.free_slots(1)
        child = self._residency.fork(slot, full * size)
        s.owned[child] = s.pinned[child] = True
        s.keep_idle(child, ttl_us)
        return full * size

    def release(self, group: Group) -> bool:
        """Take the blocks of a group's pins because its rows cannot go on. Return whether there were any.

        The pins are removed, unless a host tier takes the blocks: they come back with the next use.
        """
        s = self._sequences
        pins, names = np.flatnonzero(s.pinned & (s.pool == group.number)), self._tenants.names
        for slot in pins.tolist():
            if group.host is not None:
                self._residency.release_kv(slot)
                continue
            self._kept.removals.note(int(s.id[slot]), names[int(s.tenant[slot])], "its blocks were needed")
            self._residency.remove(slot)
        return bool(pins.size)

    def _alike(self, slot: int, group: Group, length: int) -> Slots:
        """Return the pins in the group that begin as the slot does, as far as both reach: longest first."""
        s = self._sequences
        same = s.pinned & (s.tenant == s.tenant[slot]) & (s.salt == s.salt[slot])
        found = []
        for other in np.flatnonzero(same & ((s.pool == group.number) | (s.pool == NO_POOL))).tolist():
            common = min(length, int(s.length[other]))
            if s.tokens[other, :common].tobytes() != s.tokens[slot, :common].tobytes():
                continue
            if s.pool[other] != NO_POOL:
                found.append(other)
            elif s.length[other] <= length:  # its KV was evicted, or lost with a worker: the new pin is in its place
                self._residency.remove(other)
        return np.array(sorted(found, key=lambda other: -int(s.length[other])), np.int64)

    def _ends_us(self, slots: Slots | int) -> Slots:
        ends: Slots = self._sequences.accessed_us[slots] + self._sequences.idle_ttl_us[slots]
        return ends

    def _fitting(self, slot: int, group: Group, full: int) -> int:
        """Return how many of the first `full` blocks may be pinned. Blocks of other pins count once."""
        wanted, fits = self._sequences.blocks_of(slot)[:full], full
        for ids, most in self._shares(slot, group):
            more = np.cumsum(~np.isin(wanted, ids))
            fits = min(fits, int(np.count_nonzero(more <= most - ids.size)))
        return fits

    def may_return(self, slot: int, group: Group) -> bool:
        """Return whether a pin that moved down fits into the share of a group's pool, with no block of others."""
        blocks = self._sequences.blocks_for(int(self._sequences.length[slot]))
        return all(ids.size + blocks <= most for ids, most in self._shares(slot, group))

    def _shares(self, slot: int, group: Group) -> Iterator[tuple[BlockIds, int]]:
        """Yield the blocks that pins hold in a group, and the most that they may: of the slot's tenant, and of all."""
        s, pool, tenant = self._sequences, group.pool, int(self._sequences.tenant[slot])
        pins = s.pinned & (s.pool == group.number)
        ceiling = min(int(self._tenants.ceiling[tenant]), pool.count)
        for which, most in ((pins & (s.tenant == tenant), ceiling), (pins, pool.count)):
            held = [s.blocks_of(other) for other in np.flatnonzero(which).tolist()]
            yield np.unique(np.concatenate(held)) if held else NO_BLOCKS, self._percent * most // 100
