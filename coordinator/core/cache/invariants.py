"""Cross-checks between the parts of the cache. Tests run them after every event."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import CHECKPOINT, RECURRENT
from .kv_cache_manager import KVCacheManager
from .sequences import Slots, unmarked


def check_cache(cache: KVCacheManager) -> None:
    """Check invariants 1 to 6 of the cache design.

    Raises:
        AssertionError: An invariant does not hold.
    """
    s, blocks = cache.sequences, cache.blocks
    s.check_invariants()
    slots = np.fromiter(s.slot_of.values(), np.int64, len(s.slot_of))
    holders = _table_holders(cache, slots) + _state_holders(cache, slots)
    for slot in slots[s.window_end[slots] > 0].tolist():
        holders[cache.windows.of(slot)] += 1
    for group in cache.groups.values():
        for forming in group.forming:
            holders[list(forming.blocks)] += 1
            assert (blocks.kind[list(forming.blocks)] == CHECKPOINT).all(), "a checkpoint forms in other blocks"
    for block, names in blocks.external.items():
        holders[block] += len(names)
    wrong = np.flatnonzero(holders != blocks.refcount)
    assert not wrong.size, f"block {wrong[0]}: {holders[wrong[0]]} holders, count {blocks.refcount[wrong[0]]}"
    cache.pins.check_invariants()
    cache.windows.check_invariants()
    cache.host_tiers.check_invariants()
    for group in cache.groups.values():
        group.check_invariants()
        if group.host is not None:
            group.host.check_invariants(s, group.number)


def _table_holders(cache: KVCacheManager, slots: Slots) -> npt.NDArray[np.int64]:
    """Check the block tables of all sequences [n] at once. Return the count of holders per block: [blocks]."""
    s, blocks = cache.sequences, cache.blocks
    rows, places, ids = _filled(s.table, slots, s.used)
    assert np.unique(rows * blocks.refcount.size + ids).size == ids.size, "a block is twice in one table"
    of_pools = s.pool[slots[rows]]
    for number in np.unique(of_pools).tolist():
        pool, own = cache.groups[number].pool, ids[of_pools == number]
        assert ((own >= pool.base) & (own < pool.base + pool.count)).all(), "a table names a block of another pool"
    assert not blocks.kind[ids].any(), "a block of another kind"
    indexed = blocks.indexed[ids]
    _check_hashed(cache, slots[rows[indexed]], places[indexed], ids[indexed])
    early = s.hashed[slots] * blocks.block_size > s.computed[slots]
    assert not (early & (s.pool[slots] >= 0)).any(), "a block was indexed too early"
    return np.bincount(ids, minlength=blocks.refcount.size)


def _state_holders(cache: KVCacheManager, slots: Slots) -> npt.NDArray[np.int64]:
    """Check the recurrent states of all sequences [n] at once. Return the count of holders per block: [blocks]."""
    s, blocks = cache.sequences, cache.blocks
    for number in np.unique(s.pool[slots]).tolist():
        if number >= 0:
            used = s.state_used[slots[s.pool[slots] == number]]
            assert (used == cache.groups[number].state_blocks).all(), "state blocks disagree with the model"
    _, _, states = _filled(s.states, slots, s.state_used)
    assert (blocks.kind[states] == RECURRENT).all(), "a block of another kind"
    assert (blocks.refcount[states] == 1).all() and not blocks.indexed[states].any(), "a state is shared"
    return np.bincount(states, minlength=blocks.refcount.size)


def _filled(table: npt.NDArray[Any], slots: Slots, used: npt.NDArray[Any]) -> tuple[Slots, Slots, Slots]:
    """Return the cells of sequences in a table [slots, width]: the index in `slots`, the column and the value of each.

    Args:
        table: [all slots, width] int.
        slots: [n] int64.
        used: How many cells of its row each slot fills: [all slots].
    """
    counts = used[slots]
    inside = np.arange(int(counts.max(initial=0))) < counts[:, None]
    rows, places = np.nonzero(inside)
    return rows, places, table[slots[rows], places].astype(np.int64)


def _check_hashed(cache: KVCacheManager, slots: Slots, places: Slots, ids: Slots) -> None:
    """Check that indexed blocks hold the tokens of their sequences, acknowledged by a worker.

    Args:
        cache: The cache.
        slots: The sequence of each block: [n].
        places: The block's number in its sequence: [n].
        ids: The blocks: [n].
    """
    s, size = cache.sequences, cache.blocks.block_size
    at = places[:, None] * size + np.arange(size)
    beyond = at >= s.length[slots][:, None]
    own = s.tokens[slots[:, None], np.minimum(at, s.tokens.shape[1] - 1)]
    stored = cache.store.tokens[ids]
    assert ((stored == own) | (stored == unmarked(own)) | beyond).all(), "an indexed block holds foreign tokens"
