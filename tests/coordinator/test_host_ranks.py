"""The host files of a worker with ranks count as one: saved by all, missed by any."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.events import FromWorker
from kvforge.protocol.messages import MISSED_CHECKSUM, MISSED_TAG, Refused, StepResult, WorkerReady
from tests.coordinator.driver import FakeWorker, continuation
from tests.coordinator.test_host_tier import FIRST, SECOND, HostFile, HostWorker, books
from tests.coordinator.test_ranks import Ranks

BLOCKS, HOST = 6, 16


class HostRanks(Ranks):
    """Ranks with a host file each."""

    worker_type = HostWorker

    def __init__(self, ranks: int = 2) -> None:
        super().__init__(ranks)
        self.files = [HostFile(HOST, f"file {rank}") for rank in range(ranks)]

    def start(self) -> list[FakeWorker]:
        """Connect all ranks and register their pool."""
        ranks = [self.hello(rank, blocks=BLOCKS) for rank in range(self.count)]
        for rank, worker in enumerate(ranks):
            self.apply(FromWorker(worker.number, self.announced(rank, worker)))
        return ranks

    def announced(self, rank: int, worker: FakeWorker, **fields: Any) -> WorkerReady:
        """Return a rank's announcement, with its file."""
        assert isinstance(worker, HostWorker)
        file = worker.file = self.files[rank]
        own = {"host_blocks": HOST, "host_identity": file.identity, "host_new": not file.content} | fields
        return msgspec.structs.replace(self.ready(worker), **own)

    @property
    def tier(self) -> HostTier:
        """The books of the files, the latest if there are several."""
        return list(self.machine.cache.host_tiers.tiers.values())[-1]

    def serve_prompt(self, prompt: list[int]) -> int:
        """Return the tokens that a request with this prompt found; its answer must be right."""
        request = self.submit(prompt, 2)
        self.run_until_idle()
        assert self.answer_of(request) == continuation(prompt, 2)
        return self.request(request).cached_tokens

    def evicted(self) -> list[FakeWorker]:
        """Start, and serve two prompts: the second takes the blocks of the first."""
        ranks = self.start()
        assert [self.serve_prompt(prompt) for prompt in (FIRST, SECOND)] == [0, 0]
        return ranks


def test_each_rank_copies_its_share_and_the_prefix_comes_back() -> None:
    d = HostRanks()
    d.evicted()
    assert d.files[0].content.keys() == d.files[1].content.keys() != set()
    assert d.serve_prompt(FIRST) == 16 and d.tier.loaded_total >= 3


# behaviour: a block is saved when all ranks have acknowledged it
def test_a_block_that_one_rank_has_not_acknowledged_is_no_entry() -> None:
    d = HostRanks()
    ranks = d.start()
    d.serve_prompt(FIRST)
    d.submit(SECOND, 2)
    d.turn()
    assert ranks[0].inbox[0].host_writes.size
    d.report(ranks[0], ranks[0].execute(ranks[0].inbox.popleft()))
    assert d.tier.cached == 0 and d.tier.referenced > 0
    d.report(ranks[1], ranks[1].execute(ranks[1].inbox.popleft()))
    assert d.tier.cached > 0 and d.tier.referenced == 0


# behaviour: a block is missed when one rank does not find its share
@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_that_one_rank_misses_is_missed_by_all(rank: int) -> None:
    d = HostRanks()
    ranks = d.evicted()
    request = d.submit(FIRST, 2)
    d.turn()
    for number, worker in enumerate(ranks):
        result = worker.execute(worker.inbox.popleft())
        block = int(result.host_copied[-1])
        if number == rank:
            result = msgspec.structs.replace(result, host_missed=np.array([block, MISSED_CHECKSUM], np.int32))
        d.report(worker, result)
    assert d.tier.missed_checksums_total == 1
    d.run_until_idle()
    assert d.answer_of(request) == continuation(FIRST, 2) and d.request(request).preemptions == 1


def test_a_block_that_both_miss_counts_once() -> None:
    d = HostRanks()
    ranks = d.evicted()
    d.submit(FIRST, 2)
    d.turn()
    for worker, reason in zip(ranks, (MISSED_TAG, MISSED_CHECKSUM), strict=True):
        result = worker.execute(worker.inbox.popleft())
        missed = np.array([int(result.host_copied[-1]), reason], np.int32)
        d.report(worker, msgspec.structs.replace(result, host_missed=missed, host_read_us=7 + reason))
    assert (d.tier.missed_tags_total, d.tier.missed_checksums_total) == (1, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_acknowledge_other_copies_end(rank: int) -> None:
    d = HostRanks()
    ranks = d.evicted()
    d.submit(FIRST, 2)
    d.turn()
    for number, worker in enumerate(ranks):
        if any(d.dropped(each)[0] for each in ranks):
            break
        result: StepResult = worker.execute(worker.inbox.popleft())
        if number == rank:
            result = msgspec.structs.replace(result, host_copied=result.host_copied[::-1].copy())
        d.report(worker, result)
    assert all(d.dropped(worker)[0] for worker in ranks)
    assert "other host blocks were copied" in d.heard(ranks[0], Refused)[0].error.message


# behaviours: a successor finds the files of all ranks; a rank with another file misses all
@pytest.mark.parametrize("other", [None, 0, 1])
def test_successors_find_what_all_ranks_have(other: int | None) -> None:
    d = HostRanks()
    ranks = d.evicted()
    d.lose(ranks[1])
    assert d.dropped(ranks[0]) == (True, True)
    if other is not None:
        d.files[other] = HostFile(HOST, "another file")
    d.start()
    assert d.serve_prompt(FIRST) == (16 if other is None else 0)
    assert sum(books(d.tier)) == HOST


def test_ranks_with_files_of_several_sizes_are_refused() -> None:
    d = HostRanks()
    first, second = d.hello(0), d.hello(1)
    d.apply(FromWorker(first.number, d.announced(0, first)))
    d.apply(FromWorker(second.number, d.announced(1, second, host_blocks=8)))
    assert "disagree: host_blocks is 16 on rank 0 and 8 on rank 1" in d.heard(second, Refused)[0].error.message
