"""Checks of a block pool. Tests and the simulator run them after every event."""

from __future__ import annotations

import numpy as np

from .block_pool import BlockPool
from .blocks import CACHED, FREE, QUARANTINED, REFERENCED


def check_pool(pool: BlockPool) -> None:
    """Check that free + cached + referenced + quarantined = total, and that lists and states agree.

    Raises:
        AssertionError: An invariant does not hold.
    """
    pool.index.check_invariants(pool.base, pool.count)
    if pool.mixed:
        pool.parts.check_invariants(pool.base, pool.count)
    blocks, ids = pool.blocks, np.arange(pool.base, pool.base + pool.count)
    states, counts = blocks.state[ids], blocks.refcount[ids]
    assert (counts >= 0).all(), "a reference count is below zero"
    listed = pool.free_ids
    assert len(set(listed.tolist())) == pool.free, "the free list has a duplicate"
    assert (blocks.state[listed] == FREE).all() and pool.free == np.count_nonzero(states == FREE), "free list"
    assert not blocks.indexed[listed].any(), "a free block is indexed"
    assert ((counts > 0) == (states == REFERENCED)).all(), "a count disagrees with its block's state"
    assert pool.cached == np.count_nonzero(states == CACHED) == sum(pool.recent.counts.values()), "cached"
    assert pool.quarantined == np.count_nonzero(states == QUARANTINED), "quarantined"
    assert not blocks.kind[listed].any() and (pool.mixed or not blocks.kind[ids].any()), "kinds of blocks"
    _check_cached(pool)
    _check_quarantine(pool)
    _check_usage(pool)


def _check_cached(pool: BlockPool) -> None:
    blocks = pool.blocks
    for tenant, count in pool.recent.counts.items():
        cached, stamps = pool.recent.items(tenant)
        assert count == np.unique(cached).size == cached.size, "a count of cached blocks"
        assert (np.diff(stamps) > 0).all(), "cached blocks are in another order than their last uses"
        assert (blocks.state[cached] == CACHED).all() and (blocks.owner[cached] == tenant).all(), "LRU list"
        assert blocks.indexed[cached].all(), "a cached block is not indexed"


def _check_quarantine(pool: BlockPool) -> None:
    blocks, ids = pool.blocks, np.arange(pool.base, pool.base + pool.count)
    waiting = {block for part in pool.quarantine for block in part.tolist()}
    held_back = ids[blocks.state[ids] == QUARANTINED]
    assert waiting.issuperset(held_back.tolist()), "a quarantined block is in no queue"
    assert (blocks.touch[held_back] > pool.done_step).all(), "a block overstays its quarantine"
    assert pool.touched == blocks.touch[ids].max(initial=0), "the last step that may touch a block"


def _check_usage(pool: BlockPool) -> None:
    """Check that each tenant is charged for its blocks, and stays within its ceiling."""
    blocks, ids = pool.blocks, np.arange(pool.base, pool.base + pool.count)
    owners = np.bincount(blocks.owner[ids][blocks.state[ids] != FREE], minlength=pool.usage.size)
    assert (owners == pool.usage).all(), "a tenant's usage disagrees with its blocks"
    assert not blocks.owner[pool.free_ids].any(), "a free block is charged to a tenant"
    assert (pool.usage <= pool.tenants.ceiling).all(), "a tenant is above its ceiling"
