"""Blocks used once are copied to the host tier while such copies are read, others always."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from kvforge.coordinator.core.cache.costs import StepCosts
from kvforge.coordinator.core.cache.host_yield import DEFAULT, LEAST, MOST, WHOLE, HostYield, needed_yield, permille
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from tests.coordinator.driver import VOCABULARY, continuation
from tests.coordinator.test_draft_choice import SOME
from tests.coordinator.test_host_tier import SIZE, HostDriver, HostFile, HostWorker
from tools.simulation.digest import state_digest

WINDOW = 64
BLOCKS = 4  # full blocks of a prompt
MINUTE_MS = 60_000


def prompt_of(number: int) -> list[int]:
    """Return a prompt that shares no block with that of another number."""
    tokens: list[int] = np.random.default_rng(number).integers(1, VOCABULARY, BLOCKS * SIZE + 1).tolist()
    return tokens


def hosted(blocks: int = 12, host: int = 400, window: int = WINDOW, **limits: int) -> tuple[HostDriver, HostWorker]:
    """Return a driver with a worker that has room for two prompts, and a file for a hundred."""
    driver = HostDriver(host_learn_blocks=window, **limits)
    driver.files["w"] = HostFile(host)
    worker = driver.add_worker(blocks, "w")
    assert isinstance(worker, HostWorker)
    return driver, worker


def random_traffic(driver: HostDriver, first: int, count: int) -> None:
    """Serve prompts that were never served before. Invariants are checked at every seventh event of these."""
    driver.check_every = SOME
    for number in range(first, first + count):
        assert driver.serve(prompt_of(number)) == 0
    driver.check_every = 1


def copied(worker: HostWorker) -> int:
    """Return how many blocks the worker has copied to its file."""
    return sum(step.host_writes.size // 4 for step in worker.steps)


def skipping(blocks: int = 12, window: int = WINDOW) -> tuple[HostDriver, HostWorker]:
    """Return a driver with a host tier that has stopped to copy blocks used once."""
    driver, worker = hosted(blocks, window=window)
    random_traffic(driver, 0, window // BLOCKS + 6)
    assert not driver.tier.yields.overall.copying
    return driver, worker


# behaviour: traffic that never repeats costs the copies of the first window alone
def test_300_prompts_that_never_repeat_are_copied_for_one_window_alone() -> None:
    driver, worker = hosted(host=100)
    random_traffic(driver, 0, 300)
    yields = driver.tier.yields
    assert 1180 <= yields.once_total <= 1200 and yields.wanted_total == 0
    assert copied(worker) == driver.tier.saved_total <= WINDOW + BLOCKS
    assert yields.skipped_total == yields.once_total - WINDOW
    assert len(yields.skipped) == driver.tier.total == 100


def test_a_window_of_0_copies_everything() -> None:
    driver, worker = hosted(window=0)
    random_traffic(driver, 0, 100)
    assert copied(worker) >= 4 * 97 and not driver.tier.yields.skipped_total


# behaviour: traffic that begins to repeat is copied again, though nothing of it was copied
def test_when_4_prompts_repeat_new_ones_are_copied_again_but_for_4_blocks() -> None:
    driver, worker = skipping()
    random_traffic(driver, 100, 20)
    for number in range(100, 104):
        assert driver.serve(prompt_of(number)) == 0
    yields = driver.tier.yields
    assert yields.recomputed_total == 4 * BLOCKS
    before, skipped, once = copied(worker), yields.skipped_total, yields.once_total
    random_traffic(driver, 200, 10)
    assert yields.overall.copying and yields.skipped_total - skipped <= 4
    assert copied(worker) - before >= yields.once_total - once - 4 >= 20


def test_a_prompt_that_was_skipped_is_copied_at_its_second_use() -> None:
    driver, _ = skipping(window=128)
    random_traffic(driver, 100, 4)
    assert driver.serve(prompt_of(100)) == 0 and driver.tier.yields.recomputed_total == BLOCKS
    assert not driver.tier.yields.overall.copying
    random_traffic(driver, 110, 4)
    assert len(driver.found(prompt_of(100))) == BLOCKS and not driver.found(prompt_of(111))
    assert driver.serve(prompt_of(100)) == BLOCKS * SIZE


def test_conversations_that_come_back_are_found() -> None:
    """Each of eight grows by two blocks a turn, and has left the pool at its next turn."""
    driver, _ = skipping(blocks=16)
    texts = [prompt_of(500 + number) for number in range(8)]
    found = []
    for turn in range(6):
        for number, text in enumerate(texts):
            request = driver.submit(text, 2)
            driver.run_until_idle()
            answer = driver.answer_of(request)
            assert answer == continuation(text, 2)
            found.append(driver.request(request).cached_tokens)
            texts[number] = [*text, *answer, *prompt_of(1000 + 10 * turn + number)[:6]]
    assert found[:16].count(0) >= 8, "the first turn is new"
    assert all(found[24:]), "later turns are found"
    assert driver.tier.yields.overall.copying


# behaviour: a block that was used again is copied, whatever the others do
def test_a_prefix_that_was_hit_on_the_device_is_copied() -> None:
    driver, _ = skipping()
    random_traffic(driver, 100, 1)
    assert driver.serve(prompt_of(100)) == BLOCKS * SIZE
    random_traffic(driver, 110, 4)
    assert len(driver.found(prompt_of(100))) == BLOCKS


def test_a_kept_sequence_is_copied() -> None:
    driver, _ = skipping()
    request = driver.submit(prompt_of(100), 4, keep_ms=MINUTE_MS)
    driver.run_until_idle()
    sequence = driver.ended[request].sequence_id
    for number in range(110, 113):
        driver.serve(prompt_of(number), 8)
    assert not driver.info(sequence).resident and not driver.tier.yields.overall.copying
    tokens = [*prompt_of(100), *driver.answer_of(request)]
    again = driver.submit([*tokens, 40, 41], 2, continues=sequence)
    driver.run_until_idle()
    assert driver.request(again).cached_tokens == 20


def test_a_preempted_request_is_copied() -> None:
    driver, worker = skipping(blocks=13)
    before = copied(worker)
    requests = [driver.submit(prompt_of(100 + number), 20) for number in range(2)]
    driver.run_until_idle()
    assert sum(driver.request(request).preemptions for request in requests) >= 1
    assert copied(worker) > before and not driver.tier.yields.overall.copying


# behaviour: reads of copies keep them coming, also from a successor
def test_copies_that_are_read_go_on() -> None:
    driver, _ = hosted()
    for _ in range(10):
        for number in range(6):
            driver.serve(prompt_of(number))
    random_traffic(driver, 100, 14)
    yields = driver.tier.yields
    assert yields.overall.copying and yields.overall.seen == WINDOW and not yields.skipped_total
    assert yields.wanted_total >= 6 * 3


def test_a_read_counts_once() -> None:
    driver, _ = hosted()
    random_traffic(driver, 0, 6)
    assert driver.serve(prompt_of(0)) == 16
    wanted = driver.tier.yields.wanted_total
    assert wanted == BLOCKS
    random_traffic(driver, 10, 6)
    assert driver.serve(prompt_of(0)) == 16
    assert driver.tier.yields.wanted_total == wanted


def test_a_successor_goes_on_with_what_was_learned() -> None:
    driver, worker = skipping()
    driver.lose(worker)
    successor = driver.add_worker(12, "w")
    assert isinstance(successor, HostWorker)
    random_traffic(driver, 100, 10)
    assert copied(successor) == 0 and not driver.tier.yields.overall.copying


def test_another_file_learns_anew() -> None:
    driver, worker = skipping()
    driver.lose(worker)
    driver.files["w"] = HostFile(400, "another")
    successor = driver.add_worker(12, "w")
    assert isinstance(successor, HostWorker)
    random_traffic(driver, 100, 4)
    assert copied(successor) >= BLOCKS


# behaviour: what must be read follows from measured costs
def test_the_needed_yield_follows_from_measured_costs() -> None:
    write, read, compute = StepCosts(), StepCosts(), StepCosts()
    assert needed_yield(write, read, compute, 16) == DEFAULT
    write.token, read.token, compute.token = 50, 40, 40
    assert needed_yield(write, read, compute, 16) == WHOLE * 50 // (640 - 40)
    compute.token = 4
    assert needed_yield(write, read, compute, 16) == MOST
    compute.token = 1
    assert needed_yield(write, read, compute, 16) == MOST
    compute.token = 1000
    assert needed_yield(write, read, compute, 16) == LEAST


def test_the_share_turns_at_half_of_what_is_needed_and_back_at_all() -> None:
    yields = HostYield(64, 1000)
    needed, period = WHOLE // 8, 4

    def evict(count: int) -> bool:
        for _ in range(count):
            yields.evicted(1, lambda: needed)
        return yields.overall.copying

    assert evict(63) and not evict(1)
    for _ in range(7):
        yields.wanted(1)
    assert not evict(period)
    yields.wanted(1)
    yields.wanted(1)
    assert yields.overall.share > needed and evict(period)
    evicted = period
    while evict(period):
        evicted += period
    assert evicted > 32 and LEAST < yields.overall.share < needed // 2


@pytest.mark.parametrize(("window", "period"), [(1, 1), (64, 4), (1024, 16), (1 << 12, 16)])
def test_decisions_are_made_after_each_few_evicted_blocks(window: int, period: int) -> None:
    yields, decided = HostYield(window, 1000), []
    for number in range(window + 48):
        yields.evicted(1, lambda: decided.append(number) or DEFAULT)  # noqa: B023 - called in this round
    own = decided[::2]
    assert decided[1::2] == own and own[0] == window - 1
    assert {after - before for before, after in itertools.pairwise(own)} == {period}


# behaviour: each tenant has a share of its own once it has had a window
def test_a_tenant_whose_prompts_repeat_is_copied_beside_one_whose_do_not() -> None:
    yields = HostYield(64, 1000)
    for number in range(640):
        yields.evicted(1, lambda: DEFAULT)
        if number % 8 == 0:
            yields.evicted(2, lambda: DEFAULT)
            yields.wanted(2)
    assert not yields.share_of(1).copying and yields.share_of(2).copying
    assert yields.share_of(3) is yields.overall


def test_blocks_of_a_tenant_without_repeats_are_skipped_beside_one_with_repeats() -> None:
    driver, _ = hosted(blocks=16, host=800)
    for number in range(60):
        request = driver.submit(prompt_of(1000 + number), 2, tenant="batch")
        driver.run_until_idle()
        assert driver.request(request).cached_tokens == 0
        driver.submit([*prompt_of(2000 + number // 3), *prompt_of(3000 + number % 3)[:4]], 2, tenant="chat")
        driver.run_until_idle()
    tenants, yields = driver.machine.cache.tenants, driver.tier.yields
    chat, batch = yields.by_tenant[tenants.names.index("chat")], yields.by_tenant[tenants.names.index("batch")]
    assert chat.copying and not batch.copying and batch.evicted > 200
    assert sum(driver.tier.usage.values()) - driver.tier.usage[tenants.names.index("batch")] >= 40


def test_the_memory_of_skipped_blocks_is_bounded() -> None:
    yields = HostYield(4, 3)
    for value in range(10):
        yields.evicted(1, lambda: DEFAULT)
        yields.skip(value, 1)
    assert list(yields.skipped) == [7, 8, 9]
    assert yields.computed_again([6, 8, 8, 1]) == [1, 2] and yields.recomputed_total == 1
    yields.remember(1 << 30)
    assert yields.skipped_max == 1 << 17


# behaviour: a wipe forgets what was skipped; statistics and explanations show it
def test_a_wipe_forgets_skipped_blocks() -> None:
    driver, _ = skipping()
    assert driver.tier.yields.skipped
    driver.tier.wipe(1)
    assert not driver.tier.yields.skipped


def test_the_numbers_and_the_explanation_of_skipped_blocks() -> None:
    driver, _ = skipping()
    random_traffic(driver, 100, 4)
    driver.serve(prompt_of(100))
    (pool,) = driver.stats().pools
    yields = driver.tier.yields
    assert (pool.host_skipped_total, pool.host_recomputed_total) == (yields.skipped_total, BLOCKS)
    assert pool.host_wanted_permille == permille(yields.overall) > 0
    indexed = np.flatnonzero(driver.machine.cache.blocks.indexed[:12]).tolist()
    said = [sentence for block in indexed for sentence in driver.explain(block_id=block).sentences]
    assert sum("a copy when it is evicted: it was used again" in sentence for sentence in said) == BLOCKS
    assert any("gets no copy when it is evicted: it was used once, " in sentence for sentence in said)


# behaviour: a snapshot keeps what was learned
def test_a_snapshot_keeps_the_yield(tmp_path: Path) -> None:
    driver, _ = skipping()
    random_traffic(driver, 100, 4)
    driver.serve(prompt_of(100))
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    machine.check_invariants()
    assert state_digest(machine) == state_digest(driver.machine)
    (tier,) = machine.cache.host_tiers.tiers.values()
    assert list(tier.yields.skipped) == list(driver.tier.yields.skipped) and not tier.yields.overall.copying


# behaviour: the tests above notice reads that are not counted
def test_reads_that_are_not_counted_end_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostYield, "wanted", lambda self, tenant: None)
    driver, _ = hosted()
    for _ in range(10):
        for number in range(6):
            driver.serve(prompt_of(number))
    random_traffic(driver, 100, 14)
    assert not driver.tier.yields.overall.copying
