"""An answer is computed as a prompt while nothing else is to be done."""

from __future__ import annotations

import pytest

from kvforge.protocol.errors import Conflict, InvalidRequest
from tests.coordinator.driver import Driver, continuation

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]
ANSWER = continuation(PROMPT, 16)
WHOLE = [*PROMPT, *ANSWER]


def answered(kinds: bool = True, **limits: object) -> Driver:
    driver = Driver(**limits)
    driver.wants_kinds = kinds
    driver.add_worker(64)
    driver.submit(PROMPT, 16)
    driver.run_until_idle()
    return driver


def test_the_next_turn_finds_the_whole_conversation() -> None:
    driver = answered()
    driver.submit(WHOLE, 1, ahead=True)
    driver.run_until_idle()
    request = driver.submit([*WHOLE, 40, 41, 42, 43], 2)
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == 24
    assert driver.answer_of(request) == continuation([*WHOLE, 40, 41, 42, 43], 2)


def test_it_gives_way_to_a_request_and_leaves_what_it_computed() -> None:
    driver = answered(step_tokens_max=8, steps_in_flight_max=1)
    ahead = driver.submit(WHOLE, 1, ahead=True)
    driver.step()
    request = driver.submit([*WHOLE, 40], 2)
    assert driver.request(ahead).state == "cancelled"
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == 16, "8 were cached, and 8 were computed before"
    assert driver.answer_of(request) == continuation([*WHOLE, 40], 2)


def test_it_gives_way_before_it_has_started() -> None:
    driver = answered()
    waiting = [driver.submit(WHOLE[:size], 1, ahead=True) for size in (20, 24)]
    driver.submit([1, 2], 1)
    assert {driver.request(each).state for each in waiting} == {"cancelled"}
    driver.run_until_idle()


def test_it_is_refused_beside_others() -> None:
    driver = answered()
    driver.submit([1, 2], 4)
    driver.refused(driver.submit_message(WHOLE, 1, ahead=True), Conflict)
    driver.run_until_idle()


def test_a_refused_request_ends_nothing() -> None:
    driver = answered()
    ahead = driver.submit(WHOLE, 1, ahead=True)
    driver.refused(driver.submit_message([], 1), InvalidRequest)
    assert driver.request(ahead).state == "pending"
    driver.run_until_idle()


def test_a_request_on_a_sequence_ends_it_too() -> None:
    driver = answered()
    sequence = driver.create(PROMPT)
    ahead = driver.submit(WHOLE, 1, ahead=True)
    driver.submit(sequence_id=sequence, max_tokens=1)
    assert driver.request(ahead).state == "cancelled"
    driver.run_until_idle()


@pytest.mark.parametrize(
    ("kinds", "fields"), [(False, {}), (True, {"count": 2}), (True, {"max_tokens": 2})], ids=["alike", "two", "long"]
)
def test_what_is_of_no_use_is_refused(kinds: bool, fields: dict[str, int]) -> None:
    driver = answered(kinds)
    message = driver.submit_message(WHOLE, **{"max_tokens": 1, **fields}, ahead=True)
    assert driver.refused(message, InvalidRequest).field == "ahead"
