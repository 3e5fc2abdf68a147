"""Wipes of tenants: nothing that was cached is a hit any more, on any tier, and its bytes are overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.coordinator.core.cache import wipes
from kvforge.coordinator.core.cache.wipes import Wipes
from kvforge.coordinator.core.rights import SUBMIT, Access
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.protocol.errors import InvalidRequest, NotAllowed, SequenceNotFound
from kvforge.protocol.messages import (
    DISK_FAILED,
    DISK_READ,
    DISK_WIPE,
    DISK_WRITE,
    GetSequence,
    TenantWiped,
    WipeTenant,
)
from tests.coordinator.driver import Driver, continuation
from tests.coordinator.test_disk_tier import BLOCKS, only_on_disk, with_disk
from tests.coordinator.test_host_tier import FIRST, SECOND, HostDriver, HostFile, books, hosted
from tools.simulation.digest import state_digest

OURS = "default"


def wiped(driver: Driver, tenant: str = OURS) -> tuple[int, ...]:
    """Wipe a tenant. Return the numbers of the reply."""
    reply = driver.ask(WipeTenant(rid=driver.rid(), tenant=tenant))
    assert isinstance(reply, TenantWiped)
    counts = (reply.sequences, reply.device_blocks, reply.host_blocks, reply.disk_blocks)
    return (*counts, reply.held_blocks, reply.pending_blocks)


# behaviour: no tier has entries of the tenant any more, and all bytes are overwritten
def test_a_wiped_tenant_is_cached_nowhere() -> None:
    driver = with_disk()
    for prompt in (FIRST, SECOND):
        driver.serve(prompt)
    host, disk = driver.tier.cached, driver.books.cached
    assert host and disk and driver.files["w"].content and driver.disk
    assert wiped(driver) == (0, 5, host, disk, 0, host + disk)
    assert driver.machine.cache.groups[0].pool.cached == driver.tier.cached == driver.books.cached == 0
    driver.run_until_idle()
    assert not driver.files["w"].content and not driver.disk
    assert books(driver.tier) == (16, 0, 0, 0) and books(driver.books) == (BLOCKS, 0, 0, 0)
    assert wiped(driver) == (0, 0, 0, 0, 0, 0)
    assert driver.serve(FIRST) == 0


def test_other_tenants_keep_their_entries() -> None:
    driver, _ = hosted(host=16)
    other = driver.submit(FIRST, 2, tenant="other")
    driver.run_until_idle()
    driver.serve(SECOND)
    driver.serve([1, *SECOND])
    before = {node.tag for node in driver.tier.nodes.values()}
    assert len(before) == 2
    assert wiped(driver, "nobody") == (0, 0, 0, 0, 0, 0)
    assert wiped(driver)[2] > 0
    driver.run_until_idle()
    assert {node.tag for node in driver.tier.nodes.values()} == {driver.machine.cache.wipes.tag("other")}
    again = driver.submit(FIRST, 2, tenant="other")
    driver.run_until_idle()
    assert driver.request(again).cached_tokens == 16 and driver.answer_of(other) == driver.answer_of(again)


def test_idle_sequences_go_and_live_requests_stay() -> None:
    driver = Driver()
    worker = driver.add_worker(16)
    idle = driver.create(FIRST)
    request = driver.submit(SECOND, 4)
    driver.turn()
    driver.answer(worker)
    sequences, device, *_, held, pending = wiped(driver)
    assert (sequences, device, pending) == (1, 0, 0) and held > 0
    missing = driver.refused(GetSequence(rid=driver.rid(), sequence_id=idle), SequenceNotFound)
    assert "its tenant was wiped" in str(missing)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(SECOND, 4)
    assert wiped(driver)[1] > 0 and wiped(driver) == (0, 0, 0, 0, 0, 0)


# behaviour: an entry outlives its tenant's place in the table, and is found by the tenant's name
def test_entries_of_a_forgotten_tenant_are_wiped() -> None:
    driver = HostDriver(tenants_max=2)
    driver.files["w"] = HostFile(16)
    driver.add_worker(6, "w")
    for tenant in ("a", "b", "c", "d"):
        driver.submit(FIRST, 2, tenant=tenant)
        driver.run_until_idle()
    assert "a" not in driver.machine.cache.tenants.names
    assert wiped(driver, "a")[2] == 4
    driver.run_until_idle()
    assert wiped(driver, "a")[2] == 0


# behaviour: copies in flight become no hits
def test_a_host_copy_that_is_acknowledged_after_the_wipe_is_no_hit() -> None:
    driver, worker = hosted()
    driver.serve(FIRST)
    driver.submit(SECOND, 2)
    driver.turn()
    writes = worker.inbox[0].host_writes.size // 4
    assert writes and wiped(driver)[2] == writes
    driver.run_until_idle()
    assert driver.tier.saved_total >= writes and not driver.tier.cached
    assert driver.tier.unwiped == 0 and books(driver.tier)[2:] == (0, 0)


def test_a_host_copy_that_was_not_sent_is_not_made() -> None:
    driver, _ = hosted()
    driver.serve(FIRST)
    driver.create([*SECOND, 1, 2])  # takes the blocks at once, and no step is sent
    assert driver.copies.writes
    wiped(driver)
    assert not driver.copies.writes and not driver.tier.nodes and driver.tier.referenced == 0
    driver.run_until_idle()
    assert not driver.files["w"].content


@pytest.mark.parametrize("kind", [DISK_WRITE, DISK_READ])
def test_a_disk_copy_that_is_acknowledged_after_the_wipe_is_no_hit(kind: int) -> None:
    driver = with_disk()
    driver.silent = kind == DISK_WRITE
    if kind == DISK_READ:
        only_on_disk(driver)
        driver.silent = True
        request = driver.submit(FIRST, 2)
        driver.turn()
    else:
        driver.serve(FIRST)
        request = driver.submit(SECOND, 2)
        driver.run_until_idle()
    assert driver.only.orders and {order[1] for order in driver.only.orders} == {kind}
    wiped(driver)
    driver.silent = False
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST if kind == DISK_READ else SECOND, 2)
    assert driver.request(request).cached_tokens == 0
    wiped(driver)
    driver.run_until_idle()
    assert driver.tier.cached == driver.books.cached == 0 and not driver.disk and not driver.files["w"].content


# behaviour: a worker that was away when its tenant was wiped announces nothing that is taken
def test_entries_that_are_announced_after_the_wipe_are_not_taken() -> None:
    driver = with_disk()
    only_on_disk(driver)
    driver.lose(driver.only)
    assert driver.disk
    assert wiped(driver)[3] == 0, "the disk cannot be reached"
    driver.add_worker(6, "w")
    driver.turn()
    driver.announce()
    driver.run_until_idle()
    assert driver.books.cached == 0 and driver.books.pruned_total == 4 and not driver.disk
    assert books(driver.books) == (BLOCKS, 0, 0, 0)
    assert driver.serve(FIRST) == 0
    driver.serve(SECOND)
    kept = driver.books.cached
    driver.lose(driver.only)
    driver.add_worker(6, "w")
    driver.turn()
    driver.announce()
    assert driver.books.cached == kept > 0, "what was cached after the wipe stays"


def test_a_worker_that_is_lost_while_it_wipes_leaves_it_to_the_next() -> None:
    driver, worker = hosted()
    for prompt in (FIRST, SECOND):
        driver.serve(prompt)
    wiped(driver)
    driver.turn()
    assert worker.inbox[0].host_wipes.size and driver.tier.wiping
    driver.lose(worker)
    assert driver.tier.to_wipe and driver.files["w"].content
    driver.add_worker(6, "w")
    driver.run_until_idle()
    assert not driver.files["w"].content and books(driver.tier) == (8, 0, 0, 0)


def test_a_block_that_cannot_be_overwritten_is_not_used_again() -> None:
    driver = with_disk()
    only_on_disk(driver)
    driver.outcomes[DISK_WIPE] = (DISK_FAILED, 0)
    wiped(driver)
    driver.run_until_idle()
    assert books(driver.books) == (BLOCKS - 4, 0, 0, 4) and driver.books.failed_total == 4


# behaviour: blocks that were given up for other reasons are overwritten too
def test_bytes_of_dropped_entries_are_overwritten() -> None:
    driver = with_disk()
    only_on_disk(driver)  # drops all entries of the host tier, whose bytes stay
    assert driver.files["w"].content
    wiped(driver)
    driver.run_until_idle()
    assert not driver.files["w"].content


def test_entries_of_unknown_owners_are_overwritten() -> None:
    """Another coordinator's key names no tenant: its entries are pruned, and overwritten with the first wipe."""
    driver = with_disk()
    only_on_disk(driver)
    for slot, (value, parent, first, tokens, content) in driver.disk.items():
        driver.disk[slot] = ([value[0] ^ 5, value[1]], parent, first, tokens, content)
    driver.lose(driver.only)
    driver.add_worker(6, "w")
    driver.turn()
    driver.announce()
    assert driver.books.pruned_total == 4
    wiped(driver, "nobody")
    driver.run_until_idle()
    assert not driver.disk


# behaviour: the command needs the right admin, checks the name, and is in the journal
def test_the_command_needs_the_right_admin() -> None:
    driver = Driver()
    driver.add_worker(8)
    driver.come(9, Access("key", OURS, (SUBMIT,)))
    assert driver.refused(WipeTenant(rid=1, tenant=OURS), NotAllowed, client=9).right == "admin"
    assert driver.refused(WipeTenant(rid=2, tenant=""), InvalidRequest).field == "tenant"


def test_wipes_are_in_a_snapshot(tmp_path: Path) -> None:
    driver = with_disk()
    driver.serve(FIRST)
    driver.serve(SECOND)
    wiped(driver)
    driver.turn()
    assert driver.tier.wiping and driver.books.wiping and driver.machine.cache.wipes.dead
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    restored = snapshot.Snapshot(tmp_path / "state").machine()
    assert state_digest(restored) == state_digest(driver.machine)
    restored.check_invariants()


# behaviour: a tenant's tag changes with a wipe if an entry may have it, and the memory of wipes is bounded
def test_tags() -> None:
    cache = Driver().machine.cache
    index, named = cache.intern("a"), cache.wipes
    first = named.tag_of(index)
    assert first == named.tag("a") != named.tag("b") and named.tag_of(0) == 0
    assert named.wipe("a") == first and named.tag("a") != first and named.dead == {first: None}
    second = named.tag("a")
    assert named.wipe("a") == second and named.count == 1, "no entry has the second tag"
    assert named.tag_of(index) == second and named.wipe("a") == second and named.count == 2
    assert set(named.dead) == {first, second}


def test_the_oldest_wipes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wipes, "WIPES_MAX", 2)
    cache = Driver().machine.cache
    named = Wipes(cache.tenants, cache.hasher)
    tags = [named.wipe(name) for name in ("a", "b", "c")]
    assert list(named.dead) == tags[1:] and list(named.latest) == ["b", "c"]
