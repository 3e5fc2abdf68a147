"""The choice of a request to preempt when blocks run out: the cheapest to bring back, never the oldest.

The cost of a request is that of the tokens in blocks that it alone holds, which are the blocks that preemption gains:
to compute them again, or to copy them to the host tier and back, if that is measured and cheaper (`swapping`). Added
are the tokens already recomputed for it, so that two requests do not preempt each other repeatedly. The oldest request
of a pool is never preempted, so it ends, and then the next oldest: no set of requests can starve each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..cache.kv_cache_manager import KVCacheManager
from ..cache.sequences import Slots
from ..requests.table import RequestTable
from .swapping import costs_of_return, unit_of_return


def choose(
    cache: KVCacheManager, requests: RequestTable, order: npt.NDArray[np.int64], candidates: Slots, short: int
) -> int | None:
    """Return the slot to preempt among `candidates`, or None if only the oldest is left.

    Args:
        cache: The cache.
        requests: The request table.
        order: Admission order by slot; lower is older.
        candidates: Slots of one pool, [n].
        short: Blocks needed.
    """
    if candidates.size < 2:
        return None
    oldest = candidates[np.argmin(order[candidates])]
    mine = candidates[candidates != oldest]
    gain, cost = _gain_and_cost(cache, mine)
    group = cache.groups[int(cache.sequences.pool[oldest])]
    cost = costs_of_return(group, cost, cache.blocks.block_size)
    redone = [requests.live[request].redone_tokens for request in cache.sequences.request[mine].tolist()]
    youngest_first = np.argsort(-order[mine], kind="stable")
    mine, gain, cost = (
        mine[youngest_first],
        gain[youngest_first],
        (cost + unit_of_return(group) * np.array(redone))[youngest_first],
    )
    enough = np.flatnonzero(gain >= min(short, int(gain.max())))
    return int(mine[enough[np.argmin(cost[enough])]])


def _gain_and_cost(cache: KVCacheManager, slots: Slots) -> tuple[Slots, Slots]:
    """Return the blocks that only this sequence holds, with state and windows, and the tokens computed in them: [n]."""
    s, blocks = cache.sequences, cache.blocks
    used = s.used[slots]
    columns = np.arange(int(used.max(initial=0)))
    held = columns < used[:, None]
    alone = held & (blocks.refcount[s.table[slots][:, : columns.size]] == 1)
    with_kv = np.clip(s.scheduled[slots][:, None] - columns * s.block_size, 0, s.block_size)
    others = s.state_used[slots]
    if cache.windows.present:
        windows = [cache.windows.of(slot) for slot in slots.tolist()]
        others = others + np.array([np.count_nonzero(blocks.refcount[ids] == 1) for ids in windows], np.int64)
    return alone.sum(axis=1) + others, np.where(alone, with_kv, 0).sum(axis=1)
