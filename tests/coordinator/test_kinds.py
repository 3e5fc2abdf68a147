"""Generated tokens are marked as such, for workers that compute them differently from prompt tokens."""

from __future__ import annotations

import pytest

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import GENERATED, SamplingParams
from tests.coordinator.driver import Driver, FakeWorker, continuation

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]
ANSWER = continuation(PROMPT, 8)


def pool(kinds: bool = True) -> tuple[Driver, FakeWorker]:
    driver = Driver(drafts_max=0)
    driver.wants_kinds = kinds
    return driver, driver.add_worker(32)


def fed(worker: FakeWorker) -> list[int]:
    """The tokens of all its steps."""
    return [token for step in worker.steps for token in step.tokens.tolist()]


@pytest.mark.parametrize(("kinds", "cached"), [(True, 8), (False, 16)])
def test_what_was_generated_is_no_hit_for_a_prompt_where_that_matters(kinds: bool, cached: int) -> None:
    driver, _ = pool(kinds)
    driver.submit(PROMPT, 8)
    driver.run_until_idle()
    talk = [*PROMPT, *ANSWER, 40]
    for expected in (cached, 16):  # once computed as a prompt, it is a hit for the next request
        request = driver.submit(talk, 2)
        driver.run_until_idle()
        assert driver.request(request).cached_tokens == expected
        assert driver.answer_of(request) == continuation(talk, 2)


@pytest.mark.parametrize("kinds", [True, False])
def test_what_is_computed_again_comes_marked(kinds: bool) -> None:
    driver, first = pool(kinds)
    request = driver.submit(PROMPT, 8)
    while len(driver.answer_of(request)) < 5:
        driver.step()
    driver.lose(first)
    second = driver.add_worker(32)
    known = driver.answer_of(request)
    driver.run_until_idle()
    mark = GENERATED if kinds else 0
    assert fed(second)[: len(PROMPT) + len(known)] == PROMPT + [token + mark for token in known]
    assert driver.answer_of(request) == ANSWER, "clients receive no marks"


@pytest.mark.parametrize("kinds", [True, False])
def test_what_is_computed_again_finds_no_prompt_of_the_same_tokens(kinds: bool) -> None:
    driver = Driver()
    driver.wants_kinds = kinds
    first = driver.add_worker(6)
    running = driver.submit(PROMPT, 12)
    driver.step()
    second = driver.add_worker(32)
    whole = [*PROMPT, *continuation(PROMPT, 12)]
    driver.submit([*whole, 40], 1)  # no room for it next to the other request
    while not second.steps or second.inbox:
        driver.step()
    computed = len(fed(second))
    known = driver.answer_of(running)
    assert 4 <= len(known) < 12
    driver.lose(first)
    driver.run_until_idle()
    assert driver.answer_of(running) == continuation(PROMPT, 12)
    again = fed(second)[computed:]
    cached = 8 if kinds else (len(PROMPT) + len(known) - 1) // 4 * 4
    text = [*PROMPT, *(token + GENERATED * kinds for token in known)]
    assert again[: len(text) - cached] == text[cached:]


def test_a_sequence_keeps_what_was_generated_on_it() -> None:
    driver, worker = pool()
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    driver.append((sequence, [50, 51]))
    (fork,) = driver.fork(sequence)
    assert driver.tokens(sequence) == driver.tokens(fork) == [*PROMPT, *ANSWER[:3], 50, 51]
    driver.lose(worker)
    worker = driver.add_worker(32)
    request = driver.submit(sequence_id=fork, max_tokens=1)
    driver.run_until_idle()
    marked = [*PROMPT, *(token + GENERATED for token in ANSWER[:3]), 50, 51]
    assert fed(worker)[: len(marked)] == marked
    assert driver.answer_of(request) == continuation([*PROMPT, *ANSWER[:3], 50, 51], 1)


def test_penalties_count_tokens_and_not_their_marks() -> None:
    driver, first = pool()
    request = driver.submit(PROMPT, 8, sampling=SamplingParams(temperature=0.0, presence_penalty=0.5))
    while len(driver.answer_of(request)) < 4:
        driver.step()
    driver.lose(first)
    second = driver.add_worker(32)
    driver.step()
    step = next(step for step in second.steps if step.begins)
    assert step.history.tolist() == driver.answer_of(request)[: step.begins[0].generated]


def test_no_client_can_name_a_marked_token() -> None:
    driver = Driver()  # no worker has connected, so no vocabulary is known
    assert driver.refused(driver.submit_message([GENERATED]), InvalidRequest).field == "prompt"
