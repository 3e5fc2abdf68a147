"""Ages, accesses, eviction under pressure, and time to live."""

from __future__ import annotations

import pytest

from kvforge.protocol.errors import CapacityExceeded, InvalidRequest, SequenceNotFound
from kvforge.protocol.messages import GetTokens
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import continuation


# behaviour 21
def test_creation_last_access_and_access_count_are_kept_per_sequence(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2])
    info = driver.info(sequence)
    assert (info.age_us, info.idle_us, info.accesses) == (0, 0, 0)
    driver.advance(100)
    driver.tokens(sequence)
    driver.advance(40)
    info = driver.info(sequence)
    assert (info.age_us, info.idle_us, info.accesses) == (140, 40, 1)
    driver.append((sequence, [3]))
    driver.advance(5)
    info = driver.info(sequence)
    assert (info.age_us, info.idle_us, info.accesses) == (145, 5, 2)
    driver.fork(sequence)
    assert driver.info(sequence).accesses == 3


# behaviour 21
def test_asking_about_a_sequence_is_not_an_access_and_a_refused_append_is_none(make_pool: MakePool) -> None:
    driver, _ = make_pool(blocks_per_sequence_max=1)
    sequence = driver.create([1, 2, 3, 4])
    driver.advance(7)
    driver.info(sequence)
    driver.explain(sequence_id=sequence)
    driver.refused(driver.append_message((sequence, [5])), CapacityExceeded)
    assert (driver.info(sequence).idle_us, driver.info(sequence).accesses) == (7, 0)


# behaviour 22
def test_a_full_pool_evicts_the_least_recently_used_idle_sequence_whole(make_pool: MakePool) -> None:
    driver, _ = make_pool(7, policy="lru")
    old, middle, new = (driver.create(range(length)) for length in (9, 4, 5))
    for sequence in (middle, old, new):
        driver.advance(10)
        driver.tokens(sequence)
    assert driver.free() == 1
    driver.advance(10)
    asking = driver.create([1, 2, 3, 4, 5])
    assert [driver.info(s).resident for s in (old, middle, new, asking)] == [True, False, True, True]
    driver.advance(10)
    driver.append((asking, [6, 7, 8, 9]))
    assert [driver.info(s).resident for s in (old, middle, new, asking)] == [False, False, True, True]
    assert (driver.info(old).blocks, driver.info(old).length) == (0, 9)
    assert driver.free() == 7 - 2 - 3
    assert driver.machine.cache.residency.evicted_total == 2
    assert driver.tokens(old) == list(range(9))


# behaviour 22
def test_an_evicted_sequence_is_computed_again_when_it_is_needed(make_pool: MakePool) -> None:
    driver, _ = make_pool(4)
    victim = driver.create([1, 2, 3, 4, 5, 6])
    driver.submit(sequence_id=victim, max_tokens=1)
    driver.run_until_idle()
    driver.advance(10)
    other = driver.create(range(100, 116))
    assert not driver.info(victim).resident
    assert driver.info(other).blocks == 4
    driver.advance(10)
    text = driver.tokens(victim)
    request = driver.submit([7], sequence_id=victim, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*text, 7], 3)
    assert not driver.info(other).resident


# behaviour 22
def test_cached_blocks_go_before_idle_sequences(make_pool: MakePool) -> None:
    driver, _ = make_pool(6)
    driver.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    driver.run_until_idle()
    assert driver.stats().pools[0].cached == 2
    idle = driver.create([50] * 8)
    newer = driver.create([60] * 16)
    assert driver.info(idle).resident
    assert (driver.stats().pools[0].cached, driver.free()) == (0, 0)
    driver.create([70])
    assert not driver.info(idle).resident
    assert driver.info(newer).resident


# behaviour 22
def test_never_the_sequence_that_is_asking(make_pool: MakePool) -> None:
    driver, _ = make_pool(3)
    asking = driver.create(range(12))
    driver.advance(100)
    error = driver.refused(driver.append_message((asking, [12])), CapacityExceeded)
    assert (error.needed, error.available) == (1, 0)
    other = driver.fork(asking)[0]
    driver.refused(driver.append_message((asking, [12]), (other, [12])), CapacityExceeded)
    assert driver.info(asking).resident
    assert driver.info(other).resident


# behaviour 22
def test_never_a_sequence_in_a_running_step(make_pool: MakePool) -> None:
    driver, worker = make_pool(3)
    sequence = driver.create([1, 2, 3, 4, 5])
    request = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.turn()
    driver.refused(driver.create_message(range(8)), CapacityExceeded)
    driver.cancel(request)  # idle now, but the steps in flight still read its row
    driver.refused(driver.create_message(range(8)), CapacityExceeded)
    while worker.inbox:
        driver.answer(worker)
    driver.turn()
    assert driver.info(driver.create(range(8))).resident
    assert not driver.info(sequence).resident


# behaviour 22
def test_eviction_that_would_not_be_enough_evicts_nobody(make_pool: MakePool) -> None:
    driver, _ = make_pool(6)
    idle = driver.create(range(8))
    pinned = driver.create(range(8))
    for block in driver.blocks_of(pinned):
        driver.ref(block, "pin")
    error = driver.refused(driver.create_message(range(20)), CapacityExceeded)
    assert error.needed == 5
    assert driver.info(idle).resident
    assert driver.info(pinned).resident
    assert driver.info(driver.create(range(16))).blocks == 4
    assert driver.info(pinned).resident


# behaviour 22
def test_evicting_one_of_two_forks_frees_nothing_so_both_go(make_pool: MakePool) -> None:
    driver, _ = make_pool(3)
    sequence = driver.create(range(8))
    (fork,) = driver.fork(sequence)
    driver.advance(1)
    assert driver.info(driver.create(range(4))).resident
    assert driver.info(sequence).resident
    driver.create(range(8))
    assert not driver.info(sequence).resident
    assert not driver.info(fork).resident


# behaviour 22
def test_policy_none_refuses_instead_of_evicting(make_pool: MakePool) -> None:
    driver, _ = make_pool(3, policy="none")
    idle = driver.create(range(12))
    driver.advance(10_000_000)
    driver.refused(driver.create_message([1]), CapacityExceeded)
    assert driver.info(idle).resident
    driver.remove(idle)
    assert driver.create([1])


# behaviour 24
def test_an_idle_sequence_is_removed_after_its_time_to_live_and_the_owner_is_told_why(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    leased = driver.create(range(9), idle_ttl_ms=2000)
    other = driver.create([1])
    driver.advance(1_500_000)
    driver.tokens(leased)
    driver.turn()
    driver.advance(1_999_999)
    driver.turn()
    assert driver.info(leased).idle_ttl_ms == 2000
    driver.advance(100_001)
    driver.turn()
    error = driver.refused(GetTokens(rid=1, sequence_id=leased), SequenceNotFound)
    assert "idle for its time to live of 2 s" in str(error)
    assert driver.free() == 15
    assert driver.tokens(other) == [1]


# behaviour 24
def test_a_fork_inherits_the_time_to_live(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1], idle_ttl_ms=1000)
    (fork,) = driver.fork(sequence)
    assert driver.info(fork).idle_ttl_ms == 1000
    driver.advance(900_000)
    driver.tokens(fork)
    driver.advance(200_000)
    driver.turn()
    driver.refused(GetTokens(rid=1, sequence_id=sequence), SequenceNotFound)
    assert driver.tokens(fork) == [1]


# behaviour 24
def test_a_lease_outlasts_its_owners_connection_and_nothing_else_does(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    leased = driver.create([1], client=5, idle_ttl_ms=1000)
    bound = driver.create([1], client=5)
    driver.gone(5)
    assert driver.tokens(leased) == [1]
    error = driver.refused(GetTokens(rid=1, sequence_id=bound), SequenceNotFound)
    assert "owner's connection ended" in str(error)


# behaviour 24
def test_a_fork_of_a_sequence_whose_owner_is_gone_is_its_own_owners(make_pool: MakePool) -> None:
    """A kept sequence gets a time to live when its owner disconnects; another client's fork has none (seed 418)."""
    driver, worker = make_pool(lease_us=1_000_000)
    sequence = driver.create([1, 2, 3], client=5)
    driver.submit(sequence_id=sequence, max_tokens=3, detached=True, client=5)
    driver.turn()
    driver.gone(5)
    (fork,) = driver.fork(sequence, client=6)
    assert (driver.info(sequence).idle_ttl_ms > 0, driver.info(fork).idle_ttl_ms) == (True, 0)
    while worker.inbox:
        driver.answer(worker)
    driver.run_until_idle()
    driver.advance(1000 * driver.info(sequence).idle_ttl_ms + 1)
    driver.turn()
    driver.refused(GetTokens(rid=1, sequence_id=sequence), SequenceNotFound)
    assert driver.tokens(fork)[:3] == [1, 2, 3]


# behaviour 24
def test_a_sequence_in_use_does_not_expire(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3], idle_ttl_ms=1000)
    request = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.turn()
    driver.advance(10_000_000)
    driver.turn()
    while worker.inbox:
        driver.answer(worker)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 3)
    driver.advance(1_100_000)
    driver.turn()
    driver.refused(GetTokens(rid=1, sequence_id=sequence), SequenceNotFound)


@pytest.mark.parametrize("ttl", [-1, 30 * 24 * 3600 * 1000 + 1])
def test_a_time_to_live_out_of_range_is_refused_by_name(make_pool: MakePool, ttl: int) -> None:
    driver, _ = make_pool()
    assert driver.refused(driver.create_message([1], idle_ttl_ms=ttl), InvalidRequest).field == "idle_ttl_ms"


# behaviour 24
def test_the_list_of_reasons_why_a_sequence_is_gone_is_bounded(make_pool: MakePool) -> None:
    driver, _ = make_pool(finished_max=2)
    gone = [driver.create([1], idle_ttl_ms=1) for _ in range(4)]
    driver.advance(200_000)
    driver.turn()
    told = [str(driver.refused(GetTokens(rid=1, sequence_id=s), SequenceNotFound)) for s in gone]
    assert ["idle" in text for text in told] == [False, False, True, True]
