"""Several answers to one prompt: the prompt is computed once and shared; each answer is as if alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import InvalidRequest, QueueFull
from kvforge.protocol.messages import SamplingParams
from tests.coordinator.driver import MASK, VOCABULARY, Driver, FakeWorker, choose, fingerprint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # two and a half blocks of four
SEED = (1 << 64) - 2


def drawn(context: int, seed: int) -> int:
    """The token that a seed samples after a context."""
    return choose((context + (seed + 1) * 0xBF58476D1CE4E5B9) & MASK, VOCABULARY)


class SeededWorker(FakeWorker):
    """A worker that samples by the request's seed, like a real one."""

    def choose(self, slot: int, context: int) -> int:
        return drawn(context, self.begins[slot].seed)


class SeededDriver(Driver):
    worker_type = SeededWorker


def alone(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """Return the tokens that a request with this seed must generate."""
    context, answer = 1, []
    for token in prompt:
        context = fingerprint(context, token)
    for _ in range(count):
        answer.append(drawn(context, seed))
        context = fingerprint(context, answer[-1])
    return answer


def submit(
    driver: Driver, count: int, prompt: Sequence[int] = PROMPT, max_tokens: int = 8, seed: int = SEED
) -> list[int]:
    reply = driver.ask(driver.submit_message(prompt, max_tokens, count=count, sampling=SamplingParams(seed=seed)))
    assert (reply.seed, reply.count) == (seed, count)
    return list(range(reply.request_id, reply.request_id + count))


def seed_of(i: int, seed: int = SEED) -> int:
    return (seed + i) % (1 << 64)


def check(driver: Driver, requests: list[int], prompt: Sequence[int] = PROMPT, max_tokens: int = 8) -> None:
    """Check that each request ended with the answer that it would have generated alone."""
    driver.run_until_idle()
    answers = [driver.answer_of(request) for request in requests]
    assert answers == [alone(prompt, seed_of(i), max_tokens) for i in range(len(requests))]
    assert [driver.streamed[request] for request in requests] == answers
    if max_tokens > 4:
        assert len({tuple(answer) for answer in answers}) == len(answers)


# ------------------------------------------------------------------------------------------------------------- sharing


def test_samples_are_requests_with_consecutive_ids_and_seeds() -> None:
    driver = SeededDriver()
    worker = driver.add_worker(64)
    driver.submit([1], max_tokens=1)
    requests = submit(driver, 4)
    assert requests == [2, 3, 4, 5]
    assert [driver.request(request).prompt_tokens for request in requests] == [10] * 4
    check(driver, requests)
    seeds = {begin.request_id: begin.seed for step in worker.steps for begin in step.begins}
    assert [seeds[request] for request in requests] == [SEED, SEED + 1, 0, 1]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7, 8, 9, 10, 30])
def test_the_prompt_is_computed_once_and_one_token_more_for_each_further_sample(length: int) -> None:
    driver = SeededDriver(steps_in_flight_max=1)
    worker = driver.add_worker(64)
    prompt = list(range(length))
    requests = submit(driver, 5, prompt)
    driver.step()
    assert [driver.request(request).state for request in requests] == ["running"] + ["pending"] * 4
    assert driver.stats().requests.computed_tokens_total == length
    driver.turn()
    assert [driver.request(request).state for request in requests] == ["running"] * 5
    assert worker.steps[-1].counts.tolist() == [1] * 5
    assert worker.steps[-1].samples.tolist() == [1] * 5
    assert driver.stats().requests.computed_tokens_total == length + 5
    # All samples share the full blocks before the last token; the tails are copied.
    s, full = driver.machine.cache.sequences, (length - 1) // 4
    tables = [s.blocks_of(driver.machine.requests.live[request].slot).tolist() for request in requests]
    counts = driver.machine.cache.blocks.refcount
    for table in tables:
        assert table[:full] == tables[0][:full]
        assert counts[table[:full]].tolist() == [5] * full
        assert (counts[table[full:]] == 1).all()
    assert len({block for table in tables for block in table[full:]}) == sum(len(table) - full for table in tables)
    tail = (length - 1) % 4
    assert worker.steps[-1].copies.reshape(-1, 3)[:, 2].tolist() == ([tail] * 4 if tail else [])
    check(driver, requests, prompt)
    assert driver.stats().requests.computed_tokens_total == length + 4 + 5 * 7
    assert [driver.request(request).cached_tokens for request in requests] == [0] + [length - 1] * 4
    assert driver.free_or_cached() == 64


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_answers_do_not_wait_for_each_other(count: int, max_tokens: int) -> None:
    driver = SeededDriver(step_rows_max=16)
    worker = driver.add_worker(64)
    requests = submit(driver, count, PROMPT, max_tokens)
    check(driver, requests, PROMPT, max_tokens)
    assert len(worker.steps) <= 2 * max_tokens + 1


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("budget", [3, 8, 32])
def test_a_prompt_in_chunks_is_shared_when_it_is_whole(in_flight: int, budget: int) -> None:
    driver = SeededDriver(steps_in_flight_max=in_flight, step_tokens_max=budget)
    driver.add_worker(64)
    requests = submit(driver, 4)
    check(driver, requests)
    # The first is ahead by the steps that were in flight when the others began.
    assert driver.stats().requests.computed_tokens_total == 10 + 3 + 4 * 7


def test_on_two_workers_each_sample_is_right() -> None:
    driver = SeededDriver(step_rows_max=2)
    for _ in range(2):
        driver.add_worker(32)
    check(driver, submit(driver, 6))


# -------------------------------------------------------------------------------------------- the first sample ends


@pytest.mark.parametrize("when", ["pending", "in its prefill", "after its first token"])
@pytest.mark.parametrize("how", ["cancelled", "failed", "expired"])
def test_the_others_finish_when_the_first_ends_early(how: str, when: str) -> None:
    driver = SeededDriver(steps_in_flight_max=1, step_tokens_max=8)
    worker = driver.add_worker(32)
    if when == "pending":
        driver.lose(worker)
    requests = submit(driver, 4)
    steps = {"pending": 0, "in its prefill": 1, "after its first token": 2}[when]
    for _ in range(steps):
        driver.step()
    first = requests[0]
    assert driver.request(first).state == ("pending" if when == "pending" else "running")
    assert driver.request(first).generated_tokens == (1 if when == "after its first token" else 0)
    live = driver.machine.requests.live
    if how == "cancelled":
        driver.cancel(first)
    elif how == "failed":
        driver.machine.finisher.end(live[first], "fail", "failed", None)
    else:
        driver.machine._clock.deadlines.set(driver.now_us, first, 0)
    driver.turn()
    assert driver.request(first).state == how
    if when == "pending":
        driver.add_worker(32)
    driver.run_until_idle()
    answers = [driver.answer_of(request) for request in requests[1:]]
    assert answers == [alone(PROMPT, seed_of(i), 8) for i in (1, 2, 3)]
    assert driver.free_or_cached() == 32


def test_when_the_row_of_the_first_fails_the_next_computes_the_prompt() -> None:
    driver = SeededDriver()
    worker = driver.add_worker(32)
    requests = submit(driver, 3)
    driver.turn()
    worker.poison = {9}  # only while the first one computes its prompt
    driver.answer(worker)
    worker.poison = set()
    assert driver.request(requests[0]).state == "failed"
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests[1:]] == [alone(PROMPT, seed_of(i), 8) for i in (1, 2)]


# behaviours 20 and 35
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_worker_dies_in_the_middle_of_samples(steps: int) -> None:
    driver = SeededDriver(step_tokens_max=8)
    worker = driver.add_worker(32)
    requests = submit(driver, 4)
    for _ in range(steps):
        driver.step()
    driver.turn()
    driver.lose(worker)
    driver.add_worker(32)
    check(driver, requests)
    assert driver.free_or_cached() == 32


# behaviour 20
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("blocks", [5, 6, 8, 11, 14])
def test_samples_in_a_pool_too_small_for_all(blocks: int, in_flight: int) -> None:
    driver = SeededDriver(steps_in_flight_max=in_flight)
    driver.add_worker(blocks)
    check(driver, submit(driver, 6))
    assert driver.free_or_cached() == blocks


def test_samples_of_a_tenant_at_its_ceiling() -> None:
    driver = SeededDriver(quotas={"default": Quota(ceiling=6)})
    driver.add_worker(32)
    check(driver, submit(driver, 4))


# ------------------------------------------------------------------------------------------------------------ refusals


# behaviour 27
def test_what_cannot_be_sampled_several_times_is_refused() -> None:
    driver = Driver(samples_max=8)
    driver.add_worker(16)
    for count in (0, -1, 9):
        assert driver.refused(driver.submit_message(PROMPT, count=count), InvalidRequest).field == "count"
    sequence = driver.create(PROMPT)
    message = driver.submit_message(sequence_id=sequence, count=2)
    assert driver.refused(message, InvalidRequest).field == "count"
    assert driver.info(sequence).request_id == 0
    assert submit(driver, 8) == list(range(1, 9))


# behaviour 27
def test_the_queue_has_room_for_all_or_for_none() -> None:
    driver = Driver(queue_max=5)
    submit(driver, 3)
    driver.refused(driver.submit_message(PROMPT, count=3), QueueFull)
    assert driver.stats().requests.pending == 3
    submit(driver, 2)


def test_explain_says_that_a_sample_waits_for_the_prompt() -> None:
    driver = Driver(steps_in_flight_max=1)
    driver.add_worker(32)
    requests = submit(driver, 3)
    driver.turn()
    told = driver.explain(request_id=requests[2])
    assert told.facts["limit"] == "sibling"
