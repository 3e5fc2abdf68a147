"""Cross-checks between the parts of the cache. Tests run them after every event."""

from __future__ import annotations

import numpy as np

from .blocks import CHECKPOINT, RECURRENT
from .kv_cache_manager import KVCacheManager
from .sequences import unmarked


def check_cache(cache: KVCacheManager) -> None:
    """Check invariants 1 to 6 of the cache design.

    Raises:
        AssertionError: An invariant does not hold.
    """
    s, blocks = cache.sequences, cache.blocks
    s.check_invariants()
    holders = np.zeros(blocks.refcount.size, np.int64)
    for slot in s.slot_of.values():
        ids = s.blocks_of(slot)
        assert len(set(ids.tolist())) == ids.size, "a block is twice in one table"
        if ids.size:
            pool = cache.groups[int(s.pool[slot])].pool
            assert ((ids >= pool.base) & (ids < pool.base + pool.count)).all(), "a table names a block of another pool"
        holders[ids] += 1
        states = s.states_of(slot)
        if s.pool[slot] >= 0:
            assert states.size == cache.groups[int(s.pool[slot])].state_blocks, "state blocks disagree with the model"
        assert (blocks.kind[states] == RECURRENT).all() and not blocks.kind[ids].any(), "a block of another kind"
        assert (blocks.refcount[states] == 1).all() and not blocks.indexed[states].any(), "a state is shared"
        holders[states] += 1
        holders[cache.windows.of(slot)] += 1
        _check_hashed(cache, slot)
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


def _check_hashed(cache: KVCacheManager, slot: int) -> None:
    """Check that indexed blocks of a sequence hold its own tokens, acknowledged by a worker."""
    s, size = cache.sequences, cache.blocks.block_size
    for i, block in enumerate(s.blocks_of(slot).tolist()):
        if cache.blocks.indexed[block]:
            own = s.tokens[slot, i * size : min((i + 1) * size, int(s.length[slot]))]
            stored = cache.store.tokens[block][: own.size]
            assert ((stored == own) | (stored == unmarked(own))).all(), "an indexed block holds foreign tokens"
    assert s.hashed[slot] * size <= s.computed[slot] or s.pool[slot] < 0, "a block was indexed too early"
