"""Quotas of the host tier: a tenant's share of a host file is bounded, and reserved blocks stay for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.coordinator.core.cache.host_lru import HostLru
from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.cache.host_tiers import HostTiers
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.limits import Limits, Quota
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.protocol.errors import InvalidConfiguration
from tests.coordinator.driver import continuation
from tests.coordinator.test_host_tier import FIRST, SECOND, HostDriver, HostFile
from tools.simulation.digest import state_digest

A, B = 1, 2


def tier_of(blocks: int, **quotas: Quota) -> HostTier:
    """Return the books of an empty file, with quotas of tenants a and b."""
    return HostTiers(1, 64, Tenants(Limits(quotas={"a": Quota(), "b": Quota()} | quotas))).new("file", blocks)


def save(tier: HostTier, tenant: int, *values: int) -> list[bool]:
    """Save blocks with these hashes for a tenant, and return which got a place."""
    found = []
    for value in values:
        node = tier.add(-1, value, value.to_bytes(16, "little"))
        assert node is not None
        found.append(tier.give_block(node, owner=tenant))
        tier.written(node) if found[-1] else tier.prune(node)
        tier.check_invariants()
    return found


def values(tier: HostTier) -> set[int]:
    """Return the hashes of the entries."""
    return {node.value for node in tier.nodes.values()}


# behaviour: a tenant at its ceiling evicts its own entries, whichever are older
def test_a_tenant_at_its_ceiling_evicts_its_own_entries() -> None:
    tier = tier_of(8, a=Quota(host_ceiling=2))
    save(tier, B, 20, 21)
    save(tier, A, 10, 11, 12)
    assert values(tier) == {20, 21, 11, 12} and tier.free == 4
    assert tier.usage == {A: 2, B: 2}


def test_entries_in_use_of_a_tenant_at_its_ceiling_stay() -> None:
    tier = tier_of(8, a=Quota(host_ceiling=1))
    save(tier, A, 10)
    (node,) = tier.nodes
    tier.hold(node)
    assert save(tier, A, 11) == [False] and values(tier) == {10}
    tier.release(node)
    assert save(tier, A, 11) == [True] and values(tier) == {11}


# behaviour: blocks within a floor are neither taken nor given to others
def test_the_floor_of_a_tenant_stays_free_for_it() -> None:
    tier = tier_of(4, a=Quota(host_floor=2))
    assert save(tier, B, 20, 21, 22) == [True] * 3
    assert values(tier) == {21, 22} and tier.free == 2
    assert save(tier, A, 10, 11) == [True] * 2
    save(tier, B, 23, 24)
    assert values(tier) == {10, 11, 23, 24}
    save(tier, A, 12)
    assert values(tier) == {11, 12, 23, 24}, "the oldest entry is its own"


def test_without_quotas_the_oldest_entry_gives_its_block() -> None:
    tier = HostTiers(1, 64).new("file", 2)
    save(tier, A, 10)
    save(tier, B, 20, 21)
    assert values(tier) == {20, 21} and tier.usage == {B: 2}


def test_a_forgotten_tenant_is_charged_for_nothing() -> None:
    tier = tier_of(4)
    save(tier, A, 10, 11)
    tier.forget_tenant(A)
    tier.check_invariants()
    assert tier.usage == {} and tier.cached == 2


# behaviour: the tenant that is charged for a block on the device is charged for its copy
@pytest.mark.parametrize("writeback", [0, 4])
def test_a_tenant_is_charged_for_the_copies_of_its_blocks(writeback: int, tmp_path: Path) -> None:
    driver = HostDriver(quotas={"a": Quota(host_ceiling=3)}, host_writeback_blocks=writeback)
    driver.files["w"] = HostFile(16)
    driver.add_worker(6, "w")
    for prompt, tenant in ((FIRST, "a"), (SECOND, "b"), ([9, *FIRST], "a"), (SECOND, "b"), (FIRST, "a"), (SECOND, "b")):
        request = driver.submit(prompt, 2, tenant=tenant)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(prompt, 2)
        assert all(row.host_blocks <= 3 for row in driver.stats().tenants if row.tenant == "a")
    shares = {row.tenant: (row.host_blocks, row.host_ceiling) for row in driver.stats().tenants}
    assert shares["a"] == (3, 3) and shares["b"][0] >= 4 and shares["b"][1] == 0
    assert any("3 of 16 blocks of its host file" in each for each in driver.explain(tenant="a").sentences)
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    machine.check_invariants()
    assert state_digest(machine) == state_digest(driver.machine)
    (restored,) = machine.cache.host_tiers.tiers.values()
    assert restored.usage == driver.tier.usage


def test_a_ceiling_below_the_floor_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="host_ceiling 2 is below host_floor 3"):
        Limits(quotas={"a": Quota(host_floor=3, host_ceiling=2)})


def test_entries_come_in_the_order_of_their_last_use() -> None:
    lru = HostLru()
    for node, owner in ((1, 7), (2, 8), (3, 7), (1, 7)):
        lru.add(node, owner)
    assert list(lru) == [2, 3, 1] and (lru.oldest(), lru.oldest({7}), lru.oldest({9})) == (2, 3, None)
    lru.discard(2, 8)
    lru.discard(2, 7)
    assert list(lru) == [3, 1] and list(lru.by_owner) == [7] and not lru.has(2, 8) and len(lru) == 2


def test_a_node_with_others_behind_it_is_not_the_oldest() -> None:
    lru = HostLru()
    lru.add(1, 7, leaf=False)
    lru.add(2, 7)
    assert lru.oldest() == 2 and list(lru) == [1, 2] and len(lru) == 2
    lru.set_leaf(1, 7, True)
    assert lru.oldest() == 1
    lru.set_leaf(1, 7, False)
    lru.set_leaf(3, 7, True)  # it is not here
    lru.discard(2, 7)
    assert lru.oldest() is None and len(lru) == 1


def test_uses_do_not_let_the_heaps_grow() -> None:
    lru = HostLru()
    for _ in range(1000):
        for node in range(8):
            lru.add(node, 7)
    assert len(lru.heaps[7]) <= 2 * 8 + 64 + 1 and [lru.oldest(), len(lru)] == [0, 8]
