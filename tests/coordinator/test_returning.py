"""Idle sequences and pins that moved down come back from the host tier before their next request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvforge.coordinator.core.cache import paced_reads
from kvforge.coordinator.core.cache.idle_times import LEARN_MIN
from kvforge.coordinator.core.cache.idle_tracker import RETRY_US
from kvforge.coordinator.core.cache.sequences import NO_POOL
from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.reporting.statistics import pool_row
from kvforge.coordinator.core.scheduling import returning
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.protocol.messages import GetHealth
from kvforge.protocol.meters import POOL_COUNTS
from tests.coordinator import test_disk_tier
from tests.coordinator.driver import continuation
from tests.coordinator.test_host_ranks import HostRanks
from tests.coordinator.test_host_tier import FIRST, SECOND, HostDriver, HostFile, HostWorker
from tools.simulation.digest import state_digest

SECOND_US = 1_000_000
PAUSE_US = 3 * SECOND_US
OTHERS = ([3 * i % 41 + 100 for i in range(37)], [5 * i % 43 + 200 for i in range(37)])


def learn(driver: Any, pause_us: int = PAUSE_US, count: int = LEARN_MIN, **fields: Any) -> None:
    """Let sequences be continued after a pause so often that idle times are known."""
    for first in range(0, count, 4):
        sequence = driver.create([first + 1, 2, 3], **fields)
        for turn in range(min(4, count - first) + 1):
            driver.advance(pause_us if turn else 0)
            driver.submit([turn + 4], 1, sequence_id=sequence)
            driver.run_until_idle()
        driver.remove(sequence)


def waiting(driver: Any, prompt: list[int] = FIRST, **fields: Any) -> int:
    """Return a sequence with a request that has ended."""
    sequence = int(driver.create(prompt, **fields))
    driver.submit([9], 2, sequence_id=sequence)
    driver.run_until_idle()
    return sequence


def crowd(driver: Any) -> None:
    """Serve two prompts together that need all blocks except a few, and others that evict what is cached."""
    for offset in (0, 300, 500):
        prompts = [[token + offset for token in prompt] for prompt in OTHERS]
        requests = [driver.submit(prompt, 2) for prompt in prompts]
        driver.run_until_idle()
        assert [driver.answer_of(request) for request in requests] == [continuation(each, 2) for each in prompts]


def slot_of(driver: Any, sequence: int) -> int:
    """Return the slot of a sequence."""
    return int(driver.machine.cache.sequences.find(sequence))


def is_resident(driver: Any, sequence: int) -> bool:
    """Return whether a sequence holds blocks."""
    return bool(driver.machine.cache.sequences.pool[slot_of(driver, sequence)] != NO_POOL)


def pass_time(driver: Any, us: int) -> None:
    """Let time pass, with a turn whenever one is due."""
    end_us = driver.now_us + us
    while (due_us := driver.machine.due_us()) is not None and due_us <= end_us:
        driver.now_us = max(driver.now_us, due_us)
        driver.run_until_idle()
    driver.now_us = end_us
    driver.run_until_idle()


def world(blocks: int = 24, host: int = 64, **limits: Any) -> tuple[HostDriver, HostWorker]:
    """Return a driver that has learned a pause of three seconds, and its worker with a host file."""
    driver = HostDriver(**limits)
    driver.files["w"] = HostFile(host)
    worker = driver.add_worker(blocks, "w")
    assert isinstance(worker, HostWorker)
    learn(driver)
    return driver, worker


def moved_down(**limits: Any) -> tuple[HostDriver, HostWorker, int]:
    """A world with an idle sequence that others took the blocks of."""
    driver, worker = world(**limits)
    sequence = waiting(driver)
    crowd(driver)
    assert not is_resident(driver, sequence)
    worker.steps.clear()
    return driver, worker, sequence


def totals(driver: Any) -> tuple[int, int, int]:
    """Return how many sequences came back, were continued, and lost their blocks again."""
    tier = driver.tier
    return tier.returns_total, tier.returns_used_total, tier.returns_wasted_total


# behaviour: a sequence comes back before the request that its tenant's idle times let expect, which then reads nothing
def test_a_sequence_is_back_before_its_request() -> None:
    driver, worker, sequence = moved_down()
    pass_time(driver, PAUSE_US - 1)
    assert is_resident(driver, sequence) and totals(driver) == (1, 0, 0)
    assert sum(step.host_reads.size for step in worker.steps) > 0
    assert not any(step.slots.size for step in worker.steps), "a request ran"
    worker.steps.clear()
    before = driver.tokens(sequence)
    request = driver.submit([8], 2, sequence_id=sequence)
    driver.run_until_idle()
    assert not any(step.host_reads.size for step in worker.steps), "the request waited for a copy"
    assert driver.answer_of(request) == continuation([*before, 8], 2)
    assert driver.request(request).cached_tokens >= 16 and totals(driver) == (1, 1, 0)


def test_it_does_not_come_before_sequences_usually_do() -> None:
    driver, _, sequence = moved_down()
    pass_time(driver, SECOND_US)
    assert not is_resident(driver, sequence) and totals(driver) == (0, 0, 0)


def test_one_that_was_not_continued_in_time_gives_its_blocks_up() -> None:
    driver, _, sequence = moved_down()
    pass_time(driver, 3 * PAUSE_US)
    assert not is_resident(driver, sequence) and totals(driver) == (1, 0, 1)
    assert driver.machine.cache.sequences.return_us[slot_of(driver, sequence)] == 0, "it is tried for ever"
    assert driver.serve(FIRST) == 16, "its blocks are not cached"


def test_a_kept_sequence_comes_back_for_a_prompt_that_continues_it() -> None:
    driver, worker = world()
    first = driver.submit(FIRST, 2, keep_ms=600_000)
    driver.run_until_idle()
    sequence, answer = driver.ended[first].sequence_id, driver.answer_of(first)
    crowd(driver)
    assert not is_resident(driver, sequence)
    pass_time(driver, PAUSE_US - 1)
    assert is_resident(driver, sequence)
    worker.steps.clear()
    driver.submit([*FIRST, *answer, 7], 2, continues=sequence)
    driver.run_until_idle()
    assert totals(driver) == (1, 1, 0) and not any(step.host_reads.size for step in worker.steps)


# behaviour: nothing is done while too little is known, or where sequences do not come back
def test_unknown_idle_times_bring_nothing_back() -> None:
    driver = HostDriver()
    driver.files["w"] = HostFile(64)
    driver.add_worker(24, "w")
    learn(driver, count=LEARN_MIN // 2)
    sequence = waiting(driver)
    crowd(driver)
    pass_time(driver, 20 * SECOND_US)
    assert not is_resident(driver, sequence) and totals(driver) == (0, 0, 0)


def test_sequences_stay_down_where_few_are_continued() -> None:
    driver, _ = world()
    for _ in range(4 * LEARN_MIN):
        sequence = waiting(driver, FIRST[:3])
        driver.advance(PAUSE_US)
        driver.remove(sequence)
    sequence = waiting(driver)
    crowd(driver)
    pass_time(driver, 20 * SECOND_US)
    assert not is_resident(driver, sequence) and totals(driver) == (0, 0, 0)


def test_a_tenant_has_idle_times_of_its_own() -> None:
    driver, _ = world()
    learn(driver, 60 * SECOND_US, tenant="slow")
    slow, usual = waiting(driver, tenant="slow"), waiting(driver, SECOND)
    crowd(driver)
    assert not is_resident(driver, slow) and not is_resident(driver, usual)
    pass_time(driver, PAUSE_US - 1)
    assert is_resident(driver, usual) and not is_resident(driver, slow)


# behaviour: what runs or waits comes first
def test_nothing_comes_back_while_a_request_waits() -> None:
    driver, worker, sequence = moved_down(steps_in_flight_max=1)
    driver.advance(2 * SECOND_US)
    for number in range(8):  # each has a block, and the others of the pool are not enough for the last one
        driver.submit([number + 60, 61, 62, 63, 64, 65, 66], 30)
    driver.submit(SECOND, 2)
    for _ in range(20):
        driver.turn()
        assert worker.inbox and len(driver.machine.admission.waiting)
        assert not is_resident(driver, sequence)
        driver.advance(SECOND_US // 20)
    assert totals(driver) == (0, 0, 0)
    driver.run_until_idle()


def test_neither_an_idle_sequence_nor_the_last_blocks_are_taken() -> None:
    driver, _, sequence = moved_down()
    holders = [waiting(driver, prompt[:33]) for prompt in OTHERS]  # 9 blocks each, so 6 are left
    pass_time(driver, PAUSE_US - SECOND_US // 2)
    assert not is_resident(driver, sequence) and all(is_resident(driver, holder) for holder in holders)
    driver.remove(holders[0])
    pass_time(driver, SECOND_US // 4)
    assert is_resident(driver, sequence)


def test_a_turn_deals_with_a_bounded_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returning, "DUE_MAX", 1)
    driver, _ = world()
    sequences = [waiting(driver, prompt) for prompt in (FIRST, SECOND)]
    crowd(driver)
    s, slots = driver.machine.cache.sequences, [slot_of(driver, sequence) for sequence in sequences]
    due_us = int(s.return_us[slots].max())
    s.return_us[slots] = due_us
    driver.now_us = due_us
    driver.turn()
    assert [is_resident(driver, sequence) for sequence in sequences].count(True) == 1
    assert s.return_us[slots].min() == due_us + RETRY_US, "the other one is tried in a later turn"


def test_a_ceiling_holds() -> None:
    driver, _ = world(quotas={"small": Quota(ceiling=7)})
    sequence = waiting(driver, tenant="small")
    crowd(driver)
    assert not is_resident(driver, sequence)
    busy = driver.create(SECOND[:12], tenant="small")
    pass_time(driver, PAUSE_US - SECOND_US // 2)
    assert not is_resident(driver, sequence) and is_resident(driver, busy)
    driver.remove(busy)
    pass_time(driver, SECOND_US // 4)
    assert is_resident(driver, sequence)


def test_sequences_that_came_back_have_a_share_of_the_pool() -> None:
    driver, _ = world()
    first, second = waiting(driver), waiting(driver, SECOND)
    crowd(driver)
    assert not is_resident(driver, first) and not is_resident(driver, second)
    pass_time(driver, PAUSE_US - 1)
    assert [is_resident(driver, each) for each in (first, second)].count(True) == 1


def test_a_sequence_that_lost_its_blocks_again_comes_back_after_twice_the_time() -> None:
    driver, _, sequence = moved_down()
    pass_time(driver, PAUSE_US - SECOND_US // 2)
    assert is_resident(driver, sequence)
    crowd(driver)
    assert not is_resident(driver, sequence) and totals(driver) == (1, 0, 1)
    s, slot = driver.machine.cache.sequences, slot_of(driver, sequence)
    after_us = int(s.returned_after_us[slot])
    pass_time(driver, SECOND_US // 4)
    assert after_us and totals(driver)[0] == 1, "it came back at once"


# behaviour: steps of running rows carry a few of the blocks each, and the sequence counts when all have come
def test_steps_carry_a_few_blocks_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_reads, "BLOCKS_MIN", 1)
    monkeypatch.setattr(paced_reads, "IDLE_BLOCKS", 1)
    driver, worker, sequence = moved_down()
    driver.submit([50, 51], 40)
    driver.advance(PAUSE_US - SECOND_US // 2)
    for _ in range(12):
        driver.step()
        driver.advance(SECOND_US // 20)
    reads = [step.host_reads.size // 4 for step in worker.steps if step.host_reads.size]
    assert len(reads) > 1 and set(reads) == {1}
    driver.run_until_idle()
    before = driver.tokens(sequence)
    request = driver.submit([8], 2, sequence_id=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*before, 8], 2)


def partly_back(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> tuple[HostDriver, HostWorker, int]:
    """Return a sequence with one block on its way and others that are not in a step yet."""
    monkeypatch.setattr(paced_reads, "BLOCKS_MIN", 1)
    monkeypatch.setattr(paced_reads, "IDLE_BLOCKS", 1)
    driver, worker, sequence = moved_down(steps_in_flight_max=1, **limits)
    driver.advance(PAUSE_US - SECOND_US // 2)
    driver.turn()
    assert driver.copies.paced.waiting and worker.inbox
    return driver, worker, sequence


def test_a_request_lets_the_next_step_carry_all_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker, sequence = partly_back(monkeypatch)
    before = driver.tokens(sequence)
    request = driver.submit([8], 2, sequence_id=sequence)
    assert not driver.copies.paced.waiting and driver.copies.reads
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*before, 8], 2)
    assert sum(step.host_reads.size > 0 for step in worker.steps) == 2 and totals(driver) == (1, 1, 0)


def test_a_request_without_room_takes_the_blocks_of_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, sequence = partly_back(monkeypatch)
    requests = [driver.submit(prompt, 2) for prompt in OTHERS]
    driver.turn()
    assert not is_resident(driver, sequence) and not driver.copies.paced.waiting and totals(driver) == (1, 0, 1)
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests] == [continuation(prompt, 2) for prompt in OTHERS]


def test_what_is_on_its_way_leaves_nothing_when_its_sequence_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, sequence = partly_back(monkeypatch)
    driver.remove(sequence)
    driver.run_until_idle()
    assert driver.tier.referenced == 0 and driver.copies.paced.slot == paced_reads.NO_SLOT
    assert totals(driver) == (1, 0, 1)


def test_a_worker_that_dies_amid_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker, sequence = partly_back(monkeypatch)
    driver.lose(worker)
    assert driver.tier.referenced == 0
    driver.add_worker(24, "w")
    before = driver.tokens(sequence)
    request = driver.submit([8], 2, sequence_id=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*before, 8], 2)


def test_a_block_that_is_missed_amid_lets_the_sequence_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker, sequence = partly_back(monkeypatch)
    worker.file.flipped.add(int(worker.inbox[0].host_reads[1]))
    driver.answer(worker)
    assert not is_resident(driver, sequence) and not driver.copies.paced.waiting
    before = driver.tokens(sequence)
    request = driver.submit([8], 2, sequence_id=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*before, 8], 2)


@pytest.mark.parametrize("amid", [True, False])
def test_a_snapshot_keeps_what_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, amid: bool) -> None:
    driver, _, _ = partly_back(monkeypatch) if amid else moved_down()
    snapshot.write(tmp_path / "state", driver.machine, snapshot.Head(version=STATE_VERSION, now_us=0, numbers=0))
    machine = snapshot.Snapshot(tmp_path / "state").machine()
    assert state_digest(machine) == state_digest(driver.machine)
    times = machine.cache.idle.times
    assert times.overall == driver.machine.cache.idle.times.overall and times.overall.total >= LEARN_MIN
    (group,) = machine.cache.groups.values()
    assert group.host is not None and vars(group.host.paced) == vars(driver.copies.paced)


# behaviour: a pin comes back as soon as there is room, and a sequence on the disk through the host tier
def test_a_pin_comes_back_with_its_last_block() -> None:
    driver = HostDriver()
    driver.files["w"] = HostFile(64)
    driver.add_worker(24, "w")
    driver.submit(FIRST, 2, pins=((16, 600_000),))
    driver.run_until_idle()
    s = driver.machine.cache.sequences
    (slot,) = s.pinned.nonzero()[0].tolist()
    driver.machine.cache.residency.release_kv(slot)
    for prompt in OTHERS:
        driver.serve(prompt)
    crowd(driver)
    pass_time(driver, 10 * SECOND_US)
    assert s.pool[slot] != NO_POOL and s.computed[slot] == 16 and totals(driver) == (1, 0, 0)
    assert driver.serve(FIRST) == 16


def test_blocks_on_the_disk_come_through_the_host_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_disk_tier, "BLOCKS", 256)
    driver = test_disk_tier.with_disk(24, 96)
    learn(driver)
    sequence = waiting(driver)
    crowd(driver)
    for node_id in driver.tier.cached_nodes():
        driver.tier.drop(node_id)
    assert not is_resident(driver, sequence) and not driver.tier.cached and not driver.books.loaded_total
    pass_time(driver, PAUSE_US - 1)
    assert is_resident(driver, sequence) and totals(driver) == (1, 0, 0) and driver.books.loaded_total >= 4


def test_all_ranks_bring_their_share() -> None:
    d = HostRanks()
    ranks = d.start()
    learn(d)
    sequence = waiting(d, FIRST[:4])
    d.machine.cache.residency.release_kv(slot_of(d, sequence))
    assert d.serve_prompt(SECOND) == 0
    for rank in ranks:
        rank.steps.clear()
    assert not is_resident(d, sequence)
    pass_time(d, PAUSE_US - 1)
    assert [sum(step.host_reads.size for step in rank.steps) for rank in ranks] in ([0, 0], [4, 4])


def test_an_explanation_says_why_a_sequence_came_back_or_will() -> None:
    driver, _, sequence = moved_down()
    said = " ".join(driver.explain(sequence_id=sequence).sentences)
    assert "it is expected when it has been idle for 2.05 s to 3.07 s" in said
    pass_time(driver, PAUSE_US - 1)
    said = " ".join(driver.explain(sequence_id=sequence).sentences)
    assert "it came back from the host tier before a request" in said


# behaviour: idle times of other tenants decide while a tenant has few of its own, and are not shown to it
def test_an_explanation_shows_no_idle_times_of_other_tenants() -> None:
    driver, _ = world()
    sequence = waiting(driver, tenant="new")
    crowd(driver)
    assert not is_resident(driver, sequence)
    assert "idle for" not in " ".join(driver.explain(sequence_id=sequence).sentences)
    pass_time(driver, PAUSE_US - 1)
    assert is_resident(driver, sequence)
    said = " ".join(driver.explain(sequence_id=sequence).sentences)
    assert "few idle times of its tenant are known" in said and "idle for" not in said


def test_statistics_and_health_count_what_came_back() -> None:
    driver, _, sequence = moved_down()
    pass_time(driver, PAUSE_US - 1)
    driver.submit([8], 2, sequence_id=sequence)
    driver.run_until_idle()
    (pool,), (group,) = driver.stats().pools, driver.machine.cache.groups.values()
    assert (pool.host_returns_total, pool.host_returns_used_total, pool.host_returns_wasted_total) == (1, 1, 0)
    row = dict(zip(POOL_COUNTS, pool_row(driver.machine.cache, group), strict=True))
    assert [row[f"host_returns{end}"] for end in ("", "_used", "_wasted")] == [1, 1, 0]
    (worker,) = driver.ask(GetHealth(rid=driver.rid())).workers
    assert (worker.host_returns_total, worker.host_returns_used_total) == (1, 1)
