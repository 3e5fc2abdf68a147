"""Preemption: which request is preempted, its cost, and that every request ends."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.core.scheduling import preemption
from tests.coordinator.driver import Driver, continuation


def running(lengths: list[int], blocks: int = 64) -> tuple[Driver, list[Request]]:
    """Running requests, oldest first, with prompts of these lengths and one token each."""
    driver = Driver(steps_in_flight_max=1, step_tokens_max=256)
    driver.add_worker(blocks)
    ids = [driver.submit([i, *range(100, 99 + length)], max_tokens=8) for i, length in enumerate(lengths)]
    driver.step()
    return driver, [driver.machine.requests.live[i] for i in ids]


def chosen(driver: Driver, candidates: list[Request], short: int = 1) -> Request | None:
    """The request that the core would preempt."""
    machine = driver.machine
    slots = np.array([request.slot for request in candidates])
    order = machine.admission.rows.order
    slot = preemption.choose(machine.cache, machine.requests, order, slots, short)
    return next((request for request in candidates if request.slot == slot), None)


# ----------------------------------------------------------------------------------------------------------- the choice


def test_the_cheapest_to_redo_gives_way_and_never_the_oldest() -> None:
    driver, (oldest, long, short, middle) = running([2, 30, 6, 14])
    assert chosen(driver, [oldest, long, short, middle]) is short
    assert chosen(driver, [oldest, long, middle]) is middle
    assert chosen(driver, [oldest, long]) is long
    assert chosen(driver, [oldest]) is None
    assert chosen(driver, [long, short]) is short


def test_of_equals_the_youngest_gives_way() -> None:
    driver, (oldest, *others) = running([6, 6, 6, 6])
    assert chosen(driver, [oldest, *others]) is others[-1]
    assert chosen(driver, [oldest, *others[:-1]]) is others[-2]


def test_one_that_frees_too_little_is_spared_where_another_frees_enough() -> None:
    driver, (oldest, long, short, middle) = running([2, 30, 6, 14])
    everyone = [oldest, long, short, middle]
    assert [chosen(driver, everyone, blocks) for blocks in (2, 3, 4, 5, 8)] == [short, middle, middle, long, long]
    assert chosen(driver, everyone, 60) is long  # no request frees that many: take the one that frees most


def test_what_was_redone_counts_as_cost() -> None:
    driver, (oldest, one, other) = running([2, 9, 6])
    assert chosen(driver, [oldest, one, other]) is other
    other.redone_tokens = 2
    assert chosen(driver, [oldest, one, other]) is other
    other.redone_tokens = 4
    assert chosen(driver, [oldest, one, other]) is one


def test_blocks_that_others_hold_too_neither_count_as_gain_nor_as_cost() -> None:
    driver = Driver(steps_in_flight_max=1, step_tokens_max=256)
    driver.add_worker(64)
    prompt = list(range(30))
    first = driver.submit(prompt, max_tokens=8, count=3)
    alone = driver.submit([900, *range(10)], max_tokens=8)
    driver.step()
    driver.step()
    live = driver.machine.requests.live
    samples = [live[first + i] for i in range(3)]
    # The samples share seven blocks: each holds its own tail, with two copied tokens.
    assert chosen(driver, [samples[0], live[alone], samples[2]]) is samples[2]
    assert chosen(driver, [samples[0], samples[2], live[alone]], 2) is live[alone]


# ----------------------------------------------------------------------------------------------------- forward progress


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("blocks", [9, 10, 13, 17, 24, 33])
@pytest.mark.parametrize("kind", ["alike", "mixed", "shared"])
def test_in_a_pool_too_small_for_all_everyone_ends_and_preemptions_are_few(
    kind: str, blocks: int, in_flight: int
) -> None:
    driver = Driver(steps_in_flight_max=in_flight)
    driver.add_worker(blocks)
    size, count = 4, 12
    lengths = {"alike": [6] * count, "mixed": [1 + 5 * (i % 4) for i in range(count)], "shared": [13] * count}[kind]
    first = 1 if kind == "shared" else 12
    prompts = [[i % first, *range(50, 49 + length)] for i, length in enumerate(lengths)]
    answers = [16 if kind == "alike" else 8 + 3 * (i % 5) for i in range(count)]
    requests = [driver.submit(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    driver.run_until_idle(2000)
    for request, prompt, answer in zip(requests, prompts, answers, strict=True):
        assert driver.answer_of(request) == driver.streamed[request] == continuation(prompt, answer)
    stats = driver.stats().requests
    # A row is preempted for another row's next block, or for its own. Its generated tokens are kept, so only new tokens
    # need blocks: at most one per `size` tokens and one more. Admission leaves a block for each running row, so that no
    # new row is preempted at once.
    assert stats.preemptions_total <= sum(-(-answer // size) + 1 for answer in answers)
    assert driver.free_or_cached() == blocks


def test_tenants_with_ceilings_and_floors_in_a_small_pool_all_end() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=8), "b": Quota(floor=4), "c": Quota(ceiling=7, floor=2)})
    driver.add_worker(16)
    prompts = [[i, *range(i % 5)] for i in range(15)]
    requests = [driver.submit(prompt, 16, tenant="abc"[i % 3]) for i, prompt in enumerate(prompts)]
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests] == [continuation(prompt, 16) for prompt in prompts]
    assert driver.stats().requests.preemptions_total <= 15 * (16 // 4 + 1)


def test_the_oldest_is_never_preempted() -> None:
    driver = Driver()
    driver.add_worker(9)
    requests = [driver.submit([i, 1, 2], max_tokens=24) for i in range(6)]
    preemptions = dict.fromkeys(requests, 0)
    while live := driver.machine.requests.live:
        oldest = min((r for r in live.values() if r.admitted_order), key=lambda r: r.admitted_order, default=None)
        driver.step()
        if oldest is not None:
            assert oldest.preemptions == preemptions[oldest.id]
        preemptions.update({r.id: r.preemptions for r in live.values()})
    assert preemptions[requests[0]] == 0
    assert driver.stats().requests.preemptions_total == sum(preemptions.values()) > 0
    assert [driver.request(r).preemptions for r in requests] == list(preemptions.values())


# ------------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("budget", [3, 32])
@pytest.mark.parametrize("blocks", [8, 9, 11, 14, 20])
def test_what_was_computed_again_is_counted_token_by_token(blocks: int, budget: int) -> None:
    driver = Driver(steps_in_flight_max=1, step_tokens_max=budget)
    driver.add_worker(blocks)
    prompts = [[i, *range(50, 50 + 3 * (i % 4))] for i in range(8)]
    requests = [driver.submit(prompt, 12) for prompt in prompts]
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests] == [continuation(prompt, 12) for prompt in prompts]
    stats = driver.stats().requests
    # The last token of an answer is never fed, and initial prefix hits are not computed.
    once = sum(len(prompt) + 12 - 1 for prompt in prompts) - stats.cached_tokens_total
    assert stats.computed_tokens_total == once + stats.recomputed_tokens_total
    assert (stats.recomputed_tokens_total > 0) == (stats.preemptions_total > 0)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_death_costs_what_was_computed_and_no_more(steps: int) -> None:
    driver = Driver(steps_in_flight_max=1, step_tokens_max=8)
    worker = driver.add_worker(32)
    request = driver.submit(range(20), max_tokens=6)
    driver.turn()
    for _ in range(steps):
        driver.answer(worker)
        driver.turn()
    driver.lose(worker)
    computed = driver.stats().requests.computed_tokens_total
    driver.add_worker(32)
    driver.turn()
    assert driver.stats().requests.recomputed_tokens_total == computed
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(range(20), 6)
    assert driver.stats().requests.computed_tokens_total == 25 + computed
