"""The prefix index: which blocks are shared, when, and with which requests."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from kvforge.coordinator.core.cache import kv_cache_manager
from kvforge.coordinator.core.cache.blocks import REFERENCED
from kvforge.coordinator.core.cache.hashing import BlockHasher
from kvforge.coordinator.core.cache.pool_indexing import index_block, index_run
from kvforge.coordinator.core.cache.prefix_cache import root_key
from kvforge.protocol.errors import InvalidRequest
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation, int32
from tests.coordinator.naive import WeakHasher
from tools.simulation.digest import digest

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]


def served(driver: Driver, prompt: list[int], max_tokens: int = 1, **fields: object) -> int:
    """Run a request to its end, check its tokens, and return how many prompt tokens were cached."""
    request = driver.submit(prompt, max_tokens, **fields)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(prompt, max_tokens)
    return driver.request(request).cached_tokens


def test_full_blocks_of_an_earlier_request_are_shared(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    assert served(driver, PROMPT) == 0
    assert served(driver, PROMPT) == 8
    assert worker.steps[-1].starts.tolist() == [8]
    assert worker.steps[-1].tokens.tolist() == [30]
    assert served(driver, PROMPT[:4] + [99] * 5) == 4


def test_at_least_one_token_is_computed_even_if_all_are_cached(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    served(driver, PROMPT)
    assert served(driver, PROMPT[:8]) == 4  # the second block is complete, but its last token must be fed
    assert (worker.steps[-1].starts.tolist(), worker.steps[-1].counts.tolist()) == ([4], [4])


def test_hits_are_salted_by_tenant_or_by_an_explicit_salt(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    assert served(driver, PROMPT, tenant="a") == 0
    assert served(driver, PROMPT, tenant="b") == 0
    assert served(driver, PROMPT, tenant="a", salt="shared") == 0
    assert served(driver, PROMPT, tenant="b", salt="shared") == 8
    assert served(driver, PROMPT, tenant="b", salt="tenant:a") == 0
    assert served(driver, PROMPT, tenant="a") == 8


def test_a_salt_that_is_too_long_is_refused(driver: Driver) -> None:
    message = driver.submit_message(PROMPT, salt="x" * 257)
    assert driver.refused(message, InvalidRequest).field == "salt"
    assert driver.refused(driver.create_message(PROMPT, salt="x" * 257), InvalidRequest).field == "salt"


def test_a_block_is_indexed_only_after_the_worker_acknowledged_the_step_that_filled_it(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    first = driver.submit(PROMPT, max_tokens=1)
    driver.turn()
    assert len(worker.inbox) == 1
    assert not driver.machine.cache.groups[0].index
    second = driver.submit(PROMPT, max_tokens=1)
    driver.turn()
    assert driver.request(second).cached_tokens == 0
    driver.answer(worker)
    assert len(driver.machine.cache.groups[0].index) == 2
    assert served(driver, PROMPT) == 8
    assert driver.answer_of(first) == driver.answer_of(second) == continuation(PROMPT, 1)


def test_client_sequences_and_requests_share_with_each_other(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT)
    sequence = driver.create(PROMPT)
    assert driver.info(sequence).computed_tokens == 8
    assert driver.info(sequence).blocks == 3
    assert driver.stats().pools[0].referenced == 3
    request = driver.submit(sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT, 2)
    assert driver.tokens(sequence) == PROMPT + continuation(PROMPT, 2)


def test_a_generated_answer_is_cached_too(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT, max_tokens=8)
    again = PROMPT + continuation(PROMPT, 8)
    assert served(driver, again) == 16


# behaviour 22
def test_cached_blocks_are_evicted_least_recently_used_first_and_tails_before_heads(make_pool: MakePool) -> None:
    driver, _ = make_pool(6)
    first, second = PROMPT, [token + 500 for token in PROMPT]
    served(driver, first)
    served(driver, second)
    assert driver.stats().pools[0].cached == 4
    assert served(driver, first) == 8  # now the second one is older
    driver.create(range(900, 912))  # three blocks: two are free, one is evicted
    assert driver.stats().pools[0].cached == 3
    assert driver.stats().pools[0].free == 0
    index, salt = driver.machine.cache.groups[0].index, driver.machine.cache.hasher.salt("tenant:default")
    found = {
        name: index.match(salt, int32(prompt), driver.machine.cache.indexing.hashes(salt, int32(prompt))).size
        for name, prompt in (("first", first), ("second", second))
    }
    assert found == {"first": 2, "second": 1}


def test_a_partly_equal_block_is_copied_and_only_the_rest_is_computed(make_pool: MakePool) -> None:
    driver, worker = make_pool(block_size=8, partial_tokens_min=3)
    served(driver, [*range(16), 99])
    other = [*range(11), 500, 501]
    assert served(driver, other, max_tokens=6) == 11
    (copy,) = [step for step in worker.steps if step.copies.size]
    assert copy.copies[2] == 3
    assert copy.starts.tolist() == [11]
    assert served(driver, [*range(10), 600, 601]) == 8  # two tokens are too few to pay for a copy


def test_a_whole_cached_block_is_copied_where_its_last_token_must_be_computed_again(make_pool: MakePool) -> None:
    driver, worker = make_pool(block_size=8, partial_tokens_min=3)
    served(driver, [*range(16), 99])
    assert served(driver, list(range(16)), max_tokens=3) == 15
    assert [step.copies[2] for step in worker.steps if step.copies.size] == [7]
    assert served(driver, [*range(16), 99]) == 16


def test_a_partial_copy_survives_the_eviction_of_its_source(make_pool: MakePool) -> None:
    driver, _ = make_pool(4, block_size=8, partial_tokens_min=3)
    served(driver, [*range(8), 99])
    request = driver.submit([*range(6), 500, 501, 502], max_tokens=4)
    driver.submit(range(700, 710), max_tokens=2)
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == 6
    assert driver.answer_of(request) == continuation([*range(6), 500, 501, 502], 4)


def test_where_the_source_of_a_partial_copy_leaves_too_little_room_it_is_computed_instead(make_pool: MakePool) -> None:
    driver, worker = make_pool(4, block_size=8, partial_tokens_min=3)
    served(driver, [*range(8), 99])
    assert driver.stats().pools[0].cached == 1
    prompt = [*range(6), *range(500, 520)]  # all four blocks, the copy's source included
    assert served(driver, prompt, max_tokens=3) == 0
    assert not any(step.copies.size for step in worker.steps)


def test_what_decodes_have_filled_is_indexed_when_its_request_ends_between_two_lookings(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=20)
    driver.turn()
    for _ in range(6):  # a step is always in flight, so filled blocks are not indexed at once
        driver.answer(worker)
        driver.turn()
    assert len(driver.machine.cache.groups[0].index) == 0
    driver.cancel(request)
    driver.run_until_idle()
    text = [1, 2, 3, *continuation([1, 2, 3], 5)]
    assert served(driver, [*text, 77]) == 8


def test_descendants_of_an_evicted_block_are_never_hit_under_a_recycled_parent(make_pool: MakePool) -> None:
    driver, _ = make_pool(16)
    cache = driver.machine.cache
    served(driver, PROMPT)
    index, pool, salt = cache.groups[0].index, cache.groups[0].pool, cache.hasher.salt("tenant:default")
    hashes = cache.indexing.hashes(salt, int32(PROMPT))
    head, tail = index.match(salt, int32(PROMPT), hashes).tolist()
    pool.unindex(head)
    assert index.match(salt, int32(PROMPT), hashes).size == 0
    assert served(driver, PROMPT) == 0
    found = index.match(salt, int32(PROMPT), hashes).tolist()
    assert len(found) == 2
    assert found[1] != tail
    driver.machine.check_invariants()


def test_hit_rates_are_counted_by_tenant(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT, tenant="a")
    served(driver, PROMPT, tenant="a")
    served(driver, PROMPT, tenant="b")
    rates = {t.tenant: (t.prefix_hit_tokens_total, t.prefix_queried_tokens_total) for t in driver.stats().tenants}
    assert rates == {"a": (8, 18), "b": (0, 9)}
    assert driver.stats().requests.cached_tokens_total == 8


# ------------------------------------------------------------------------------------------------------------- hashes


def test_a_chain_is_the_same_whether_computed_at_once_or_block_by_block() -> None:
    hasher = BlockHasher(4, b"key", 64)
    tokens = np.arange(64, dtype=np.int32)
    chain = hasher.chain(5, tokens)
    value = np.array([5], np.uint64)
    for i in range(16):
        value = hasher.extend(value, tokens[None, i * 4 : i * 4 + 4])
        assert value[0] == chain[i]
    assert (hasher.chain(int(chain[3]), tokens[16:]) == chain[4:]).all()
    assert hasher.chain(5, tokens[:3]).size == 0


def test_another_key_salt_or_order_of_blocks_gives_other_hashes() -> None:
    tokens = np.arange(8, dtype=np.int32)
    swapped = np.concatenate([tokens[4:], tokens[:4]])
    hasher = BlockHasher(4, b"key", 64)
    values = {
        int(hasher.chain(5, tokens)[-1]),
        int(hasher.chain(6, tokens)[-1]),
        int(hasher.chain(5, swapped)[-1]),
        int(BlockHasher(4, b"other key", 64).chain(5, tokens)[-1]),
    }
    assert len(values) == 4
    assert hasher.salt("a") != hasher.salt("b")
    assert 0 <= hasher.salt("a") < 1 << 62
    assert root_key(hasher.salt("a")) < 0


# ---------------------------------------------------------------------------------------------------------- collisions


@pytest.mark.parametrize("distinct", [1, 2, 3, 7])
def test_with_colliding_hashes_answers_stay_exact(monkeypatch: pytest.MonkeyPatch, distinct: int) -> None:
    monkeypatch.setattr(WeakHasher, "distinct", distinct)
    monkeypatch.setattr(kv_cache_manager, "BlockHasher", WeakHasher)
    driver = Driver()
    driver.add_worker(16)
    for i in range(30):
        prompt = [i % 3, i % 2, 1, 2, i % 5, 3, 4, i % 2, 9, i % 3]
        served(driver, prompt, max_tokens=4, tenant="ab"[i % 2])
    driver.run_until_idle()
    assert driver.free_or_cached() == 16
    assert driver.stats().pools[0].cached <= distinct


@pytest.mark.parametrize("values", [[7, 8, 7], [7, 8, None]], ids=["twice", "known"])
def test_blocks_of_which_one_cannot_be_indexed_beside_the_others_are_none_of_them(
    make_pool: MakePool, values: list[int | None]
) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT)
    index, ids = driver.machine.cache.groups[0].index, np.array([9, 10, 11])
    (known, *_) = driver.machine.cache.indexing.hashes(
        driver.machine.cache.hasher.salt("tenant:default"), int32(PROMPT)
    )
    hashes = np.array([known if value is None else value for value in values], np.uint64)
    driver.machine.cache.blocks.state[ids] = REFERENCED
    before = digest(index)
    assert not index.add_new(ids, np.array([-1, 9, 10]), hashes, np.zeros((3, 4), np.int32))
    assert digest(index) == before


def test_children_that_come_together_are_those_of_their_parents_one_by_one(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    index, ids = driver.machine.cache.groups[0].index, np.array([5, 6, 7, 8])
    driver.machine.cache.blocks.state[:10] = REFERENCED
    index.add(4, -1, 40, int32([1, 2, 3, 4]))
    contents = np.array([[1, 2, 3, 5], [9, 9, 9, 9], [1, 2, 5, 5], [9, 9, 0, 0]], np.int32)
    parents = np.array([-1, index.key(5), -1, index.key(5)])
    assert index.add_new(ids, parents, np.array([50, 60, 70, 80], np.uint64), contents)
    assert index.match_partial(-1, int32([1, 2, 3, 5])) == (5, 4)
    assert index.match_partial(-1, int32([1, 2, 3, 4])) == (4, 4)
    assert index.match_partial(-1, int32([1, 2, 5, 6])) == (7, 3)
    assert index.match_partial(index.key(5), int32([9, 9, 0])) == (8, 3)


@pytest.mark.parametrize("together", [False, True])
def test_a_block_with_other_tokens_has_no_children_of_its_earlier_entry(make_pool: MakePool, together: bool) -> None:
    """A held block keeps its key while it is removed from the index and its tokens change."""
    driver, _ = make_pool()
    pool, machine = driver.machine.cache.groups[0].pool, driver.machine
    index, hasher = pool.index, machine.cache.hasher
    ids = pool.allocate(0, 3).tolist()
    first, changed, after = int32([1, 2, 3, 4]), int32([1, 2, 9, 9]), int32([5, 6, 7, 8])
    values = hasher.extend(np.array([7], np.uint64), first[None])
    key = index_block(pool, ids[0], -8, int(values[0]), first)
    (below,) = hasher.extend(values, after[None])
    index_block(pool, ids[1], key, int(below), after)
    assert index.match_partial(key, int32([5, 6, 7])) == (ids[1], 3)
    pool.unindex(ids[0])
    (value,) = hasher.extend(np.array([7], np.uint64), changed[None])
    if together:
        blocks, kept = np.array([ids[0], ids[2]]), np.array([below + 1], np.uint64)
        again = index_run(pool, blocks, -8, np.concatenate([[value], kept]), np.stack([changed, first]))
        assert index.match_partial(key, int32([1, 2, 3])) == (ids[2], 3) and again == index.key(ids[2])
    else:
        assert index_block(pool, ids[0], -8, int(value), changed) == key, "the key is the same"
    assert index.match_partial(key, int32([5, 6, 7])) == (-1, 0)
    assert not machine.cache.blocks.indexed[ids[1]]


def test_a_candidate_with_the_same_tokens_after_another_parent_is_no_hit(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT)
    served(driver, [50, 51, 52, 53, *PROMPT[4:]])
    cache = driver.machine.cache
    index, salt = cache.groups[0].index, cache.hasher.salt("tenant:default")
    tokens = int32(PROMPT[:8])
    own = cache.indexing.hashes(salt, int32(PROMPT))
    other = cache.indexing.hashes(salt, int32([50, 51, 52, 53, *PROMPT[4:]]))
    assert index.match(salt, tokens, own).size == 2
    forged = np.array([own[0], other[1]])  # as if the two chains had collided: the same tokens, after another block
    assert index.match(salt, tokens, forged).tolist() == index.match(salt, tokens, own)[:1].tolist()


def test_a_copy_of_the_entries_is_compared_with_its_own_tokens(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    served(driver, PROMPT)
    store = driver.machine.cache.store
    copy = deepcopy(store)
    assert np.shares_memory(copy.tokens, copy.contents)
    copy.tokens[0, 0] += 1
    assert copy.contents[0].tobytes() == copy.tokens[0].tobytes() != store.contents[0].tobytes()
