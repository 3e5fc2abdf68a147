"""`zero_on_tenant_change`: which blocks a step zeroes, and when."""

from __future__ import annotations

from typing import Any

import pytest

from kvforge.coordinator.core.cache.zeroing import Zeroing
from kvforge.coordinator.core.limits import CacheLimits, Limits
from kvforge.coordinator.core.scheduling.scheduler import SCORED_TOKENS_MAX
from kvforge.protocol.codec import FRAME_BYTES_MAX
from kvforge.protocol.errors import Conflict, InvalidConfiguration
from kvforge.protocol.messages import Refused, Step, WorkerHello
from tests.coordinator.driver import Driver, FakeWorker, FromWorker, ToWorker, continuation, int32, model_info
from tools.simulation.limits import make_limits

BLOCKS = 8
SIZE = 4


def zeroing(**limits: Any) -> tuple[Driver, FakeWorker]:
    driver = Driver(zero_on_tenant_change=True, **limits)
    return driver, driver.add_worker(BLOCKS)


def zeros_of(worker: FakeWorker) -> list[list[int]]:
    """The blocks that each step zeroed since the last call, in order."""
    steps, worker.steps = worker.steps, []
    return [step.zeros.tolist() for step in steps]


def used_by(driver: Driver, tenant: str, first: int, tokens: int = 5, max_tokens: int = 1) -> None:
    """Run a request of the tenant to its end."""
    prompt = list(range(first, first + tokens))
    request = driver.submit(prompt, max_tokens, tenant=tenant)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(prompt, max_tokens)


def test_every_block_of_a_new_pool_is_zeroed_before_its_first_use() -> None:
    driver, worker = zeroing()
    used_by(driver, "a", 1, tokens=9)
    assert zeros_of(worker) == [[0, 1, 2]]


def test_a_tenants_own_block_is_not_zeroed_again() -> None:
    driver, worker = zeroing()
    used_by(driver, "a", 1, BLOCKS * SIZE - 1)
    zeros_of(worker)
    used_by(driver, "a", 100, BLOCKS * SIZE - 1)
    assert zeros_of(worker) == [[]]


def test_a_block_that_another_tenant_wrote_is_named_by_the_step_that_first_uses_it() -> None:
    driver, worker = zeroing()
    used_by(driver, "a", 1, BLOCKS * SIZE - 1)
    zeros_of(worker)
    request = driver.submit(range(100, 109), 1, tenant="b")
    driver.run_until_idle()
    (named, *later) = zeros_of(worker)
    assert len(named) == 3 and not any(later)
    used_by(driver, "a", 200, BLOCKS * SIZE - 1)
    assert sorted(zeros_of(worker)[0]) == sorted(named), "b's blocks return to a"
    assert driver.answer_of(request) == continuation(list(range(100, 109)), 1)


def test_a_row_that_decodes_steadily_gets_its_next_block_zeroed() -> None:
    driver, worker = zeroing(steps_in_flight_max=1)
    used_by(driver, "a", 1, BLOCKS * SIZE - 1)
    zeros_of(worker)
    used_by(driver, "b", 100, tokens=3, max_tokens=10)
    named = zeros_of(worker)
    assert [len(ids) for ids in named] == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert len({block for ids in named for block in ids}) == 4


def test_the_target_of_a_copy_is_zeroed_whole_before_it() -> None:
    """A copy of some tokens would leave another tenant's tokens behind them."""
    driver, worker = zeroing()
    used_by(driver, "a", 1, BLOCKS * SIZE - 1)
    parent = driver.create(range(100, 106), tenant="b")
    driver.submit(sequence_id=parent, max_tokens=1)
    driver.run_until_idle()
    zeros_of(worker)
    (child,) = driver.fork(parent)
    driver.submit(sequence_id=child, max_tokens=1)
    driver.run_until_idle()
    copies = [step.copies.reshape(-1, 3).tolist() for step in worker.steps if step.copies.size]
    targets = [target for triples in copies for _, target, count in triples if count < SIZE]
    named = {block for ids in zeros_of(worker) for block in ids}
    assert targets and set(targets) <= named


def test_what_was_given_back_unused_is_still_zeroed() -> None:
    owed = Zeroing(10, 4)
    owed.note_writer(int32([10, 11]), 1)
    owed.note_writer(int32([11]), 2)
    owed.note_writer(int32([11]), 1)
    assert owed.pop_blocks().tolist() == [10, 11]
    owed.note_writer(int32([10]), 1)
    assert owed.pop_blocks().tolist() == []


def test_a_tenants_number_that_becomes_anothers_brings_it_nothing() -> None:
    """With more tenant names than slots, an idle tenant is evicted and the next one gets its number."""
    driver, worker = zeroing(tenants_max=2)
    for first, tenant in ((1, "a"), (100, "b"), (200, "c"), (300, "d")):
        used_by(driver, tenant, first, BLOCKS * SIZE - 1)
        assert sorted(block for ids in zeros_of(worker) for block in ids) == list(range(BLOCKS)), tenant


def test_a_worker_that_comes_anew_has_memory_of_nobody_knows_whom() -> None:
    driver, worker = zeroing()
    used_by(driver, "a", 1)
    driver.lose(worker)
    worker = driver.add_worker(BLOCKS)
    used_by(driver, "a", 1)
    assert zeros_of(worker) == [[0, 1]]


def test_a_worker_that_cannot_zero_is_refused() -> None:
    driver = Driver(zero_on_tenant_change=True)
    worker = FakeWorker(driver.machine, 7, "old", BLOCKS, model_info())
    driver.apply(FromWorker(7, WorkerHello(rid=1, name="old", pid=1)))
    ready = driver.ready(worker)
    old = type(ready)(**{name: getattr(ready, name) for name in ready.__struct_fields__ if name != "zeroes"})
    effects = driver.apply(FromWorker(7, old))
    refusals = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Refused)]
    assert refusals[0].error.code == Conflict.code and "zero_on_tenant_change" in refusals[0].error.message
    assert not driver.machine.cache.groups


def test_nothing_is_named_where_it_is_not_asked_for() -> None:
    driver = Driver()
    worker = driver.add_worker(BLOCKS)
    for first, tenant in ((1, "a"), (100, "b")):
        used_by(driver, tenant, first, BLOCKS * SIZE - 1)
    assert worker.steps and not any(step.zeros.size for step in worker.steps)
    assert next(iter(driver.machine.cache.groups.values())).pool.zeroing is None


def test_a_step_that_zeroes_a_whole_pool_fits_a_message() -> None:
    make_limits(zero_on_tenant_change=True, blocks_max=4 << 20)
    make_limits(blocks_max=1 << 30)
    with pytest.raises(InvalidConfiguration) as caught:
        Limits(cache=CacheLimits(zero_on_tenant_change=True), bounds=make_limits(blocks_max=(4 << 20) + 1).bounds)
    assert caught.value.field == "limits.blocks_max"
    # What follows zeros is bounded on its own, and small.
    after = ["scored", "following", "drafts", "host_writes", "host_reads", "host_wipes"]
    assert [name for name, _ in Step.FRAMES[-7:]] == ["zeros", *after]
    assert 2 * 4 * SCORED_TOKENS_MAX <= FRAME_BYTES_MAX // 64
