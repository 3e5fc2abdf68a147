"""Hits of an unlimited cache, compared with a count over tuples of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.loadtest.load.infinite import InfiniteCache, infinite_share
from kvforge.protocol.errors import InvalidRequest


def _naive(prompts: list[np.ndarray], block_size: int) -> list[int]:
    seen: set[tuple[int, ...]] = set()
    hits = []
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]
        known = 0
        while known < len(prefixes) and prefixes[known] in seen:
            known += 1
        seen.update(prefixes)
        hits.append(known * block_size)
    return hits


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_hits_are_those_that_comparing_finds(block_size: int) -> None:
    rng = np.random.default_rng(5)
    prompts: list[np.ndarray] = []
    for _ in range(200):
        # Few ids and many cuts of earlier prompts give every length of a common prefix.
        old = prompts[rng.integers(len(prompts))] if prompts else np.zeros(0, np.int32)
        kept = old[: rng.integers(len(old) + 1)]
        prompts.append(np.concatenate((kept, rng.integers(0, 3, rng.integers(1, 60), np.int32))))
    cache = InfiniteCache(block_size)
    found = [cache.look_up(prompt) for prompt in prompts]
    assert found == _naive(prompts, block_size) and sum(found) > 0
    assert cache.hit_tokens == sum(found) and cache.prompt_tokens == sum(map(len, prompts))
    assert infinite_share(prompts, block_size) == cache.share == sum(found) / cache.prompt_tokens


def test_the_order_of_tokens_and_of_blocks_counts() -> None:
    cache = InfiniteCache(2)
    cache.hold(np.array([1, 2, 3, 4], np.int32))
    assert cache.prompt_tokens == 0
    assert cache.look_up(np.array([3, 4, 1, 2], np.int32)) == 0
    assert cache.look_up(np.array([2, 1, 4, 3], np.int32)) == 0
    assert cache.look_up(np.array([1, 2, 3, 4, 5], np.int32)) == 4
    assert cache.look_up(np.array([1], np.int32)) == 0


def test_tenants_share_nothing() -> None:
    cache, prompt = InfiniteCache(4), np.arange(40, dtype=np.int32)
    assert [cache.look_up(prompt, tenant) for tenant in ("a", "b", "a")] == [0, 0, 40]


def test_a_block_has_a_token() -> None:
    assert InfiniteCache(4).share == 0
    with pytest.raises(InvalidRequest, match="block_size"):
        InfiniteCache(0)
