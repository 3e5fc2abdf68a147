"""Blocks: allocation, reference counts, generations, quarantine; through the pool and through the commands."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.blocks import CACHED, FREE, QUARANTINED, REFERENCED, Blocks
from kvforge.coordinator.core.cache.pool_invariants import check_pool
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.waits import Waits
from kvforge.protocol.errors import (
    AlreadyHolder,
    BlockNotFound,
    BlockNotHeld,
    CapacityExceeded,
    InvalidRequest,
    NotAHolder,
    QuotaExceeded,
    StaleGeneration,
)
from kvforge.protocol.messages import Explain, GetBlock, RefBlock, UnrefBlock
from tests.coordinator.conftest import MakePool
from tools.simulation.digest import digest
from tools.simulation.limits import make_limits


def new_pool(count: int, base: int = 0, **quotas: Quota) -> BlockPool:
    """A pool with tenants a = 1, b = 2, c = 3."""
    tenants = Tenants(make_limits(quotas=quotas, tenants_max=8))
    for name in "abc":
        tenants.intern(name)
    blocks = Blocks(base + count, 4)
    return BlockPool(Clock(), blocks, tenants, Waits(), Flags(blocks), 1, base, count)


class Flags:
    """A stand-in for the prefix index: tests set the flags of indexed blocks themselves."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.removed: list[int] = []

    def remove(self, block: int) -> None:
        """Remove the block's entry."""
        self.removed.append(block)
        self.blocks.indexed[block] = False

    def check_invariants(self, base: int, count: int) -> None:
        """Consistent by construction."""


def ids(*values: int) -> np.ndarray:
    """Block ids."""
    return np.array(values, np.int64)


def test_blocks_with_one_holder_each_are_released_together() -> None:
    pool = new_pool(6)
    blocks = pool.allocate(1, 6)
    pool.hold(blocks[:1])
    before = digest(pool)
    assert not pool.release_sole(blocks[:2])
    assert not pool.release_sole(blocks[[0, 0, 1]]), "each of its holders names it"
    assert digest(pool) == before
    assert pool.release_sole(blocks[1:])
    assert (pool.free, pool.referenced) == (5, 1)
    check_pool(pool)


# behaviour 5
def test_a_fresh_pool_is_all_free() -> None:
    pool = new_pool(5, base=3)
    assert (pool.free, pool.cached, pool.referenced, pool.quarantined) == (5, 0, 0, 0)
    assert (pool.allocated_total, pool.freed_total, pool.referenced_peak) == (0, 0, 0)
    check_pool(pool)


# behaviour 16
def test_exhaust_free_one_and_allocate_again_gives_exactly_that_one_with_a_new_generation() -> None:
    pool = new_pool(3)
    taken = pool.allocate(1, 3)
    assert sorted(taken.tolist()) == [0, 1, 2]
    before = digest(pool)
    with pytest.raises(CapacityExceeded):
        pool.allocate(1, 1)
    assert digest(pool) == before
    assert pool.release(ids(1), 0) == 1
    generation = int(pool.blocks.generation[1])
    with pytest.raises(CapacityExceeded):
        pool.allocate(1, 2)
    assert pool.allocate(1, 1).tolist() == [1]
    assert generation == 1
    assert pool.blocks.generation[:3].tolist() == [0, 1, 0]
    check_pool(pool)


# behaviour 9
def test_bulk_allocation_is_all_or_nothing() -> None:
    pool = new_pool(4)
    pool.allocate(1, 2)
    before = digest(pool)
    with pytest.raises(CapacityExceeded) as caught:
        pool.allocate(1, 3)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert digest(pool) == before
    assert pool.allocate(1, 0).size == 0


# behaviour 17
def test_peak_current_and_totals_are_counted() -> None:
    pool = new_pool(8)
    first = pool.allocate(1, 5)
    pool.release(first[:4], 0)
    pool.allocate(2, 2)
    assert (pool.referenced, pool.referenced_peak, pool.allocated_total, pool.freed_total) == (3, 5, 7, 4)
    assert pool.usage[:4].tolist() == [0, 1, 2, 0]


def test_a_block_that_a_step_may_touch_is_quarantined_until_that_step_is_over() -> None:
    pool = new_pool(2)
    taken = pool.allocate(1, 2)
    assert pool.release(taken, 7) == 2
    assert (pool.free, pool.quarantined) == (0, 2)
    assert pool.blocks.state[taken].tolist() == [QUARANTINED] * 2
    with pytest.raises(CapacityExceeded):
        pool.allocate(1, 1)
    pool.step_done(6)
    assert pool.quarantined == 2
    pool.step_done(7)
    assert (pool.free, pool.quarantined) == (2, 0)
    check_pool(pool)


def test_quarantine_remembers_the_latest_step_of_any_holder() -> None:
    pool = new_pool(1)
    block = pool.allocate(1, 1)
    pool.hold(block)
    pool.release(block, 9)
    pool.release(block, 4)
    pool.step_done(4)
    assert pool.blocks.state[0] == QUARANTINED
    pool.step_done(9)
    assert pool.blocks.state[0] == FREE


def test_an_indexed_block_is_cached_when_its_last_holder_goes_and_evicted_oldest_first() -> None:
    pool = new_pool(3)
    taken = pool.allocate(1, 3)
    pool.blocks.indexed[taken] = True
    pool.release(taken[[1]], 0)
    pool.release(taken[[0, 2]], 0)  # the tail of a table is evicted before its head
    assert pool.blocks.state[taken].tolist() == [CACHED] * 3
    pool.allocate(1, 2)
    assert pool.index.removed == [1, 2]
    check_pool(pool)


def test_holding_a_cached_block_revives_it_with_the_same_generation() -> None:
    pool = new_pool(1)
    block = pool.allocate(1, 1)
    pool.blocks.indexed[block] = True
    pool.release(block, 0)
    pool.hold(block)
    assert pool.blocks.state[0] == REFERENCED
    assert (pool.cached, pool.referenced, int(pool.blocks.generation[0])) == (0, 1, 0)
    check_pool(pool)


def test_a_quarantined_block_that_is_held_again_does_not_become_free_when_its_step_ends() -> None:
    pool = new_pool(1)
    block = pool.allocate(1, 1)
    pool.blocks.indexed[block] = True
    pool.release(block, 3)
    pool.hold(block)
    pool.step_done(3)
    assert pool.blocks.state[0] == REFERENCED
    pool.release(block, 3)
    assert pool.blocks.state[0] == CACHED
    check_pool(pool)


# behaviour 14: below the commands, a double free is a bug of the core, and an assertion catches it
def test_releasing_a_block_that_nobody_holds_is_caught() -> None:
    pool = new_pool(2)
    block = pool.allocate(1, 1)
    pool.release(block, 0)
    before = digest(pool)
    with pytest.raises(AssertionError, match="without holders"):
        pool.release(block, 0)
    with pytest.raises(AssertionError, match="cannot be held"):
        pool.hold(block)
    assert digest(pool) == before


def test_a_ceiling_is_named_in_the_error_and_nothing_is_allocated() -> None:
    pool = new_pool(8, a=Quota(ceiling=3))
    pool.allocate(1, 2)
    before = digest(pool)
    with pytest.raises(QuotaExceeded) as caught:
        pool.allocate(1, 2)
    assert (caught.value.tenant, caught.value.needed, caught.value.ceiling) == ("a", 4, 3)
    assert digest(pool) == before


# --------------------------------------------------------------------------------------------- holders, by command


# behaviour 13
def test_ref_adds_one_holder_and_a_second_ref_by_the_same_holder_is_refused(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3])
    (block,) = driver.blocks_of(sequence)
    reply = driver.ref(block, "me")
    assert (reply.refcount, reply.state, reply.generation) == (2, "referenced", 0)
    error = driver.refused(RefBlock(rid=1, block_id=block, holder="me"), AlreadyHolder)
    assert (error.block_id, error.holder) == (block, "me")
    assert driver.ref(block, "you").refcount == 3
    assert driver.block(block).refcount == 3


# behaviour 13
def test_unref_by_a_stranger_and_a_second_unref_are_refused(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3])
    (block,) = driver.blocks_of(sequence)
    driver.ref(block, "me")
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="you"), NotAHolder)
    assert driver.unref(block, "me").refcount == 1
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="me"), NotAHolder)
    driver.refused(UnrefBlock(rid=1, block_id=block, holder=f"sequence {sequence}"), NotAHolder)
    assert driver.block(block).refcount == 1


# behaviour 13
def test_the_last_unref_frees_the_block_and_says_so(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3])
    (block,) = driver.blocks_of(sequence)
    driver.ref(block, "me")
    assert driver.remove(sequence) == 0
    assert driver.block(block).refcount == 1
    reply = driver.unref(block, "me")
    assert (reply.refcount, reply.state, reply.generation) == (0, "free", 1)
    assert driver.free() == 16
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="me"), BlockNotHeld)


# behaviour 13
def test_the_last_unref_caches_an_indexed_block_and_says_so(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3, 4])
    driver.submit(sequence_id=sequence, prompt=[5], max_tokens=1)
    driver.run_until_idle()
    block = driver.blocks_of(sequence)[0]
    driver.ref(block, "me")
    driver.remove(sequence)
    reply = driver.unref(block, "me")
    assert (reply.refcount, reply.state, reply.generation) == (0, "cached", 0)


# behaviour 13
def test_a_cached_block_that_is_held_by_name_survives_pressure(make_pool: MakePool) -> None:
    driver, _ = make_pool(3, policy="none")
    driver.submit([1, 2, 3, 4, 5], max_tokens=1)
    driver.run_until_idle()
    (block,) = [block for block in range(3) if driver.block(block).state == "cached"]
    assert driver.ref(block, "me").state == "referenced"
    driver.create(range(100, 108))
    driver.refused(driver.create_message([9]), CapacityExceeded)
    assert driver.block(block).generation == 0
    assert driver.unref(block, "me").state == "cached"
    driver.create([9])
    assert (driver.block(block).state, driver.block(block).generation) == ("referenced", 1)


# behaviour 14
def test_a_free_block_cannot_be_held_and_a_stale_generation_is_refused(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3])
    (block,) = driver.blocks_of(sequence)
    driver.ref(block, "me", generation=0)
    driver.refused(RefBlock(rid=1, block_id=block, holder="you", generation=1), StaleGeneration)
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="me", generation=1), StaleGeneration)
    driver.unref(block, "me", generation=0)
    driver.remove(sequence)
    error = driver.refused(RefBlock(rid=1, block_id=block, holder="me", generation=0), StaleGeneration)
    assert (error.generation, error.current) == (0, 1)
    driver.refused(RefBlock(rid=1, block_id=block, holder="me"), BlockNotHeld)
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="me"), BlockNotHeld)


# behaviours 10 and 14
@pytest.mark.parametrize("block", [-1, 16, 63, 64, 1 << 40])
def test_an_unknown_block_id_is_block_not_found_in_every_command(make_pool: MakePool, block: int) -> None:
    driver, _ = make_pool(16)
    for message in (
        GetBlock(rid=1, block_id=block),
        RefBlock(rid=1, block_id=block, holder="me"),
        UnrefBlock(rid=1, block_id=block, holder="me"),
    ):
        error = driver.refused(message, BlockNotFound)
        assert (error.block_id, error.code) == (block, "block_not_found")
    if block >= 0:
        assert driver.refused(Explain(rid=1, block_id=block), BlockNotFound).block_id == block


def test_the_name_of_a_holder_and_the_number_of_holders_are_bounded(make_pool: MakePool) -> None:
    driver, _ = make_pool(holders_per_block_max=2)
    (block,) = driver.blocks_of(driver.create([1]))
    for name in ("", "x" * 129, "a\nb"):
        assert driver.refused(RefBlock(rid=1, block_id=block, holder=name), InvalidRequest).field == "holder"
    driver.ref(block, "one")
    driver.ref(block, "two")
    error = driver.refused(RefBlock(rid=1, block_id=block, holder="three"), CapacityExceeded)
    assert (error.needed, error.available) == (3, 2)
    assert driver.block(block).refcount == 3


def test_what_a_connection_holds_is_released_when_it_ends(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3, 4, 5])
    first, second = driver.blocks_of(sequence)
    driver.ref(first, "dead", client=2)
    driver.ref(second, "dead", client=2)
    driver.ref(second, "alive", client=3)
    driver.gone(2)
    assert [driver.block(first).refcount, driver.block(second).refcount] == [1, 2]
    driver.remove(sequence)
    assert (driver.block(first).state, driver.block(second).state) == ("free", "referenced")


def test_a_block_that_a_step_may_touch_is_not_handed_out_when_its_last_named_holder_lets_go(
    make_pool: MakePool,
) -> None:
    driver, worker = make_pool(4)
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=3)
    driver.turn()
    (slot,) = worker.inbox[0].slots.tolist()
    block = int(driver.machine.cache.sequences.table[slot, 0])
    driver.ref(block, "me")
    driver.cancel(request)
    assert driver.block(block).state == "referenced"
    assert driver.unref(block, "me").state == "quarantined"
    driver.refused(RefBlock(rid=1, block_id=block, holder="me"), BlockNotHeld)
    driver.run_until_idle()
    assert driver.block(block).state == "free"
    assert driver.free() == 4


def test_a_named_holder_of_a_block_that_still_waits_for_its_copy_can_let_go(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3, 4, 5])
    driver.submit(sequence_id=sequence, max_tokens=1)
    driver.run_until_idle()
    (fork,) = driver.fork(sequence)
    driver.append((fork, [7]))
    target = driver.blocks_of(fork)[-1]
    assert driver.machine.cache.groups[0].copies
    driver.ref(target, "me")
    driver.remove(fork)
    assert driver.unref(target, "me").refcount == 0
    driver.run_until_idle()
    assert driver.block(target).state == "free"
    assert driver.tokens(sequence)[:5] == [1, 2, 3, 4, 5]
