"""The last token of an answer that stays is computed once its request has ended: the next turn is then a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.protocol.messages import GENERATED, NO_INT32, Fork, Rewind, Step
from kvforge.worker.step.checks import Rows
from kvforge.worker.step.token_kinds import split_by_kind, split_marks
from tests.coordinator.driver import Driver, FakeWorker, continuation

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]
ANSWER = continuation(PROMPT, 6)
TALK = [*PROMPT, *ANSWER, 40, 41]
MINUTE_MS = 60_000


def pool(kinds: bool = True, blocks: int = 32, **limits: object) -> tuple[Driver, FakeWorker]:
    driver = Driver(**limits)
    driver.wants_kinds = kinds
    return driver, driver.add_worker(blocks)


def end_of_turn(driver: Driver) -> int:
    """Run a request to its last token, and return the sequence that it leaves, before the step behind it."""
    request = driver.submit(PROMPT, 6, keep_ms=MINUTE_MS)
    requests = driver.machine.requests
    while request in requests.live:
        driver.turn()
        driver.answer(driver.workers[0])
    ended = requests.known(request)
    assert ended is not None
    return ended.kept_id


def steps_to_first_token(driver: Driver, worker: FakeWorker, text: list[int], sequence: int = 0) -> list[Step]:
    """Submit a turn, and return the steps up to its first token."""
    before = len(worker.steps)
    request = driver.submit(text, 4, continues=sequence)
    while not driver.answer_of(request):
        driver.turn()
        driver.answer(worker)
    # The step with the first token was sent before those that are still in flight.
    steps = worker.steps[before : len(worker.steps) - len(worker.inbox)]
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(text, 4)
    return steps


def parts(step: Step) -> tuple[int, int]:
    """Return of how many decodes and of how many runs of prompt tokens a worker makes the step."""
    tokens, generated = split_marks(step.tokens, step.counts, True)
    tables = np.zeros((step.slots.size, 1), np.int32)
    rows = Rows(step.slots, step.starts, step.counts, step.samples, tokens, tables, generated, None)
    _, alone = split_by_kind(rows)
    return int(alone.sum()), int((~alone).sum())


def test_a_next_turn_takes_the_steps_of_a_cached_prompt() -> None:
    driver, worker = pool()
    text = [*TALK[:-2], *range(50, 57)]
    driver.submit(text[:-4], 1)
    driver.run_until_idle()
    cached = steps_to_first_token(driver, worker, text)
    sequence = end_of_turn(driver)
    driver.run_until_idle()
    assert driver.info(sequence).computed_tokens == driver.info(sequence).length == 15
    turn = steps_to_first_token(driver, worker, text, sequence)
    assert [parts(step) for step in turn] == [parts(step) for step in cached] == [(0, 1)]
    assert turn[0].tokens.tolist() == text[15:]


def test_the_step_behind_an_answer_has_its_last_token_alone() -> None:
    driver, worker = pool()
    sequence = end_of_turn(driver)
    before = len(worker.steps)
    driver.run_until_idle()
    (step,) = worker.steps[before:]
    assert step.tokens.tolist() == [ANSWER[-1] + GENERATED]
    assert (step.starts.tolist(), step.samples.tolist()) == ([14], [0])
    assert driver.tokens(sequence) == TALK[:-2]


def test_there_is_no_such_step_where_kinds_are_computed_alike() -> None:
    driver, worker = pool(kinds=False)
    end_of_turn(driver)
    before = len(worker.steps)
    driver.run_until_idle()
    assert len(worker.steps) == before


def test_it_joins_the_decodes_of_others_but_no_prompt() -> None:
    driver, worker = pool(step_tokens_max=4)
    sequence = end_of_turn(driver)
    before = len(worker.steps)
    others = driver.submit(list(range(60, 70)), 4)
    driver.run_until_idle()
    joined = [step for step in worker.steps[before:] if ANSWER[-1] + GENERATED in step.tokens]
    assert len(joined) == 1 and joined[0].counts.tolist() == [1, 1], "beside a decode"
    assert driver.info(sequence).computed_tokens == 15
    assert driver.answer_of(others) == continuation(list(range(60, 70)), 4)


def test_a_full_step_leaves_it_to_a_later_one() -> None:
    driver, worker = pool(step_rows_max=1)
    sequence = end_of_turn(driver)
    other = driver.submit([60, 61], 3)
    driver.run_until_idle()
    assert all(step.slots.size <= 1 for step in worker.steps)
    assert driver.answer_of(other) == continuation([60, 61], 3)
    assert driver.info(sequence).computed_tokens == 15


def test_a_turn_that_comes_first_computes_it_itself() -> None:
    driver, worker = pool()
    sequence = end_of_turn(driver)
    before = len(worker.steps)
    request = driver.submit(TALK, 3, continues=sequence)
    driver.run_until_idle()
    assert worker.steps[before].tokens.tolist() == [ANSWER[-1] + GENERATED, 40, 41]
    assert driver.answer_of(request) == continuation(TALK, 3)


@pytest.mark.parametrize("length", [3, 8, 12, 14, 15])
def test_a_sequence_that_is_cut_off_meanwhile_does_not_have_it(length: int) -> None:
    driver, worker = pool()
    sequence = end_of_turn(driver)
    driver.turn()
    assert worker.inbox, "the step is in flight"
    driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=length))
    request = driver.submit([*TALK[:length], 50, 51], 5, continues=sequence)
    driver.run_until_idle()
    assert driver.info(sequence).computed_tokens == min(length, 14)
    assert driver.answer_of(request) == continuation([*TALK[:length], 50, 51], 5)


@pytest.mark.parametrize("more", [[], [40, 41]])
def test_a_client_s_sequence_goes_on_while_the_step_is_in_flight(more: list[int]) -> None:
    driver, worker = pool()
    sequence = driver.create(PROMPT)
    first = driver.submit(sequence_id=sequence, max_tokens=6)
    while first in driver.machine.requests.live:
        driver.turn()
        driver.answer(worker)
    driver.turn()
    assert worker.inbox and worker.inbox[-1].samples.tolist() == [0]
    if more:
        driver.append((sequence, more))
    second = driver.submit(sequence_id=sequence, max_tokens=5)
    driver.run_until_idle()
    assert driver.answer_of(second) == continuation([*TALK[:-2], *more], 5)


def test_a_shared_block_is_not_written() -> None:
    driver, worker = pool()
    sequence = end_of_turn(driver)
    driver.ask(Fork(rid=driver.rid(), sequence_id=sequence))
    before = len(worker.steps)
    driver.run_until_idle()
    assert NO_INT32.size == sum(step.tokens.size for step in worker.steps[before:])
    assert driver.info(sequence).computed_tokens == 14


def test_a_token_that_its_client_appended_waits_for_a_request() -> None:
    driver, worker = pool()
    sequence = end_of_turn(driver)
    driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=14))
    driver.append((sequence, [50]))
    before = len(worker.steps)
    driver.run_until_idle()
    assert len(worker.steps) == before and driver.info(sequence).computed_tokens == 14


def test_a_worker_that_fails_it_leaves_it_to_the_next_turn() -> None:
    driver, worker = pool()
    sequence = end_of_turn(driver)
    worker.poison = {ANSWER[-1] + GENERATED}
    driver.run_until_idle()
    worker.poison = set()
    assert driver.info(sequence).computed_tokens == 14
    request = driver.submit(TALK, 3, continues=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(TALK, 3)


def test_it_goes_with_its_worker() -> None:
    driver, worker = pool()
    sequence = end_of_turn(driver)
    driver.turn()
    driver.lose(worker)
    worker = driver.add_worker(32)
    driver.run_until_idle()
    assert not worker.steps
    request = driver.submit(TALK, 3, continues=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(TALK, 3)
