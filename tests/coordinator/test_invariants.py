"""The invariants of the cache notice every kind of damage that they name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvforge.coordinator.core.cache.blocks import CACHED
from kvforge.coordinator.core.cache.kv_cache_manager import KVCacheManager
from tests.coordinator.conftest import MakePool

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]
OTHER = [10, 11, 12, 13, 40, 41, 42, 43, 50]
THIRD = [70, 71, 72, 73, 80, 81, 82, 83, 90]


def _slot(cache: KVCacheManager) -> int:
    """Return the slot of the running sequence."""
    (slot,) = (slot for slot in cache.sequences.slot_of.values() if cache.sequences.running[slot])
    return slot


def _cached(cache: KVCacheManager) -> int:
    """Return the oldest cached block."""
    recent = cache.groups[0].pool.recent
    (tenant,) = (tenant for tenant, count in recent.counts.items() if count)
    return recent.oldest(tenant)[1]


def _twice_in_a_table(cache: KVCacheManager) -> None:
    cache.sequences.table[_slot(cache), 1] = cache.sequences.table[_slot(cache), 0]


def _block_of_another_pool(cache: KVCacheManager) -> None:
    pool = cache.groups[0].pool
    cache.sequences.table[_slot(cache), 0] = pool.base + pool.count


def _other_holder(cache: KVCacheManager) -> None:
    cache.blocks.refcount[cache.sequences.table[_slot(cache), 2]] += 1


def _other_kind(cache: KVCacheManager) -> None:
    cache.blocks.kind[cache.sequences.table[_slot(cache), 2]] = 1


def _other_token(cache: KVCacheManager) -> None:
    cache.sequences.tokens[_slot(cache), 5] += 1


def _indexed_early(cache: KVCacheManager) -> None:
    cache.sequences.computed[_slot(cache)] = 7


def _states_of_no_model(cache: KVCacheManager) -> None:
    cache.sequences.state_used[_slot(cache)] = 1


def _slot_without_an_id(cache: KVCacheManager) -> None:
    cache.sequences.id[_slot(cache)] = 0


def _slot_of_another_id(cache: KVCacheManager) -> None:
    cache.sequences.id[_slot(cache)] += 1


def _slot_twice_free(cache: KVCacheManager) -> None:
    cache.sequences._free.append(cache.sequences._free[0])


def _free_slot_with_blocks(cache: KVCacheManager) -> None:
    cache.sequences.used[cache.sequences._free[0]] = 1


def _cached_is_referenced(cache: KVCacheManager) -> None:
    block, blocks = _cached(cache), cache.blocks
    used = cache.sequences.table[_slot(cache), 2]
    blocks.state[block], blocks.state[used] = blocks.state[used], CACHED
    blocks.refcount[block], blocks.refcount[used] = blocks.refcount[used], 0


def _cached_of_another_tenant(cache: KVCacheManager) -> None:
    cache.blocks.owner[_cached(cache)] += 1


def _cached_is_not_indexed(cache: KVCacheManager) -> None:
    cache.blocks.indexed[_cached(cache)] = False


def _hash_of_another_block(cache: KVCacheManager) -> None:
    cache.store.hash[_cached(cache)] += np.uint64(1)


def _content_of_another_hash(cache: KVCacheManager) -> None:
    cache.store.tokens[_cached(cache), 0] += 1


def _child_of_another_parent(cache: KVCacheManager) -> None:
    children = cache.groups[0].index._children
    (roots,) = (key for key, own in children.items() if key < 0 and isinstance(own, dict))
    children[roots - 1] = children.pop(roots)


def _lost_child(cache: KVCacheManager) -> None:
    children = cache.groups[0].index._children
    del children[next(key for key, own in children.items() if not isinstance(own, dict))]


def _only_child_in_a_dictionary(cache: KVCacheManager) -> None:
    children = cache.groups[0].index._children
    key = next(key for key, own in children.items() if not isinstance(own, dict))
    children[key] = {children[key]: None}


@pytest.mark.parametrize(
    ("damage", "noticed"),
    [
        (_twice_in_a_table, "twice in one table"),
        (_block_of_another_pool, "a block of another pool"),
        (_other_holder, "holders, count"),
        (_other_kind, "a block of another kind"),
        (_other_token, "foreign tokens"),
        (_indexed_early, "indexed too early"),
        (_states_of_no_model, "state blocks disagree"),
        (_slot_without_an_id, "not mapped"),
        (_slot_of_another_id, "the wrong slot"),
        (_slot_twice_free, "twice free"),
        (_free_slot_with_blocks, "a free slot holds"),
        (_cached_is_referenced, "holders, count"),
        (_cached_of_another_tenant, "LRU list"),
        (_cached_is_not_indexed, "indexed"),
        (_hash_of_another_block, "a hash names another block"),
        (_content_of_another_hash, "the hash of its content"),
        (_child_of_another_parent, "wrong parent"),
        (_lost_child, "children"),
        (_only_child_in_a_dictionary, "an only child"),
    ],
)
def test_damage_is_noticed(make_pool: MakePool, damage: Callable[[KVCacheManager], None], noticed: str) -> None:
    driver, worker = make_pool(blocks=32)
    for prompt in (PROMPT, OTHER, THIRD):
        driver.submit(prompt, max_tokens=1)
        driver.run_until_idle()
    driver.submit(PROMPT, max_tokens=4)
    driver.turn()
    driver.answer(worker)
    driver.machine.check_invariants()
    damage(driver.machine.cache)
    with pytest.raises(AssertionError, match=noticed):
        driver.machine.check_invariants()
