"""Prompt chunks in steps with decodes: bounded by the time between tokens, and by the cost of that bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import pytest

from kvforge.coordinator.core.cache.costs import UNIT, StepCosts
from tests.coordinator.driver import Driver, continuation

NO_GAP_US = 1_000_000_000
Cost = Callable[[int, int], int]


@dataclass
class Served:
    """Results of several requests: virtual times in microseconds, and prompt tokens in steps with decodes."""

    total_us: int
    first_us: list[int]
    gaps_us: list[int]
    chunks: list[int]


def serve(cost: Cost, gap_us: int, prompts: int = 8, noise: float = 0.0) -> Served:
    """Serve simultaneous requests on a worker with steps of cost(decodes, prompt tokens) microseconds."""
    driver = Driver(
        decode_gap_us=gap_us,
        block_size=64,
        blocks_max=64,
        blocks_per_sequence_max=4,
        step_tokens_max=128,
        steps_in_flight_max=2,
    )
    worker = driver.add_worker(64)
    asked = [[(i * 977 + j * 31) % 1000 for j in range(192)] for i in range(prompts)]
    requests = [driver.submit(prompt, max_tokens=24) for prompt in asked]
    random, started_us = Random(3), driver.now_us
    served, last_us = Served(0, [], [], []), dict[int, int]()
    while True:
        driver.turn()
        if not worker.inbox:
            break
        step = worker.inbox.popleft()
        decodes, chunk = int((step.counts == 1).sum()), int(step.counts[step.counts > 1].sum())
        if decodes and chunk:
            served.chunks.append(chunk)
        took_us = int(cost(decodes, chunk) * (1 + noise * (2 * random.random() - 1)))
        driver.advance(took_us)
        driver.report(worker, msgspec.structs.replace(worker.execute(step), duration_us=took_us))
        for slot in step.slots[step.samples == 1].tolist():
            if slot in last_us:
                served.gaps_us.append(driver.now_us - last_us[slot])
            else:
                served.first_us.append(driver.now_us - started_us)
            last_us[slot] = driver.now_us
    served.total_us = driver.now_us - started_us
    assert [driver.answer_of(request) for request in requests] == [continuation(prompt, 24) for prompt in asked]
    return served


def slow(decodes: int, chunk: int) -> int:
    """A device that exceeds the bound with decodes alone."""
    return 61_000 + 19_000 * max(decodes, 1) + 2400 * chunk


def fast(decodes: int, chunk: int) -> int:
    """A device with room for prompts within the bound."""
    return 20_000 + 1000 * decodes + 2400 * chunk


# behaviour 31
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_bound_that_cannot_be_kept_costs_prompts_little(noise: float) -> None:
    bounded, free = serve(slow, 60_000, noise=noise), serve(slow, NO_GAP_US, noise=noise)
    assert bounded.total_us < 1.25 * free.total_us
    assert sum(bounded.first_us) < 1.6 * sum(free.first_us)
    # Twice the decodes' own time, except for the first steps, before any measurement.
    assert sorted(bounded.gaps_us)[-16] < 2 * slow(8, 0) * (1 + noise)


# behaviour 31
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_bound_that_can_be_kept_is_kept(noise: float) -> None:
    bounded, free = serve(fast, 120_000, noise=noise), serve(fast, NO_GAP_US, noise=noise)
    assert sum(gap > 120_000 * (1 + 2 * noise) for gap in bounded.gaps_us) <= 4  # the first steps
    assert sum(gap > 120_000 * (1 + 2 * noise) for gap in free.gaps_us) > 20
    assert bounded.total_us < 1.25 * free.total_us


# behaviour 31
def test_equal_prompts_end_one_by_one() -> None:
    served = serve(fast, NO_GAP_US, prompts=4)
    assert len(set(served.first_us)) == 4


def decode_and_prompt(**limits: Any) -> tuple[Driver, int, int]:
    """One request decodes while a prompt of 500 tokens is computed: (driver, decoding request, prompt's request)."""
    fields = {"step_tokens_max": 64, "blocks_per_sequence_max": 256, "blocks_max": 256, "decode_gap_us": 1000}
    driver = Driver(steps_in_flight_max=1, **{**fields, **limits})
    driver.add_worker(256)
    decoding = driver.submit([1, 2], max_tokens=60)
    driver.step()
    return driver, decoding, driver.submit([i % 1000 for i in range(500)], max_tokens=2)


def timed_chunk(driver: Driver, cost_us: Callable[[int], int]) -> int:
    """Run one step and return its largest chunk, which determines its duration."""
    (worker,) = driver.workers
    driver.turn()
    (step,) = worker.inbox
    chunk = int(step.counts.max())
    result = worker.execute(worker.inbox.popleft())
    driver.report(worker, msgspec.structs.replace(result, duration_us=cost_us(chunk)))
    return chunk


# behaviour 31
def test_chunks_beside_decodes_follow_what_steps_take() -> None:
    driver, decoding, prompt = decode_and_prompt()
    quick, weary = (lambda chunk: 50 + 25 * chunk), (lambda chunk: 4 * (50 + 25 * chunk))
    chunks = [timed_chunk(driver, cost) for cost in (*[quick] * 4, *[weary] * 4, *[quick] * 9)]
    assert chunks[0] == 63  # nothing is measured yet
    assert all(25 < chunk < 36 for chunk in chunks[1:5])  # 875 us of 1000
    assert max(chunks[6:8]) <= 20
    assert 20 < chunks[-1] < 36
    driver.run_until_idle()
    assert driver.answer_of(decoding) == continuation([1, 2], 60)
    assert driver.answer_of(prompt) == continuation([i % 1000 for i in range(500)], 2)


# behaviour 31
def test_steps_that_hold_no_decodes_are_not_bounded() -> None:
    driver, decoding, prompt = decode_and_prompt()
    driver.cancel(decoding)
    assert [timed_chunk(driver, lambda _: 9000) for _ in range(3)] == [64, 64, 64]  # no request waits for a token
    driver.cancel(prompt)
    decoding = driver.submit([1, 2], max_tokens=60)
    assert [timed_chunk(driver, lambda _: 500) for _ in range(3)] == [2, 1, 1]
    driver.submit(range(200, 500), max_tokens=2)
    assert timed_chunk(driver, lambda _: 500) == 16  # these steps measured the cost of a prompt token


# ----------------------------------------------------------------------------------------------------- linear fit


def test_a_line_is_found_in_steps_that_lie_on_it() -> None:
    costs = StepCosts()
    for tokens in (512, 100, 50, 200, 0, 0, 80):
        costs.add(tokens, 40_000 + 1700 * tokens)
    assert costs.fixed == pytest.approx(40_000 * UNIT, rel=0.001)
    assert costs.token == pytest.approx(1700 * UNIT, rel=0.001)
    assert costs.chunk(200_000) == pytest.approx(135_000 / 1700, abs=1)
    assert costs.chunk(50_000) == pytest.approx(40_000 / 1700, abs=1)  # at least half of the step


def test_steps_of_one_size_tell_no_line_but_how_fast_the_device_is() -> None:
    costs = StepCosts()
    costs.add(0, 40_000)
    costs.add(80, 120_000)
    for _ in range(100):
        costs.add(80, 240_000)
    assert costs.fixed + 80 * costs.token == pytest.approx(240_000 * UNIT, rel=0.01)
    assert costs.fixed > 40_000 * UNIT


def test_nothing_is_known_before_a_prompt_was_computed() -> None:
    costs = StepCosts()
    costs.add(0, 5000)
    assert costs.chunk(200_000) == 0


@pytest.mark.parametrize("duration_us", [-(1 << 62), 0, 1 << 62])
def test_a_duration_that_cannot_be_is_survived(duration_us: int) -> None:
    costs = StepCosts()
    for tokens in (0, 5, 0, 7, 7, 512):
        costs.add(tokens, duration_us)
        assert costs.fixed >= 0
        assert costs.chunk(200_000) >= 0
