"""Quotas: no other tenant can use a floor, and no tenant exceeds its ceiling."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.cache.meters import FEW
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded
from tests.coordinator.driver import Driver, continuation
from tools.simulation.limits import make_limits


def with_quotas(blocks: int, quotas: dict[str, Quota], **limits: Any) -> Driver:
    """A machine with one pool and quotas."""
    driver = Driver(quotas=quotas, **limits)
    driver.add_worker(blocks)
    return driver


def usage(driver: Driver, tenant: str) -> int:
    """Blocks charged to the tenant."""
    return next(row.blocks for row in driver.stats().tenants if row.tenant == tenant)


def test_a_floor_is_kept_free_for_its_tenant() -> None:
    driver = with_quotas(8, {"a": Quota(floor=3)})
    error = driver.refused(driver.create_message(range(24), tenant="b"), CapacityExceeded)
    assert (error.needed, error.available) == (6, 5)
    driver.create(range(20), tenant="b")
    assert driver.info(driver.create(range(12), tenant="a")).blocks == 3
    assert (usage(driver, "a"), usage(driver, "b"), driver.free()) == (3, 5, 0)


@pytest.mark.parametrize("named", [2, FEW - 1, FEW, 2 * FEW])
def test_what_floors_keep_is_the_same_however_many_have_one(named: int) -> None:
    random = Random(named)
    quotas = {f"t{i}": Quota(floor=random.randrange(5)) for i in range(named - 1)}
    tenants = Tenants(make_limits(quotas={**quotas, "last": Quota(floor=3)}, tenants_max=named + 2))
    other = tenants.intern("without a quota")
    usage = np.array([random.randrange(6) for _ in tenants.floor])
    lacking = [max(0, floor - used) for floor, used in zip(tenants.floor.tolist(), usage.tolist(), strict=True)]
    for tenant in (0, 1, named, other):
        assert tenants.kept_for_others(tenant, usage) == sum(lacking) - lacking[tenant]


def test_a_tenant_may_go_beyond_its_floor_where_nobody_else_has_one() -> None:
    driver = with_quotas(8, {"a": Quota(floor=3), "b": Quota(floor=2)})
    driver.refused(driver.create_message(range(28), tenant="a"), CapacityExceeded)
    driver.create(range(24), tenant="a")
    driver.create(range(8), tenant="b")
    assert driver.free() == 0


def test_a_tenant_never_passes_its_ceiling() -> None:
    driver = with_quotas(8, {"a": Quota(ceiling=3)}, policy="none")
    sequence = driver.create(range(12), tenant="a")
    error = driver.refused(driver.append_message((sequence, [1])), QuotaExceeded)
    assert (error.tenant, error.needed, error.ceiling) == ("a", 4, 3)
    error = driver.refused(driver.create_message(range(9), tenant="a"), QuotaExceeded)
    assert (error.needed, error.ceiling) == (6, 3)
    driver.create(range(20), tenant="b")
    assert (usage(driver, "a"), usage(driver, "b")) == (3, 5)


def test_at_its_ceiling_a_tenant_evicts_its_own_cached_blocks_though_others_are_older() -> None:
    driver = with_quotas(8, {"a": Quota(ceiling=3)})
    for tenant, first in (("b", 100), ("a", 200)):
        driver.submit([first] * 9, max_tokens=1, tenant=tenant)
        driver.run_until_idle()
    assert (usage(driver, "a"), usage(driver, "b")) == (2, 2)
    driver.create(range(8), tenant="a")
    assert (usage(driver, "a"), usage(driver, "b")) == (3, 2)
    driver.create(range(4), tenant="a")
    assert (usage(driver, "a"), usage(driver, "b")) == (3, 2)
    assert driver.stats().pools[0].cached == 2
    assert driver.free() == 3


def test_at_its_ceiling_a_tenant_evicts_its_own_idle_sequence_though_others_are_older() -> None:
    driver = with_quotas(16, {"a": Quota(ceiling=3)})
    others = driver.create(range(8), tenant="b")
    driver.advance(10)
    own = driver.create(range(8), tenant="a")
    driver.advance(10)
    new = driver.create(range(8), tenant="a")
    assert [driver.info(s).resident for s in (others, own, new)] == [True, False, True]
    assert usage(driver, "a") == 2


def test_a_floor_protects_cached_blocks_and_only_what_is_above_it_is_evicted() -> None:
    driver = with_quotas(6, {"a": Quota(floor=2)})
    driver.submit(range(13), max_tokens=1, tenant="a")
    driver.run_until_idle()
    assert (usage(driver, "a"), driver.stats().pools[0].cached) == (3, 3)
    driver.refused(driver.create_message(range(20), tenant="b"), CapacityExceeded)
    driver.create(range(16), tenant="b")
    assert (usage(driver, "a"), usage(driver, "b"), driver.stats().pools[0].cached) == (2, 4, 2)


def test_blocks_in_quarantine_count_for_the_tenant_that_had_them() -> None:
    driver = with_quotas(8, {"a": Quota(ceiling=2)})
    request = driver.submit(range(7), max_tokens=1, tenant="a")
    driver.turn()
    driver.cancel(request)
    assert driver.stats().pools[0].quarantined == 2
    assert usage(driver, "a") == 2
    driver.refused(driver.create_message([1], tenant="a"), QuotaExceeded)
    driver.run_until_idle()
    assert usage(driver, "a") == 0
    assert driver.create([1], tenant="a")


def test_with_an_explicit_salt_blocks_stay_charged_to_the_tenant_that_filled_them() -> None:
    driver = with_quotas(16, {"a": Quota(ceiling=4), "b": Quota(ceiling=1)})
    driver.submit(range(9), max_tokens=1, tenant="a", salt="s")
    driver.run_until_idle()
    sequence = driver.create(range(9), tenant="b", salt="s")
    assert driver.info(sequence).computed_tokens == 8
    assert (usage(driver, "a"), usage(driver, "b")) == (2, 1)
    assert driver.block(driver.blocks_of(sequence)[0]).tenant == "a"


@pytest.mark.parametrize("policy", ["lru", "none"])
def test_every_request_of_every_tenant_ends_within_the_quotas(policy: str) -> None:
    driver = with_quotas(10, {"a": Quota(floor=3, ceiling=4), "b": Quota(ceiling=5)}, policy=policy)
    prompts = [[i, 2, 3, 4, 5] for i in range(12)]
    requests = [driver.submit(prompt, max_tokens=8, tenant="abc"[i % 3]) for i, prompt in enumerate(prompts)]
    for _ in range(300):
        driver.step()
        rows = {row.tenant: row.blocks for row in driver.stats().tenants}
        assert rows["a"] <= 4
        assert rows["b"] <= 5
        assert rows["b"] + rows["c"] <= 10 - 3
    assert [driver.answer_of(r) for r in requests] == [continuation(prompt, 8) for prompt in prompts]


def test_a_waiting_tenant_at_its_ceiling_does_not_stop_the_answer_of_what_runs() -> None:
    driver = with_quotas(16, {"a": Quota(ceiling=3)})
    first = driver.submit(range(8), max_tokens=4, tenant="a")
    second = driver.submit(range(50, 58), max_tokens=4, tenant="a")
    driver.step()
    assert driver.request(second).state == "pending"
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation(range(8), 4)
    assert driver.answer_of(second) == continuation(range(50, 58), 4)


def test_the_rows_of_others_do_not_count_against_a_ceiling() -> None:
    """Admission leaves a block per running row; within a ceiling, only the tenant's own rows count."""
    driver = with_quotas(64, {"a": Quota(ceiling=3)}, step_rows_max=16)
    for first in range(8):
        driver.submit([first, 2, 3], max_tokens=20, tenant="b")
    driver.step()
    request = driver.submit(range(4), max_tokens=8, tenant="a")
    driver.step()
    assert driver.request(request).state == "running"
    assert sum(driver.request(other).state == "running" for other in range(1, 9)) == 8
    waiting = driver.submit([9], max_tokens=4, tenant="a")
    driver.step()
    facts = driver.explain(request_id=waiting).facts  # it needs two blocks, its tenant's row one, and one is free
    assert (facts["limit"], facts["blocks_short"]) == ("tenant ceiling", 2)
    driver.run_until_idle()
    assert driver.answer_of(waiting) == continuation([9], 4)


def test_a_request_whose_ceiling_has_no_room_for_its_first_token_waits_and_takes_nothing_from_others() -> None:
    """As the oldest running request, it would hold blocks that others need, and those would restart forever."""
    driver = with_quotas(9, {"a": Quota(ceiling=5)}, policy="none")
    idle = driver.create(range(15), tenant="a")
    first = driver.submit(range(4), max_tokens=4, tenant="a")
    other = driver.submit(range(50, 62), max_tokens=8, tenant="b")
    for _ in range(40):
        driver.step()
    assert (driver.request(first).state, driver.request(other).state) == ("pending", "finished")
    assert driver.request(other).preemptions == 0
    driver.remove(idle)
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation(range(4), 4)


def test_nobody_is_preempted_whose_blocks_its_floor_would_keep() -> None:
    driver = with_quotas(10, {"b": Quota(floor=4)}, policy="none")
    idle = driver.create(range(12), tenant="a")
    stuck = driver.submit(range(20, 24), max_tokens=20, tenant="a")
    driver.step()
    driver.append((idle, range(4)))
    within = driver.submit(range(50, 58), max_tokens=6, tenant="b")
    for _ in range(40):
        driver.step()
    assert (driver.request(stuck).state, driver.request(within).state) == ("failed", "finished")
    assert driver.request(within).preemptions == 0
    error = driver.request(stuck).error
    assert error is not None and error.code == "capacity_exceeded"
    assert f"sequence {idle} is idle and holds 4 blocks" in error.message
    assert driver.request(within).preemptions == 0
    generated = driver.answer_of(stuck)
    assert generated == continuation(range(20, 24), 20)[: len(generated)]


def test_of_three_the_one_within_its_floor_is_spared_though_it_costs_least() -> None:
    driver = with_quotas(12, {"b": Quota(floor=3)})
    first = driver.submit(range(8), max_tokens=20, tenant="a")
    second = driver.submit(range(20, 28), max_tokens=12, tenant="a")
    driver.step()
    within = driver.submit([50], max_tokens=11, tenant="b")
    driver.run_until_idle()
    assert [driver.request(request).preemptions for request in (first, second, within)] == [0, 1, 0]
    assert driver.answer_of(second) == continuation(range(20, 28), 12)
