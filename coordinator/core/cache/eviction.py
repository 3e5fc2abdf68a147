"""The choice of idle client sequences to evict when blocks run out: least recently used first, and whole.

It also computes the supply that remains once every running request has ended. This module only chooses. Cached
blocks without holders are evicted before any sequence, one at a time, by `BlockPool`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .blocks import QUARANTINED, BlockIds, Blocks
from .groups import Group
from .sequences import Sequences, Slots
from .supply import Spare, Supply
from .windows import Windows

NO_ROW = -1


class Eviction:
    """Chooses sequences to evict. The cache carries the eviction out."""

    def __init__(self, policy: str, blocks: Blocks, sequences: Sequences, windows: Windows) -> None:
        self._policy, self._blocks, self._sequences, self._windows = policy, blocks, sequences, windows

    def victims(
        self, group: Group, tenant: int, count: int, keep: BlockIds, asking: Slots | int, spare: Spare
    ) -> tuple[Slots, Supply]:
        """Choose idle client sequences to evict so that `tenant` can get `count` blocks.

        At the tenant's ceiling, its own sequences go first. Sequences in `asking`, and those that a step in flight may
        read, are never chosen. Under policy `none`, only sequences that a waiting request will continue are eligible,
        and those that an ended request left. The former are recomputed when the request is scheduled. Without this
        exception, waiting requests could hold blocks that the running request needs, and deadlock. Pinned sequences
        are chosen last, and only if no other row runs: in the group, or of a tenant that is at its ceiling. With a host
        tier, which takes their blocks, they are chosen before a row is.

        Args:
            group: The group that must provide the blocks.
            tenant: The tenant that needs them.
            count: Blocks needed.
            keep: Blocks that must not count as available.
            asking: Slots that must not be evicted.
            spare: Blocks that must remain.

        Returns:
            The slots to evict (all candidates if they do not suffice), and the supply after their eviction.
        """
        s, blocks, pool = self._sequences, self._blocks, group.pool
        idle = (s.pool == group.number) & ~s.running & (s.id != 0) & (s.last_step <= pool.done_step)
        if self._policy == "none":
            idle &= (s.request != 0) | s.kept | s.pinned
        idle[asking] = False
        trial, taken = pool.supply(keep), []
        at_ceiling = trial.room(tenant) < count + spare.own
        if np.count_nonzero(s.pinned):
            idle &= ~s.pinned | self._yields(group, tenant if at_ceiling else 0, asking)
        (candidates,) = idle.nonzero()
        if not candidates.size:
            return candidates, trial
        candidates = candidates[np.lexsort((s.id[candidates], s.accessed_us[candidates], s.pinned[candidates]))]
        counts: dict[int, int] = {}
        kept = set(keep.tolist())
        own_first = np.concatenate([candidates[s.tenant[candidates] == tenant], candidates])
        queue = own_first if at_ceiling else candidates
        for slot in dict.fromkeys(queue.tolist()):
            if trial.has(tenant, count, spare):
                break
            taken.append(slot)
            held = (s.blocks_of(slot), s.states_of(slot), self._windows.of(slot))
            for block in [block for ids in held for block in ids.tolist()]:
                left = counts.get(block, int(blocks.refcount[block])) - 1
                counts[block] = left
                if left == 0 and blocks.touch[block] <= pool.done_step and block not in kept:
                    trial.gain(int(blocks.owner[block]), bool(blocks.indexed[block]))
        return np.array(taken, np.int64), trial

    def _yields(self, group: Group, tenant: int, asking: Slots | int) -> npt.NDArray[np.bool_]:
        """Return which sequences give up their blocks although they are pinned: [slots].

        Args:
            group: The group.
            tenant: The tenant that is at its ceiling; 0: the pool is short.
            asking: Slots that ask for blocks.
        """
        s = self._sequences
        rows, nothing = s.running & (s.pool == group.number), np.zeros(s.running.size, np.bool_)
        if group.pool.quarantined:  # these blocks come back with the next result
            return nothing
        if group.host is not None:
            return ~nothing
        asking_too = nothing.copy()
        asking_too[asking] = True
        if tenant:
            mine: npt.NDArray[np.bool_] = s.tenant == tenant
            if _alone(rows & mine, asking_too):
                return mine
        return ~nothing if _alone(rows, asking_too) else nothing

    def supply_when_idle(self, group: Group, but: int = NO_ROW) -> tuple[Supply, npt.NDArray[np.bool_]]:
        """Compute the supply after every row except `but` has ended, with every step done and idle sequences evicted.

        Returns:
            The supply, and which blocks clients would still hold: [blocks of the pool] bool.
        """
        s, blocks, pool = self._sequences, self._blocks, group.pool
        ends = (s.pool == group.number) & (s.id != 0)
        if self._policy == "none":
            ends &= s.running | (s.request != 0) | s.kept | s.pinned
        if but != NO_ROW:
            ends[but] = False
        slots = np.flatnonzero(ends)
        columns = np.arange(int(s.used[slots].max(initial=0)))
        cells = s.table[slots][:, : columns.size][columns < s.used[slots][:, None]]
        if pool.mixed:
            forming = [np.array(each.blocks, np.int64) for each in group.forming]  # held until their step is done
            others = [ids for slot in slots.tolist() for ids in (s.states_of(slot), self._windows.of(slot))]
            cells = np.concatenate([cells, *others, *forming])
        given = np.bincount(cells - pool.base, minlength=pool.count)
        region = slice(pool.base, pool.base + pool.count)
        held = blocks.refcount[region] > given
        back = (~held & (given > 0)) | (blocks.state[region] == QUARANTINED)
        supply = pool.supply()
        supply.gain_each(blocks.owner[region][back], blocks.indexed[region][back])
        return supply, held


def _alone(rows: npt.NDArray[np.bool_], asking: npt.NDArray[np.bool_]) -> bool:
    """Return whether no row runs, or one that asks: preempting one of several would give blocks too."""
    return bool(np.count_nonzero(rows) <= 1 and not np.count_nonzero(rows & ~asking))
