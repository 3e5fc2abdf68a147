"""Whom to evict when blocks run out: idle client sequences, least recently used first and whole.

And what there would be if nothing ran any more. It only chooses. Cached blocks, which nobody holds, go before any
sequence, one at a time: `Pool` evicts those.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .blocks import QUARANTINED, BlockIds, Blocks
from .groups import Group
from .sequences import Sequences, Slots
from .supply import Spare, Supply

NO_ROW = -1


class Eviction:
    """Chooses. It changes nothing: the cache evicts."""

    def __init__(self, policy: str, blocks: Blocks, sequences: Sequences) -> None:
        self._policy, self._blocks, self._sequences = policy, blocks, sequences

    def victims(
        self, group: Group, tenant: int, count: int, keep: BlockIds, asking: Slots | int, spare: Spare
    ) -> tuple[Slots, Supply]:
        """Idle client sequences whose eviction gives `tenant` `count` blocks, with some to spare, or all of them;
        and the supply that follows.

        At the tenant's ceiling its own go before anyone else's. Never one of `asking`, never one that a step under way
        may read. Under policy `none` only those that a waiting request will continue: it computes them again when its
        turn comes, and without that, waiting requests could hold what the running one needs, for ever.
        """
        s, blocks, pool = self._sequences, self._blocks, group.pool
        idle = (s.pool == group.number) & ~s.running & (s.id != 0) & (s.last_step <= pool.done_step)
        if self._policy == "none":
            idle &= s.request != 0
        idle[asking] = False
        (candidates,) = idle.nonzero()
        trial, taken = pool.supply(keep), []
        if not candidates.size:
            return candidates, trial
        candidates = candidates[np.lexsort((s.id[candidates], s.accessed_us[candidates]))]
        counts: dict[int, int] = {}
        kept = set(keep.tolist())
        own_first = np.concatenate([candidates[s.tenant[candidates] == tenant], candidates])
        queue = own_first if trial.room(tenant) < count + spare.own else candidates
        for slot in dict.fromkeys(queue.tolist()):
            if trial.has(tenant, count, spare):
                break
            taken.append(slot)
            for block in s.blocks_of(slot).tolist():
                left = counts.get(block, int(blocks.refcount[block])) - 1
                counts[block] = left
                if left == 0 and blocks.touch[block] <= pool.done_step and block not in kept:
                    trial.gain(int(blocks.owner[block]), bool(blocks.indexed[block]))
        return np.array(taken, np.int64), trial

    def supply_when_idle(self, group: Group, but: int = NO_ROW) -> tuple[Supply, npt.NDArray[np.bool_]]:
        """What there would be to give once everything had ended that ends by itself: every row except `but`, every
        step, and the idle sequences that may be evicted. What is left is held by clients. Also returns which blocks
        would still be held: [blocks of the pool].
        """
        s, blocks, pool = self._sequences, self._blocks, group.pool
        ends = (s.pool == group.number) & (s.id != 0)
        if self._policy == "none":
            ends &= s.running | (s.request != 0)
        if but != NO_ROW:
            ends[but] = False
        slots = np.flatnonzero(ends)
        columns = np.arange(int(s.used[slots].max(initial=0)))
        cells = s.table[slots][:, : columns.size][columns < s.used[slots][:, None]]
        given = np.bincount(cells - pool.base, minlength=pool.count)
        region = slice(pool.base, pool.base + pool.count)
        held = blocks.refcount[region] > given
        back = (~held & (given > 0)) | (blocks.state[region] == QUARANTINED)
        supply = pool.supply()
        supply.gain_each(blocks.owner[region][back], blocks.indexed[region][back])
        return supply, held
