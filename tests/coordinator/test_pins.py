"""Pinned blocks are charged to the tenant that pins them."""

from __future__ import annotations

from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded
from kvforge.protocol.messages import RefBlock
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation


def usage(driver: Driver) -> dict[str, int]:
    """Blocks charged to each tenant that has any."""
    return {tenant.tenant: tenant.blocks for tenant in driver.stats().tenants if tenant.blocks}


def test_blocks_that_a_stranger_pins_do_not_count_against_the_ceiling_of_who_computed_them() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=3)})
    driver.add_worker(10)
    driver.submit(range(1, 11), 1, tenant="a")
    driver.run_until_idle()
    cached = [block for block in range(10) if driver.block(block).state == "cached"]
    assert usage(driver) == {"a": len(cached)} == {"a": 2}
    for block in cached:
        driver.ref(block, "stranger", client=9, tenant="b")
    assert usage(driver) == {"b": 2}
    request = driver.submit([70, 71, 72, 73, 74, 75], 6, tenant="a")
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([70, 71, 72, 73, 74, 75], 6)
    driver.gone(9)
    assert "b" not in usage(driver), (
        "an unpinned block is charged to its own tenant again if that has room, else to no tenant"
    )


def test_who_pins_needs_room_within_its_own_ceiling() -> None:
    driver = Driver(quotas={"b": Quota(ceiling=2)}, policy="none")
    driver.add_worker(10)
    sequence = driver.create(range(12), tenant="a")
    blocks = driver.blocks_of(sequence)
    driver.submit([50, 51, 52, 53, 54], 1, tenant="b")
    driver.run_until_idle()
    assert usage(driver) == {"a": 3, "b": 1}
    driver.ref(blocks[0], "one", tenant="b")
    driver.ref(blocks[1], "two", tenant="b")  # replaces its cached block
    assert usage(driver) == {"a": 1, "b": 2}
    message = RefBlock(rid=1, block_id=blocks[2], holder="three", tenant="b")
    error = driver.refused(message, QuotaExceeded)
    assert (error.tenant, error.needed, error.ceiling) == ("b", 3, 2)
    driver.unref(blocks[0], "one")
    driver.ref(blocks[2], "three", tenant="b")
    assert usage(driver) == {"a": 1, "b": 2}


def test_nobody_pins_what_the_floor_of_another_needs() -> None:
    driver = Driver(quotas={"a": Quota(floor=4)}, policy="none")
    driver.add_worker(4)
    sequence = driver.create(range(12), tenant="a")
    error = driver.refused(RefBlock(rid=1, block_id=driver.blocks_of(sequence)[0], holder="x"), CapacityExceeded)
    assert error.code == "capacity_exceeded"
    driver.append((sequence, range(4)))
    assert usage(driver) == {"a": 4}


def test_of_several_that_pin_the_first_pays_and_then_whoever_is_left() -> None:
    driver = Driver()
    driver.add_worker(10)
    sequence = driver.create(range(4), tenant="a")
    (block,) = driver.blocks_of(sequence)
    driver.ref(block, "x", tenant="b")
    driver.ref(block, "y", tenant="c")
    driver.ref(block, "z", tenant="b")
    assert usage(driver) == {"b": 1}
    driver.unref(block, "x")
    assert usage(driver) == {"b": 1}
    driver.unref(block, "z")
    assert usage(driver) == {"c": 1}
    driver.remove(sequence)
    assert usage(driver) == {"c": 1}
    driver.unref(block, "y")
    assert usage(driver) == {}


def test_what_is_not_pinned_any_more_goes_back_to_who_computed_it_where_there_is_room() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=2)}, policy="none")
    driver.add_worker(10)
    first = driver.create(range(8), tenant="a")
    blocks = driver.blocks_of(first)
    for block in blocks:
        driver.ref(block, "x", tenant="b")
    driver.unref(blocks[0], "x")
    assert usage(driver) == {"a": 1, "b": 1}
    second = driver.create(range(20, 24), tenant="a")
    driver.unref(blocks[1], "x")
    assert usage(driver) == {"a": 2, "b": 1}, "without room the charge stays until the block is released"
    driver.remove(first, second)
    assert usage(driver) == {}


def test_a_name_that_ends_with_its_worker_leaves_no_charge_behind(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create(range(4), tenant="a")
    driver.ref(driver.blocks_of(sequence)[0], "x", tenant="b")
    driver.lose(worker)
    driver.add_worker(16)
    assert usage(driver) == {}
    driver.submit([1], 1, tenant="b")
    driver.run_until_idle()
    assert usage(driver) == {}
