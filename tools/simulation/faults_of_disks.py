"""Faults to plant in the disk tier: copies that are believed too early, of other content, or lost; see `faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache import rank_disks
from kvforge.coordinator.core.cache.disk_copies import DiskCopies
from kvforge.coordinator.core.cache.disk_entries import DiskEntry
from kvforge.coordinator.core.cache.disk_orders import DiskOrder
from kvforge.coordinator.core.cache.disk_tier import DiskTier
from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.cache.rank_disks import DiskOutcome, RankDisks
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.core.scheduling.disk_waits import DiskWaits
from kvforge.protocol.messages import DISK_DONE, DISK_READ, DISK_WRITE, DiskResults
from tools.simulation.faults import Patch

FAULTS_OF_DISKS: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_DISKS[make.__name__] = make
    return make


@fault
def orders_that_failed_count() -> list[Patch]:
    """Whatever the outcome of an order, its block counts as copied."""
    ended = DiskCopies.ended

    def believed(self: DiskCopies, message: DiskResults, rank: int = 0) -> list[int]:
        results = message.results.reshape(-1, 3).copy()
        results[:, 1:] = DISK_DONE, 0
        return ended(self, DiskResults(message.epoch, results.reshape(-1)), rank)

    return [(DiskCopies, "ended", believed)]


@fault
def loads_believed_when_they_are_ordered() -> list[Patch]:
    """A block counts as being in the host tier once its copy is ordered."""
    order, filled = DiskCopies._order, HostTier.filled

    def at_once(self: DiskCopies, new: DiskOrder) -> int:
        if new.kind == DISK_READ:
            filled(self._host, new.host)
        return order(self, new)

    def again(self: HostTier, node_id: int) -> None:
        if not self.nodes[node_id].written:
            filled(self, node_id)

    return [(DiskCopies, "_order", at_once), (HostTier, "filled", again)]


@fault
def host_blocks_given_up_while_the_disk_reads_them() -> list[Patch]:
    """An entry that is being written to the disk can give its host block to another one."""
    order = DiskCopies._order

    def unheld(self: DiskCopies, new: DiskOrder) -> int:
        if new.kind == DISK_WRITE:
            self._host._lru.add_oldest(new.host, self._host.nodes[new.host].owner)
        return order(self, new)

    return [(DiskCopies, "_order", unheld)]


@fault
def requests_wait_until_the_disk_answers() -> list[Patch]:
    """A request waits for its blocks on the disk for ever, although the disk is stuck."""

    def stays(self: DiskWaits, request: Request) -> None:
        pass

    return [(DiskWaits, "give_up", stays)]


@fault
def entries_of_wiped_tenants_are_announced() -> list[Patch]:
    """A worker that was away when its tenant was wiped brings the entries back."""
    adopt = DiskTier.adopt

    def without(self: DiskTier, *arguments: Any) -> bool:
        taken = adopt(self, *arguments[:6])
        for node in self.nodes.values():
            if node.block == arguments[0] and taken:
                node.tag = arguments[6]
        return taken

    return [(DiskTier, "adopt", without)]


@fault
def announced_entries_of_any_prefix() -> list[Patch]:
    """An announced entry is taken at the place that it names, whatever is before it."""
    adopt = DiskTier.adopt

    def any_prefix(
        self: DiskTier, block: int, value: int, parent: int, first: bool, tokens: Any, hasher: Any, *owner: int
    ) -> bool:
        others = [node.value for node in self.nodes.values()]
        if not first and others:
            self._by_value.setdefault(parent, self._by_value[others[0]])
        return adopt(self, block, value, parent, first, np.roll(tokens, 1), hasher, *owner)

    return [(DiskTier, "adopt", any_prefix)]


@fault
def orders_that_one_rank_has_answered_count() -> list[Patch]:
    """An order of several ranks ends with the first answer."""

    def first(self: RankDisks, rank: int, outcome: DiskOutcome) -> DiskOutcome | None:
        return outcome

    return [(RankDisks, "answer", first)]


@fault
def entries_of_rank_0_alone() -> list[Patch]:
    """An entry that rank 0 announces is taken, whatever the other ranks have."""

    def any_entry(self: RankDisks, entry: DiskEntry) -> bool:
        return True

    return [(RankDisks, "has", any_entry)]


@fault
def the_best_outcome_of_all_ranks() -> list[Patch]:
    """Of the outcomes of an order, the best counts."""
    return [(rank_disks, "WORST_FIRST", rank_disks.WORST_FIRST[::-1])]


@fault
def answers_sent_twice_count_for_two_ranks() -> list[Patch]:
    """An answer that a rank sends again, around a restart of the coordinator, counts as that of another rank."""
    answer = RankDisks.answer

    def any_rank(self: RankDisks, rank: int, outcome: DiskOutcome) -> DiskOutcome | None:
        return answer(self, len(self.answers.get(outcome.order, ())), outcome)

    return [(RankDisks, "answer", any_rank)]


OF_RANKS = {
    "orders_that_one_rank_has_answered_count",
    "entries_of_rank_0_alone",
    "the_best_outcome_of_all_ranks",
    "answers_sent_twice_count_for_two_ranks",
}
