"""The disks of a worker with ranks count as one: entries are on all disks, and all answer each order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.cache import disk_copies
from kvforge.coordinator.core.cache.disk_copies import DiskCopies
from kvforge.coordinator.core.cache.disk_tier import DiskTier
from kvforge.coordinator.core.events import FromWorker, Restarted, ToWorker
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
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
    Refused,
    WipeTenant,
    WorkerHello,
    WorkerReady,
)
from tests.coordinator.driver import FakeWorker
from tests.coordinator.test_disk_tier import THIRD, DiskWorker, Slot
from tests.coordinator.test_host_ranks import HostRanks
from tests.coordinator.test_host_tier import FIRST, SECOND, HostFile, books
from tools.simulation.digest import digest

DISK = 16


class DiskRanks(HostRanks):
    """Ranks with a host file and a disk each, which answer orders in `work`."""

    worker_type = DiskWorker

    def __init__(self, ranks: int = 2) -> None:
        super().__init__(ranks)
        self.disks: list[dict[int, Slot]] = [{} for _ in range(ranks)]
        self.owners: list[dict[int, list[int]]] = [{} for _ in range(ranks)]
        self.outcomes: dict[tuple[int, int], tuple[int, int]] = {}  # by rank and kind, instead of DISK_DONE
        self.ranks: list[DiskWorker] = []
        self.silent: set[int] = set()

    def announced(self, rank: int, worker: FakeWorker, **fields: Any) -> WorkerReady:
        """Return a rank's announcement, with its file and its disk."""
        return super().announced(rank, worker, **({"disk_blocks": DISK} | fields))

    def _to_worker(self, effect: ToWorker) -> None:
        super()._to_worker(effect)
        worker = next((w for w in self.workers if w.number == effect.worker), None)
        if isinstance(worker, DiskWorker) and isinstance(effect.message, DiskScan):
            worker.scans.append(effect.message)
        elif isinstance(worker, DiskWorker) and isinstance(effect.message, DiskOrders):
            worker.take_orders(effect.message)

    def begin(self) -> None:
        """Start all ranks, and let them announce their disks."""
        self.ranks = [worker for worker in self.start() if isinstance(worker, DiskWorker)]
        self.turn()
        self.announce_all()

    def announce_all(self) -> None:
        """Answer all scans, also those that follow."""
        while any(worker.scans for worker in self.ranks):
            for rank, worker in enumerate(self.ranks):
                if worker.scans:
                    self.announce(rank)
            self.turn()

    def announce(self, rank: int, at_once: int = 3) -> None:
        """Announce the next entries of a rank, in the order in which they were written."""
        scan = self.ranks[rank].scans.pop(0)
        all_of, disk = list(self.disks[rank].items()), self.disks[rank]
        part = all_of[scan.cursor : scan.cursor + at_once]
        rows = [[slot, *value, *parent, first] for slot, (value, parent, first, *_) in part]
        tokens = [token for _, (*_, own, _) in part for token in own]
        owners = [self.owners[rank][slot] for slot, _ in part]
        numbers = (np.array(each, np.int32).reshape(-1) for each in (rows, tokens, owners))
        last, usable = scan.cursor + len(part) >= len(all_of), max(disk, default=-1) + 1
        self.report(self.ranks[rank], DiskEntries(scan.epoch, scan.cursor, last, *numbers, usable))

    def work(self) -> None:
        """Answer all orders, the last first."""
        for rank, worker in enumerate(self.ranks):
            while worker.orders and rank not in self.silent:
                self.answer_order(rank, worker.orders.pop())

    def answer_order(self, rank: int, order: list[int]) -> None:
        """Carry an order out."""
        number, kind, host, slot, *value_parent, first = order
        value, parent, worker, disk = value_parent[:2], value_parent[2:], self.ranks[rank], self.disks[rank]
        outcome = self.outcomes.get((rank, kind), (DISK_DONE, 0))
        if kind == DISK_WIPE and outcome[0] == DISK_DONE:
            disk.pop(slot, None)
        elif kind == DISK_WRITE and outcome[0] == DISK_DONE:
            tag, content = self.files[rank].content[host]
            assert tag == value, "an order writes a block with other content"
            disk.pop(slot, None)
            disk[slot] = (value, parent, first, worker.tokens[number], content)
            self.owners[rank][slot] = worker.owners[number]
        elif kind == DISK_READ and outcome[0] == DISK_DONE:
            assert disk[slot][0] == value, "an order reads a block with other content"
            self.files[rank].content[host] = (value, disk[slot][4])
        elif kind == DISK_READ and outcome[0] == DISK_DAMAGED:
            disk.pop(slot)
        self.report(worker, DiskResults(worker.epoch, np.array([number, *outcome], np.int32)))

    def run_until_idle(self, turns_max: int = 1000) -> None:
        """Run steps, and orders between them."""
        for _ in range(turns_max):
            self.step()
            self.work()
            idle = self.silent or not self.copies.tier.announced or not (self.copies.orders or self.copies.wanted)
            if not self.machine.busy and idle:
                self.turn()
                return
        raise AssertionError(f"not idle after {turns_max} turns")

    @property
    def copies(self) -> DiskCopies:
        """The copies of the only disk tier."""
        (group,) = self.machine.cache.groups.values()
        assert group.disk is not None
        return group.disk

    @property
    def books(self) -> DiskTier:
        """The books of the only disk tier."""
        return self.copies.tier

    def only_on_disk(self) -> None:
        """Serve two prompts: the first is on the disks alone then."""
        for prompt in (FIRST, SECOND):
            assert self.serve_prompt(prompt) == 0
        for node_id in self.tier.cached_nodes():
            self.tier.drop(node_id)
        assert self.books.cached == 4 and not self.tier.cached

    def successors(self) -> None:
        """Lose all ranks and start others, on a host that was restarted."""
        self.lose(self.ranks[1])
        self.files = [HostFile(16, f"of another boot {rank}") for rank in range(self.count)]
        self.begin()


def begun(ranks: int = 2) -> DiskRanks:
    """Ranks with empty disks, which are announced."""
    d = DiskRanks(ranks)
    d.begin()
    return d


# behaviour: each rank writes and reads its own share
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_prefix_comes_back_from_the_disks_of_all_ranks(ranks: int) -> None:
    d = begun(ranks)
    d.only_on_disk()
    assert all(disk.keys() == d.disks[0].keys() != set() for disk in d.disks)
    assert d.serve_prompt(FIRST) == 16 and d.books.loaded_total == 3
    assert books(d.books)[2:] == (0, 0) and not d.copies.loads


@pytest.mark.parametrize("ranks", [2, 3])
def test_entries_of_an_earlier_life_are_hits(ranks: int) -> None:
    d = begun(ranks)
    d.only_on_disk()
    d.successors()
    assert books(d.books) == (DISK - 4, 4, 0, 0) and not d.copies.ranks.found[0]  # type: ignore[union-attr]
    assert d.serve_prompt(FIRST) == 16 and d.books.loaded_total == 4


# behaviour: an order ends when all ranks have answered it
@pytest.mark.parametrize("late", [0, 1])
def test_an_order_that_one_rank_has_not_answered_is_in_flight(late: int) -> None:
    d = begun()
    d.silent = {late}
    for prompt in (FIRST, SECOND):
        d.serve_prompt(prompt)
    assert d.books.cached == 0 and d.books.referenced == 4
    d.silent.clear()
    d.work()
    assert d.books.cached == 4 and d.books.referenced == 0
    for node_id in d.tier.cached_nodes():
        d.tier.drop(node_id)
    d.silent = {late}
    request = d.submit(FIRST, 2)
    d.turn()
    d.work()
    d.turn()
    assert d.copies.loads and not d.ranks[0].inbox
    d.silent.clear()
    d.run_until_idle()
    assert d.request(request).cached_tokens == 16


# behaviour: a block that one rank does not find, or finds damaged, is a miss for all, with a counter
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("outcome", [DISK_NOT_FOUND, DISK_DAMAGED, DISK_FAILED])
def test_a_share_that_one_rank_cannot_read_is_a_miss(rank: int, outcome: int) -> None:
    d = begun()
    d.only_on_disk()
    d.outcomes[rank, DISK_READ] = (outcome, 0)
    assert d.serve_prompt(FIRST) == 4  # the block that is on the device
    missed = (d.books.missed_tags_total, d.books.missed_checksums_total, d.books.failed_total)
    assert missed == tuple(3 * (outcome == each) for each in (DISK_NOT_FOUND, DISK_DAMAGED, DISK_FAILED))
    assert d.books.loaded_total == 0


# behaviour: what one rank has not announced, or announced otherwise, is no entry, and nothing behind it is
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["damaged", "another slot", "another owner", "another entry"])
def test_entries_that_one_rank_lacks_are_no_hits(rank: int, how: str) -> None:
    d = begun()
    d.only_on_disk()
    disk = d.disks[rank]
    slots = list(disk)  # in the order of the prefix
    if how == "damaged":
        del disk[slots[1]]
    elif how == "another slot":
        disk[DISK - 1] = disk.pop(slots[1])
        d.owners[rank][DISK - 1] = d.owners[rank][slots[1]]
    elif how == "another owner":
        d.owners[rank][slots[1]] = [5, 5]
    else:
        disk[slots[1]], disk[slots[2]] = disk[slots[2]], disk[slots[1]]
    d.successors()
    assert d.books.cached == 1 and d.books.pruned_total == len(d.disks[0]) - 1
    assert sum(books(d.books)) == DISK and d.books.stale >= set(slots[1:])
    assert d.serve_prompt(FIRST) == 4


# behaviour: a full disk of one rank makes the tier smaller for all; one that fails turns it off
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_makes_the_tier_smaller(rank: int) -> None:
    d = begun()
    d.outcomes[rank, DISK_WRITE] = (DISK_FULL, 2)
    assert [d.serve_prompt(prompt) for prompt in (FIRST, SECOND)] == [0, 0]
    assert (d.books.free, d.books.quarantined, d.books.cached) == (2, DISK - 2, 0)
    d.outcomes.clear()
    for prompt in (THIRD, FIRST, SECOND):
        d.serve_prompt(prompt)
    assert d.books.cached == 2 and d.books.saved_total > 2


def test_the_fullest_disk_of_all_ranks_counts() -> None:
    d = begun()
    d.outcomes = {(0, DISK_WRITE): (DISK_FULL, 5), (1, DISK_WRITE): (DISK_FULL, 3)}
    assert [d.serve_prompt(prompt) for prompt in (FIRST, SECOND)] == [0, 0]
    assert (d.books.free, d.books.quarantined) == (3, DISK - 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_of_one_rank_that_fails_turns_the_tier_off(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_copies, "FAILURES_MAX", 3)
    d = begun()
    d.outcomes[rank, DISK_WRITE] = (DISK_FAILED, 0)
    for prompt in (FIRST, SECOND, THIRD):
        assert d.serve_prompt(prompt) == 0
    assert d.copies.off and d.books.quarantined == d.books.failed_total >= 3


# behaviour: a wipe overwrites what some ranks have written of blocks that others could not write
@pytest.mark.parametrize("outcome", [(DISK_FAILED, 0), (DISK_FULL, 0)])
def test_a_wipe_reaches_what_one_rank_has_written(outcome: tuple[int, int]) -> None:
    d = begun()
    d.outcomes[1, DISK_WRITE] = outcome
    for prompt in (FIRST, SECOND):
        d.serve_prompt(prompt)
    assert d.disks[0] and not d.disks[1] and d.books.halves == set(d.disks[0])
    d.outcomes.clear()
    reply = d.ask(WipeTenant(rid=d.rid(), tenant="default"))
    assert reply.pending_blocks
    d.run_until_idle()
    assert not d.disks[0] and not d.books.unwiped


# behaviour: entries of a tenant that was wiped while the ranks were away are overwritten on the ranks that have them
@pytest.mark.parametrize("rank", [0, 1])
def test_entries_of_a_wiped_tenant_on_one_rank_are_overwritten(rank: int) -> None:
    d = begun()
    d.only_on_disk()
    d.lose(d.ranks[1])
    d.ask(WipeTenant(rid=d.rid(), tenant="default"))
    d.disks[rank].clear()
    d.files = [HostFile(16, f"of another boot {each}") for each in range(2)]
    d.begin()
    d.run_until_idle()
    assert d.disks == [{}, {}] and not d.books.unwiped


# behaviour: a restarted coordinator asks the ranks again for what is unanswered, and knows what was answered
def test_ranks_that_come_back_get_what_is_unanswered(tmp_path: Path) -> None:
    d = begun()
    d.only_on_disk()
    d.silent = {1}
    d.submit(FIRST, 2)
    d.turn()
    d.work()
    orders = sorted(d.ranks[1].orders)
    assert len(orders) == 3 and len(d.copies.ranks.answers) == 3  # type: ignore[union-attr]
    come_back(d, tmp_path)
    assert sorted(d.ranks[1].orders) == orders
    d.silent.clear()
    d.run_until_idle()
    assert d.books.loaded_total == 3 and not d.copies.loads and d.serve_prompt(FIRST) == 16


def test_ranks_that_come_back_announce_the_rest(tmp_path: Path) -> None:
    d = begun()
    d.only_on_disk()
    d.lose(d.ranks[1])
    d.ranks = [worker for worker in d.start() if isinstance(worker, DiskWorker)]
    d.turn()
    assert [len(worker.scans) for worker in d.ranks] == [0, 1]  # rank 0 last
    d.announce(1)
    d.turn()
    come_back(d, tmp_path)
    d.ranks[1].scans = d.ranks[1].scans[-1:]
    assert [scan.cursor for scan in d.ranks[1].scans] == [3]
    d.announce_all()
    assert d.books.announced and d.books.cached == 4


def come_back(d: DiskRanks, folder: Path) -> None:
    """Save the state, restart the coordinator and let all ranks come back."""
    snapshot.write(folder / "state", d.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(folder / "state").machine()
    assert digest(machine.cache) == digest(d.machine.cache)
    machine.check_invariants()
    for worker in d.ranks:
        worker.orders.clear()
    d.apply(Restarted())
    d.turn()
    for rank, worker in enumerate(d.ranks):
        worker.number += 100
        hello = WorkerHello(rid=9, name="w", pid=1, boot="boot", epoch=worker.epoch, rank=rank, ranks=d.count)
        d.apply(FromWorker(worker.number, hello))
    d.turn()


@pytest.mark.parametrize("numbers", [[1, 2, 3], [DISK, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 1] * 2])
def test_a_malformed_announcement_of_any_rank_ends_the_worker(numbers: list[int]) -> None:
    d = DiskRanks()
    ranks = d.start()
    d.turn()
    tokens = np.zeros(4 * (len(numbers) // 6), np.int32)
    d.report(ranks[1], DiskEntries(ranks[1].epoch, 0, True, np.array(numbers, np.int32), tokens))
    assert d.dropped(ranks[1])[0] and d.dropped(ranks[0]) == (True, True)


def test_ranks_with_disks_of_several_sizes_are_refused() -> None:
    d = DiskRanks()
    first, second = d.hello(0), d.hello(1)
    d.apply(FromWorker(first.number, d.announced(0, first)))
    d.apply(FromWorker(second.number, d.announced(1, second, disk_blocks=8)))
    assert "disagree: disk_blocks is 16 on rank 0 and 8 on rank 1" in d.heard(second, Refused)[0].error.message
