"""Cached blocks have the order of one ordered dict for each tenant, and a log of them stays short."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from kvforge.coordinator.core.cache.cached_blocks import SPARE, CachedBlocks

BLOCKS, TENANTS = 3000, (1, 2, 3)


class Naive:
    """The same with one dict for each tenant: block to time of last use."""

    def __init__(self) -> None:
        self.stamp = 0
        self.used: dict[int, OrderedDict[int, int]] = {}

    def add(self, ids: list[int], owners: list[int]) -> None:
        for block, owner in zip(ids, owners, strict=True):
            self.stamp += 1
            self.used.setdefault(owner, OrderedDict())[block] = self.stamp

    def discard(self, ids: list[int], owners: list[int]) -> None:
        for block, owner in zip(ids, owners, strict=True):
            del self.used[owner][block]


def same(cached: CachedBlocks, naive: Naive) -> None:
    assert cached.stamp == naive.stamp
    assert list(cached.counts) == list(naive.used)
    for tenant, entries in naive.used.items():
        ids, stamps = cached.items(tenant)
        assert (ids.tolist(), stamps.tolist()) == (list(entries), list(entries.values()))
        assert cached.count(tenant) == len(entries)
        if entries:
            block, stamp = next(iter(entries.items()))
            assert cached.oldest(tenant) == (stamp, block)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_is_that_of_ordered_dicts(seed: int) -> None:
    draw, cached, naive = random.Random(seed), CachedBlocks(BLOCKS), Naive()
    owner = {block: draw.choice(TENANTS) for block in range(BLOCKS)}
    free = set(owner)
    for _ in range(200):
        if free and draw.random() < 0.6:
            ids = draw.sample(sorted(free), draw.randint(1, min(len(free), 600)))
            if draw.random() < 0.5:  # all of one tenant, as nearly always
                ids = [block for block in ids if owner[block] == owner[ids[0]]]
            owners = [owner[block] for block in ids]
            cached.add(np.array(ids), np.array(owners))
            naive.add(ids, owners)
            free.difference_update(ids)
        elif held := sorted(set(owner) - free):
            if draw.random() < 0.5:
                ids = draw.sample(held, draw.randint(1, len(held)))
                owners = [owner[block] for block in ids]
                if len(ids) % 2:
                    cached.discard(np.array(ids), np.array(owners))
                else:
                    cached.discard_few(ids, np.array([owner[block] for block in range(BLOCKS)]))
            else:
                tenant = draw.choice([tenant for tenant, used in naive.used.items() if used])
                ids = cached.pop(tenant, draw.randint(1, len(naive.used[tenant])))
                assert ids == list(naive.used[tenant])[: len(ids)]
            naive.discard(ids, [owner[block] for block in ids])
            free.update(ids)
        same(cached, naive)


def test_a_log_does_not_grow_while_the_same_blocks_are_used() -> None:
    cached, ids, owners = CachedBlocks(100), np.arange(100), np.ones(100, np.int32)
    for _ in range(1000):
        cached.add(ids, owners)
        cached.discard(ids, owners)
    cached.add(ids, owners)
    assert cached.logs[1].size <= 3 * ids.size + SPARE
    assert cached.items(1)[0].tolist() == ids.tolist()


def test_what_was_saved_is_restored() -> None:
    cached = CachedBlocks(10)
    cached.add(np.array([3, 1, 4]), np.array([1, 2, 1]))
    cached.discard(np.array([3]), np.array([1]))
    again = CachedBlocks(10)
    again.stamp = cached.stamp
    for tenant in cached.counts:
        again.restore(tenant, *cached.items(tenant))
    for each in (cached, again):
        each.add(np.array([5]), np.array([1]))
        assert each.counts == {1: 2, 2: 1}
        assert [part.tolist() for part in each.items(1)] == [[4, 5], [3, 4]]
        assert each.oldest(2) == (2, 1)
