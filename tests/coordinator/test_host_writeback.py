"""Write-back: blocks that running sequences have filled are on the host when their worker dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.coordinator.core.cache.prefix_cache import PrefixCache
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from tests.coordinator.driver import continuation
from tests.coordinator.test_host_tier import FIRST, SECOND, SIZE, HostDriver, HostFile, HostWorker, books
from tools.simulation.digest import state_digest

TOKENS = 24


def hosted(writeback: int, host: int = 40, blocks: int = 32) -> tuple[HostDriver, HostWorker]:
    """A driver with a worker that has room for several sequences, and a file."""
    driver = HostDriver(host_writeback_blocks=writeback)
    driver.files["w"] = HostFile(host)
    worker = driver.add_worker(blocks, "w")
    assert isinstance(worker, HostWorker)
    return driver, worker


def recomputed(writeback: int, host: int = 40) -> int:
    """Return the tokens that are computed again when a worker dies with two sequences, of 35 and 36 tokens then."""
    driver, worker = hosted(writeback, host)
    requests = [driver.submit(prompt, TOKENS) for prompt in (FIRST, SECOND)]
    s = driver.machine.cache.sequences
    while s.length.max() < len(FIRST) + 18:
        driver.turn()
        driver.answer(worker)
    driver.lose(worker)
    driver.add_worker(32, "w")
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests] == [continuation(p, TOKENS) for p in (FIRST, SECOND)]
    return driver.machine.requests.recomputed_tokens_total


# behaviour: a worker's successor continues its sequences from the host
def test_a_successor_computes_again_what_was_filled_last_alone() -> None:
    assert recomputed(0) == 69
    assert recomputed(4) <= 2 * 3 * SIZE
    assert recomputed(1) < 69


def test_a_small_file_keeps_the_beginnings() -> None:
    """A sequence that outgrows the file does not push out its own beginning, without which the rest is of no use."""
    assert recomputed(4, host=4) <= 69 - 4 * SIZE


# behaviour: a block costs the same wherever it is in its sequence, and the end of a chain gives its blocks up first
def test_what_was_seen_to_be_whole_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    alive = PrefixCache.alive

    def counted(self: PrefixCache, key: int) -> bool:
        nonlocal looked
        looked += 1
        return alive(self, key)

    driver, _ = hosted(1, host=60, blocks=40)
    driver.submit(FIRST, 46)
    monkeypatch.setattr(PrefixCache, "alive", counted)
    driver.run_until_idle()
    assert driver.tier.saved_total == (len(FIRST) + 45) // SIZE and looked <= 6 * driver.tier.saved_total


def test_a_full_file_loses_the_ends_of_chains() -> None:
    driver, _ = hosted(4, host=6)
    for prompt in (FIRST, SECOND):
        driver.serve(prompt)
    nodes = driver.tier.nodes.values()
    assert driver.tier.evicted_total == 2 and driver.tier.breaks == 0
    assert all(node.parent < 0 or driver.tier.nodes[node.parent].block >= 0 for node in nodes), "an entry has no prefix"
    assert len(driver.found(SECOND)) == 4 and len(driver.found(FIRST)) == 2


def test_a_chain_that_broke_is_made_whole() -> None:
    """A damaged entry goes although others are behind it. What is known of their prefix is then looked up again."""
    driver, _ = hosted(4)
    driver.serve(FIRST)
    first, *_ = driver.found(FIRST)
    driver.tier.drop(first)
    assert driver.tier.breaks == 1 and not driver.found(FIRST)
    driver.serve([*FIRST[:16], 1, 2, 3, 4, 5])
    driver.run_until_idle()
    assert len(driver.found(FIRST)) == 4


# behaviour: steps carry a bounded number of blocks, and only if no other copy is under way
@pytest.mark.parametrize("most", [1, 3])
def test_a_step_carries_at_most_so_many_blocks_and_only_one_does(most: int) -> None:
    driver, worker = hosted(most)
    request = driver.submit(FIRST, TOKENS)
    busy, carried = 0, []
    while driver.request(request).state != "finished":
        driver.turn()
        steps = [step.host_writes.size // 4 for step in worker.inbox]
        carried += steps
        busy = max(busy, sum(size > 0 for size in steps))
        driver.answer(worker)
    assert max(carried) == most and busy == 1


def test_without_it_nothing_is_copied_before_it_is_evicted() -> None:
    driver, worker = hosted(0)
    driver.serve(FIRST)
    assert not any(step.host_writes.size for step in worker.steps)
    assert books(driver.tier) == (40, 0, 0, 0)


def test_a_block_is_copied_once() -> None:
    driver, worker = hosted(4, blocks=12)
    for prompt in (FIRST, SECOND, FIRST, SECOND):
        request = driver.submit(prompt, TOKENS)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(prompt, TOKENS)
    tags = [tuple(copy[2:]) for step in worker.steps for copy in step.host_writes.reshape(-1, 4).tolist()]
    assert len(tags) == len(set(tags)) == driver.tier.saved_total > 0
    assert driver.tier.referenced == 0 and not driver.tier.unsaved_total


# behaviour: a worker that dies when it is idle has left its whole cache
@pytest.mark.parametrize(("writeback", "found"), [(0, 0), (1, 16)])
def test_an_idle_worker_writes_the_rest_back(writeback: int, found: int) -> None:
    driver, worker = hosted(writeback)
    driver.serve(FIRST)
    assert driver.tier.cached == writeback * 4 and not driver.machine.busy
    steps = len(worker.steps)
    driver.serve(SECOND)
    idle = [step for step in worker.steps[steps:] if not step.slots.size]
    assert all(step.host_writes.size for step in idle) and bool(idle) == bool(writeback)
    driver.lose(worker)
    driver.add_worker(32, "w")
    assert driver.serve(FIRST) == found


# behaviour: a snapshot keeps what waits for its turn
def test_a_snapshot_keeps_the_backlog(tmp_path: Path) -> None:
    driver, worker = hosted(1)
    driver.submit(FIRST, TOKENS)
    driver.turn()
    driver.answer(worker)
    driver.turn()
    (group,) = driver.machine.cache.groups.values()
    assert group.pool.writeback is not None and group.pool.writeback.backlog
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    machine.check_invariants()
    assert state_digest(machine) == state_digest(driver.machine)
