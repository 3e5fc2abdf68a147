"""The disk tier: entries of the host tier go down to it, and a prefix comes back before its request starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.cache import disk_copies
from kvforge.coordinator.core.cache.disk_copies import DiskCopies
from kvforge.coordinator.core.cache.disk_tier import DiskTier
from kvforge.coordinator.core.events import Restarted, ToWorker
from kvforge.coordinator.core.reporting.statistics import pool_row
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_FULL,
    DISK_NOT_FOUND,
    DISK_READ,
    DISK_WIPE,
    DISK_WRITE,
    DiskEntries,
    DiskOrders,
    DiskResults,
    DiskScan,
    GetHealth,
    GetStats,
    WorkerHello,
    WorkerReady,
)
from kvforge.protocol.meters import POOL_COUNTS
from tests.coordinator.driver import FakeWorker, continuation
from tests.coordinator.test_host_tier import FIRST, SECOND, SIZE, HostDriver, HostFile, HostWorker, books
from tools.simulation.digest import state_digest

THIRD = [13 * i % 43 + 3 for i in range(17)]
BLOCKS = 32
Slot = tuple[list[int], list[int], int, list[int], list[int | None]]  # value, parent, first, tokens, content
NO_OWNER = [0, 0]


class DiskWorker(HostWorker):
    """A worker with a disk, which answers orders when the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scans: list[DiskScan] = []
        self.orders: list[list[int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.owners: dict[int, list[int]] = {}

    def take_orders(self, message: DiskOrders) -> None:
        """Receive orders."""
        tokens = iter(message.tokens.reshape(-1, SIZE).tolist())
        owners = iter(message.owners.reshape(-1, 2).tolist())
        for order in message.orders.reshape(-1, 9).tolist():
            if order[1] == DISK_WRITE:
                self.tokens[order[0]], self.owners[order[0]] = next(tokens), next(owners)
            self.orders.append(order)


class DiskDriver(HostDriver):
    """A driver with workers that have disk tiers, by their names. Its workers answer orders in `work`."""

    worker_type = DiskWorker

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.disk: dict[int, Slot] = {}
        self.owners: dict[int, list[int]] = {}  # by slot
        self.outcomes: dict[int, tuple[int, int]] = {}  # by kind, instead of DISK_DONE
        self.silent = False

    def ready(self, worker: FakeWorker) -> WorkerReady:
        """Announce the worker's disk."""
        return msgspec.structs.replace(super().ready(worker), disk_blocks=BLOCKS)

    def _to_worker(self, effect: ToWorker) -> None:
        super()._to_worker(effect)
        worker = next((w for w in self.workers if w.number == effect.worker), None)
        if isinstance(effect.message, DiskScan):
            assert isinstance(worker, DiskWorker)
            worker.scans.append(effect.message)
        elif isinstance(effect.message, DiskOrders):
            assert isinstance(worker, DiskWorker)
            worker.take_orders(effect.message)

    @property
    def only(self) -> DiskWorker:
        """The only worker."""
        (worker,) = self.workers
        assert isinstance(worker, DiskWorker)
        return worker

    @property
    def books(self) -> DiskTier:
        """The books of the only disk."""
        return self.disk_copies.tier

    @property
    def disk_copies(self) -> DiskCopies:
        """The copies of the only disk."""
        assert self.copies.disk is not None
        return self.copies.disk

    def prefix(self, prompt: list[int]) -> tuple[Any, ...]:
        """Return salt, tokens and hashes of a prompt."""
        root = next(node.parent for node in self.books.nodes.values() if node.parent < 0)
        tokens = np.array(prompt, np.int32)
        return -root - 1, tokens, self.machine.cache.indexing.hashes(-root - 1, tokens)

    def announce(self, *, last: bool = True) -> None:
        """Announce all that is on the disk, in the order in which it was written."""
        worker = self.only
        scan = worker.scans.pop(0)
        rows = [[slot, *value, *parent, first] for slot, (value, parent, first, *_) in self.disk.items()]
        tokens = [token for *_, own, _ in self.disk.values() for token in own]
        entries = np.array(rows, np.int32).reshape(-1)
        owners = np.array([self.owners.get(slot, NO_OWNER) for slot in self.disk], np.int32).reshape(-1)
        found = (entries, np.array(tokens, np.int32), owners, max(self.disk, default=-1) + 1)
        self.report(worker, DiskEntries(scan.epoch, scan.cursor, last, *found))

    def work(self) -> None:
        """Answer all orders, the last first."""
        while self.only.orders:
            self.answer_order(self.only.orders.pop())

    def answer_order(self, order: list[int]) -> None:
        """Carry an order out."""
        number, kind, host, slot, *value_parent, first = order
        value, parent = value_parent[:2], value_parent[2:]
        file = self.files["w"]
        outcome = self.outcomes.get(kind, (DISK_DONE, 0))
        if outcome[0] == DISK_DONE and kind == DISK_WRITE:
            tag, content = file.content[host]
            assert tag == value, "an order writes a block with other content"
            self.disk.pop(slot, None)
            self.disk[slot] = (value, parent, first, self.only.tokens[number], content)
            self.owners[slot] = self.only.owners[number]
        elif outcome[0] == DISK_DONE and kind == DISK_WIPE:
            assert host == -1, "a worker that does not know the kind must refuse it"
            self.disk.pop(slot, None)
        elif outcome[0] == DISK_DONE:
            assert self.disk[slot][0] == value, "an order reads a block with other content"
            file.content[host] = (value, self.disk[slot][4])
        results = np.array([number, *outcome], np.int32)
        self.report(self.only, DiskResults(self.only.epoch, results))

    def run_until_idle(self, turns_max: int = 1000) -> None:
        """Run steps, and orders between them."""
        for _ in range(turns_max):
            self.step()
            if not self.silent:
                self.work()
            idle = self.silent or not (self.disk_copies.orders or self.disk_copies.wanted)
            if not self.machine.busy and (idle or not self.books.announced):
                self.turn()
                return
        raise AssertionError(f"not idle after {turns_max} turns")


def with_disk(blocks: int = 6, host: int = 16, **limits: Any) -> DiskDriver:
    """A driver. Its worker has room for one prompt, above a disk that is announced."""
    driver = DiskDriver(**limits)
    driver.files["w"] = HostFile(host)
    driver.add_worker(blocks, "w")
    driver.turn()
    driver.announce()
    driver.turn()
    return driver


def only_on_disk(driver: DiskDriver) -> None:
    """Serve two prompts: the first is on the disk alone then."""
    for prompt in (FIRST, SECOND):
        assert driver.serve(prompt) == 0
    for node_id in driver.tier.cached_nodes():
        driver.tier.drop(node_id)
    assert driver.books.cached == 4 and not driver.tier.cached


# behaviour: a prefix that has left the host tier comes back from the disk, and its request starts with it
def test_a_prefix_comes_back_from_the_disk() -> None:
    driver = with_disk()
    only_on_disk(driver)
    assert driver.serve(FIRST) == 16
    assert driver.books.loaded_total == 3 and not driver.disk_copies.loads  # the first block is on the device
    assert books(driver.books)[2:] == (0, 0)


# behaviour: statistics, health and explanations show the disk
def test_the_disk_is_shown() -> None:
    driver = with_disk()
    only_on_disk(driver)
    (pool,) = driver.ask(GetStats(rid=driver.rid())).pools
    (worker,) = driver.ask(GetHealth(rid=driver.rid())).workers
    assert pool.disk == worker.disk and (pool.disk.cached, pool.disk.saved_total, pool.disk.blocks) == (4, 4, BLOCKS)
    (group,) = driver.machine.cache.groups.values()
    row = dict(zip(POOL_COUNTS, pool_row(driver.machine.cache, group), strict=True))
    assert (row["disk_blocks"], row["disk_cached"], row["disk_saved"]) == (BLOCKS, 4, 4)
    block = group.index.match(*driver.prefix(FIRST)).item(0)  # the first block is on the device too
    assert any("of the disk tier" in sentence for sentence in driver.explain(block_id=block).sentences)


# behaviour: after a restart of the host, the announced entries are hits
def test_entries_of_an_earlier_life_are_hits() -> None:
    driver = with_disk()
    only_on_disk(driver)
    content = driver.disk
    driver.lose(driver.only)
    driver.files["w"] = HostFile(16, "of another boot")
    driver.add_worker(6, "w")
    driver.turn()
    assert [(scan.epoch, scan.cursor) for scan in driver.only.scans] == [(driver.only.epoch, 0)]
    assert books(driver.books) == (0, 0, 0, BLOCKS)
    driver.announce()
    assert books(driver.books) == (BLOCKS - len(content), len(content), 0, 0)
    assert driver.serve(FIRST) == 16 and driver.books.loaded_total == 4


def test_a_disk_without_an_announcement_is_neither_read_nor_written() -> None:
    driver = DiskDriver()
    driver.files["w"] = HostFile(16)
    driver.add_worker(6, "w")
    for prompt in (FIRST, SECOND, THIRD, FIRST):
        driver.serve(prompt)
    assert not driver.only.orders and books(driver.books) == (0, 0, 0, BLOCKS)
    driver.announce()
    driver.run_until_idle()
    assert driver.books.saved_total == driver.tier.cached > 4  # what is in the host tier goes down


# behaviour: an entry that this coordinator would not name so, or without its prefix, is not used
@pytest.mark.parametrize("wrong", ["value", "tokens", "parent", "orphan"])
def test_entries_that_cannot_be_used_are_pruned(wrong: str) -> None:
    driver = with_disk()
    only_on_disk(driver)
    chain = list(driver.disk.items())
    slot, (value, parent, first, tokens, content) = next(item for item in chain if not item[1][2])
    if wrong == "value":
        value = [value[0] ^ 1, value[1]]
    elif wrong == "tokens":
        tokens = tokens[::-1]
    elif wrong == "parent":
        parent = [parent[0] ^ 1, parent[1]]
    else:
        del driver.disk[next(number for number, each in chain if each[0] == parent)]
    driver.disk[slot] = (value, parent, first, tokens, content)
    before = len(driver.disk)
    driver.lose(driver.only)
    driver.add_worker(6, "w")
    driver.turn()
    driver.announce()
    assert driver.books.pruned_total >= 1 and driver.books.cached + driver.books.pruned_total == before


@pytest.mark.parametrize("numbers", [[1, 2, 3], [BLOCKS, 0, 0, 0, 0, 1], [-1, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 1] * 2])
def test_a_malformed_announcement_ends_the_worker(numbers: list[int]) -> None:
    driver = DiskDriver()
    driver.files["w"] = HostFile(4)
    worker = driver.add_worker(6, "w")
    driver.turn()
    tokens = np.zeros(SIZE * (len(numbers) // 6), np.int32)
    driver.report(worker, DiskEntries(worker.epoch, 0, True, np.array(numbers, np.int32), tokens))
    assert "disk_entries" in worker.dropped


@pytest.mark.parametrize("results", [[1], [0, 0, 0], [99, 0, 0], [1, 5, 0], [1, -1, 0]])
def test_a_malformed_result_changes_nothing(results: list[int]) -> None:
    driver = with_disk()
    driver.disk_copies._last_order = 1
    before = state_digest(driver.machine)
    with pytest.raises(ProtocolError, match="disk_results"):
        driver.disk_copies.ended(DiskResults(driver.only.epoch, np.array(results, np.int32)))
    assert state_digest(driver.machine) == before


# behaviour: no request waits for a disk that does not answer
def test_a_request_is_computed_after_its_time() -> None:
    driver = with_disk(disk_wait_us=5000)
    only_on_disk(driver)
    driver.silent = True
    request = driver.submit(FIRST, 2)
    driver.turn()
    assert driver.disk_copies.loads and not driver.only.inbox
    assert driver.explain(request_id=request).facts["limit"] == "disk"
    driver.advance(4999)
    driver.turn()
    assert not driver.only.inbox
    driver.advance(1)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST, 2) and driver.request(request).cached_tokens == SIZE
    assert driver.books.late_total == 1 and driver.disk_copies.stalled
    # The next one does not wait; once the disk answers, requests use it again.
    other = driver.submit(SECOND, 2)
    driver.run_until_idle()
    assert driver.answer_of(other) == continuation(SECOND, 2)
    driver.silent = False
    driver.work()
    assert not driver.disk_copies.stalled and not driver.disk_copies.loads


# behaviour: a block that is not what was written is a miss with a counter, and is computed
@pytest.mark.parametrize("outcome", [DISK_NOT_FOUND, DISK_DAMAGED, DISK_FAILED])
def test_a_read_that_fails_is_a_miss(outcome: int) -> None:
    driver = with_disk()
    only_on_disk(driver)
    driver.outcomes[DISK_READ] = (outcome, 0)
    assert driver.serve(FIRST) == SIZE  # the block that is on the device
    tier = driver.books
    missed = (tier.missed_tags_total, tier.missed_checksums_total, tier.failed_total)
    assert missed == tuple(3 * (outcome == each) for each in (DISK_NOT_FOUND, DISK_DAMAGED, DISK_FAILED))
    assert tier.loaded_total == 0 and driver.tier.loaded_total == 0


# behaviour: a full disk makes the tier smaller, a failing one ends it, and serving goes on
def test_a_full_disk_makes_the_tier_smaller() -> None:
    driver = with_disk()
    driver.outcomes[DISK_WRITE] = (DISK_FULL, 2)
    assert [driver.serve(prompt) for prompt in (FIRST, SECOND)] == [0, 0]
    assert driver.books.free == 2 and driver.books.quarantined == BLOCKS - 2
    driver.outcomes.clear()
    for prompt in (THIRD, FIRST, SECOND):
        driver.serve(prompt)
    assert driver.books.cached == 2 and driver.books.saved_total > 2 and driver.books.evicted_total


def test_a_disk_that_fails_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_copies, "FAILURES_MAX", 3)
    driver = with_disk()
    driver.outcomes[DISK_WRITE] = (DISK_FAILED, 0)
    for prompt in (FIRST, SECOND, THIRD):
        assert driver.serve(prompt) == 0
    assert driver.disk_copies.off and driver.books.quarantined == driver.books.failed_total >= 3
    assert [log.event for log in driver.logs].count("disk_off") == 1
    assert driver.serve([5] * 17) == 0 and not driver.only.orders


# behaviour: a restarted coordinator goes on with its disk: what is unanswered is sent again
def test_orders_are_sent_again_to_a_worker_that_comes_back(tmp_path: Path) -> None:
    driver = with_disk()
    only_on_disk(driver)
    driver.silent = True
    driver.submit(FIRST, 2)
    driver.turn()
    orders = sorted(driver.only.orders)
    assert len(orders) == 3
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    assert state_digest(machine) == state_digest(driver.machine)
    machine.check_invariants()
    driver.only.orders.clear()
    driver.apply(Restarted())
    driver.turn()
    assert not driver.only.orders
    worker = driver.only
    worker.number += 1
    hello = WorkerHello(rid=9, name="w", pid=1, boot="boot", epoch=worker.epoch)
    driver.report(worker, hello)
    driver.turn()
    assert sorted(worker.orders) == orders
    driver.silent = False
    driver.run_until_idle()
    assert driver.books.loaded_total == 3 and not driver.disk_copies.loads and driver.serve(FIRST) == 16


# behaviour: two requests with one prefix wait for one load
def test_a_load_is_shared() -> None:
    driver = with_disk(blocks=12)
    for prompt in (FIRST, SECOND, THIRD, [5] * 17):
        driver.serve(prompt)
    for node_id in driver.tier.cached_nodes():
        driver.tier.drop(node_id)
    driver.silent = True
    requests = [driver.submit(FIRST, 2) for _ in range(2)]
    driver.turn()
    assert len(driver.disk_copies.loads) == 1 and len(driver.only.orders) == 4
    driver.silent = False
    driver.run_until_idle()
    assert [driver.request(request).cached_tokens for request in requests] == [16, 16]


# behaviour: a read from the disk counts as one of the host tier's copies, once
def test_a_read_from_the_disk_counts_once_as_wanted() -> None:
    driver = with_disk()
    only_on_disk(driver)
    yields = driver.tier.yields
    assert (yields.once_total, yields.wanted_total) == (3, 0)
    assert driver.serve(FIRST) == 16 and yields.wanted_total == 3
    assert not any(node.once for node in driver.books.nodes.values() if node.tokens in _blocks_of(FIRST)[1:])
    evicted = yields.once_total
    driver.serve(SECOND)
    for node_id in driver.tier.cached_nodes():
        driver.tier.drop(node_id)
    wanted, loaded = yields.wanted_total, driver.books.loaded_total
    assert driver.serve(FIRST) == 16 and driver.books.loaded_total > loaded
    assert yields.wanted_total == wanted and yields.once_total <= evicted + 4


def test_reading_the_copy_in_the_host_tier_is_the_first_read_of_that_on_the_disk() -> None:
    driver = with_disk()
    for prompt in (FIRST, SECOND):
        driver.serve(prompt)
    assert sum(node.once for node in driver.books.nodes.values()) == 3
    assert driver.serve(FIRST) == 16 and driver.books.loaded_total == 0
    assert driver.tier.yields.wanted_total == 3
    assert not any(node.once for node in driver.books.nodes.values() if node.tokens in _blocks_of(FIRST))


def test_a_disk_that_is_larger_than_the_file_decides_how_many_blocks_are_remembered() -> None:
    assert with_disk(host=16).tier.yields.skipped_max == BLOCKS
    assert with_disk(host=BLOCKS + 8).tier.yields.skipped_max == BLOCKS + 8


def _blocks_of(prompt: list[int]) -> list[bytes]:
    full = len(prompt) // SIZE
    return [np.array(prompt[SIZE * place : SIZE * (place + 1)], np.int32).tobytes() for place in range(full)]


# behaviour: blocks that a request brings from the disk are neighbours in the host file
def test_blocks_of_a_load_are_neighbours_in_the_host_file() -> None:
    driver = with_disk(host=64)
    only_on_disk(driver)
    tier, others = driver.tier, dict[int, int]()
    for value in range(tier.free):
        node_id = tier.add(-9, value + 1, value.to_bytes(4 * SIZE, "little"))
        assert node_id is not None and tier.give_block(node_id)
        tier.written(node_id)
        others[tier.nodes[node_id].block] = node_id
    for block in (3, 5, *range(40, 48)):
        tier.drop(others[block])
    assert driver.serve(FIRST) == 16
    found = driver.copies.match(*driver.prefix(FIRST), 1, 4)
    assert [tier.nodes[node_id].block for node_id in found] == [40, 41, 42]
