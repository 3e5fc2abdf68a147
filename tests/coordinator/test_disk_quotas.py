"""Quotas of the disk tier: a tenant's share of a disk is bounded, also of what a worker announces."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.coordinator.core.cache.disk_tier import DiskTier
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.limits import Limits, Quota
from kvforge.coordinator.core.reporting.statistics import tenant_blocks
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.protocol.errors import InvalidConfiguration
from tests.coordinator.driver import continuation
from tests.coordinator.test_disk_tier import BLOCKS, DiskDriver, with_disk
from tests.coordinator.test_host_quotas import A, B, save, values
from tests.coordinator.test_host_tier import FIRST, SECOND, HostFile
from tools.simulation.digest import state_digest


def disk_of(blocks: int, **quotas: Quota) -> DiskTier:
    """Return the books of an empty disk, with quotas of tenants a and b."""
    tenants = Tenants(Limits(quotas={"a": Quota(), "b": Quota()} | quotas))
    tier = DiskTier(blocks, 64, tenants.disk_shares)
    tier.end_announcement()
    return tier


# behaviour: ceilings and floors hold as in the host tier, and those of the host tier do not count
def test_a_tenant_at_its_ceiling_evicts_its_own_entries() -> None:
    tier = disk_of(8, a=Quota(disk_ceiling=2, host_ceiling=1))
    save(tier, B, 20, 21)
    save(tier, A, 10, 11, 12)
    assert values(tier) == {20, 21, 11, 12} and tier.usage == {A: 2, B: 2} and tier.free == 4


def test_the_floor_of_a_tenant_stays_free_for_it() -> None:
    tier = disk_of(4, a=Quota(disk_floor=2))
    assert save(tier, B, 20, 21, 22) == [True] * 3
    assert values(tier) == {21, 22} and tier.free == 2
    assert save(tier, A, 10, 11) == [True] * 2
    save(tier, B, 23, 24)
    assert values(tier) == {10, 11, 23, 24}


def test_a_ceiling_below_the_floor_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="disk_ceiling 2 is below disk_floor 3"):
        Limits(quotas={"a": Quota(disk_floor=3, disk_ceiling=2)})


# behaviour: a tenant is charged for what is written, and after a restart for what a worker announces
def test_a_tenant_is_charged_for_its_blocks_of_the_disk(tmp_path: Path) -> None:
    driver = with_disk(quotas={"a": Quota(disk_ceiling=4)})
    for prompt, tenant in ((FIRST, "a"), (SECOND, "b"), ([9, *FIRST], "a"), (SECOND, "b"), (FIRST, "a"), (SECOND, "b")):
        request = driver.submit(prompt, 2, tenant=tenant)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(prompt, 2)
        assert all(row.disk_blocks <= 4 for row in driver.stats().tenants if row.tenant == "a")
    rows = {row.tenant: (row.disk_blocks, row.disk_floor, row.disk_ceiling) for row in driver.stats().tenants}
    assert rows["a"] == (4, 0, 4) and rows["b"][0] >= 4 and rows["b"][1:] == (0, 0)
    device, host, disk = tenant_blocks(driver.machine.cache)
    index = driver.machine.cache.tenants.peek("a")
    assert (host[index], disk[index]) == (driver.tier.usage[index], 4) and device[index] >= 0
    assert any(f"4 of {BLOCKS} blocks of its disk" in each for each in driver.explain(tenant="a").sentences)
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    machine.check_invariants()
    assert state_digest(machine) == state_digest(driver.machine)
    before = driver.books.usage
    driver.lose(driver.only)
    driver.add_worker(6, "w")
    driver.turn()
    driver.announce()
    assert driver.books.usage == before and driver.books.pruned_total == 0


def test_announced_entries_beyond_a_ceiling_are_not_taken() -> None:
    driver = with_disk()
    for prompt in (FIRST, SECOND):
        driver.serve(prompt)
    assert driver.books.usage == {1: 4}
    other = DiskDriver(quotas={"default": Quota(disk_ceiling=3)})
    other.disk, other.owners = driver.disk, driver.owners
    other.files["w"] = HostFile(16)
    other.add_worker(6, "w")
    other.turn()
    other.announce()
    assert (other.books.cached, other.books.pruned_total, other.books.usage) == (3, 1, {1: 3})
    assert other.serve(FIRST) == 12


def test_a_forgotten_tenant_is_charged_for_nothing() -> None:
    driver = with_disk(tenants_max=2)
    for tenant in ("a", "b", "c", "d"):
        driver.submit(FIRST, 2, tenant=tenant)
        driver.run_until_idle()
    names = driver.machine.cache.tenants.names
    assert driver.books.usage.keys() <= set(range(1, len(names))) and len(names) == 3
    tags = {node.tag for node in driver.books.nodes.values() if not node.owner}
    assert driver.machine.cache.wipes.tag("a") in tags
