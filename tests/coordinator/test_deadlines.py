"""Requests that exceed a deadline, and requests of disconnected clients."""

from __future__ import annotations

from typing import Any

import pytest

from kvforge.protocol.errors import DeadlineExceeded, InvalidRequest, QueueFull, SequenceNotFound
from kvforge.protocol.messages import GetSequence
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation

PROMPT = [1, 2, 3]
SECOND = 1_000_000


def expired_error(driver: Driver, request: int) -> DeadlineExceeded:
    """The streamed error, which must equal the stored one."""
    told, kept = driver.ended[request].error, driver.request(request).error
    assert told is not None
    assert told == kept
    assert told.code == "deadline_exceeded"
    assert told.fields["request_id"] == request
    return DeadlineExceeded(told.message, **told.fields)


# ----------------------------------------------------------------------------------------------------------- deadlines


# behaviours 25 and 29
@pytest.mark.parametrize("state", ["pending", "running", "preempted"])
def test_a_request_expires_at_its_deadline_and_not_a_microsecond_before(make_pool: MakePool, state: str) -> None:
    driver, _ = make_pool(5, step_rows_max=1 if state == "pending" else 8, steps_in_flight_max=1)
    first = driver.submit(PROMPT, max_tokens=13)
    driver.step()
    started_us = driver.now_us
    request = driver.submit([4, 5, 6, 7], max_tokens=8, deadline_ms=250)
    assert driver.wake_us() == 250_000
    while driver.request(request).state != state:
        driver.step()
    if state == "running":
        driver.step()
    generated = driver.answer_of(request)
    assert generated == continuation([4, 5, 6, 7], 8)[: len(generated)]
    assert bool(generated) == (state != "pending")
    driver.advance(249_999)
    driver.turn()
    assert driver.request(request).state == state
    assert driver.now_us + (driver.wake_us() or 0) == started_us + 250_000
    driver.advance(1)
    driver.turn()
    info = driver.request(request)
    assert (info.state, info.reason, info.tokens.tolist()) == ("expired", "expired", generated)
    assert info.timings.ended_us == 250_000
    assert (driver.ended[request].reason, driver.ended[request].generated_tokens) == ("expired", len(generated))
    error = expired_error(driver, request)
    assert error.state == state
    assert "within 0.25 s" in str(error)
    assert f"it was {state}" in str(error)
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation(PROMPT, 13)
    assert driver.streamed.get(request, []) == generated
    assert driver.free_or_cached() == 5
    assert driver.stats().requests.expired_total == 1
    assert driver.nothing_due()


# behaviour 32: results of steps in flight at the deadline are discarded
def test_a_request_that_expires_in_mid_step_gives_everything_back_when_the_step_is_over(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit(PROMPT, max_tokens=8, deadline_ms=1)
    driver.turn()
    assert len(worker.inbox) == 2
    driver.advance(1000)
    driver.turn()
    assert driver.request(request).state == "expired"
    driver.run_until_idle()
    assert driver.streamed.get(request, []) == driver.answer_of(request) == []
    assert driver.free_or_cached() == 16


def test_without_a_deadline_of_its_own_the_limit_is_the_coordinators(driver: Driver) -> None:
    driver = Driver(deadline_max_us=5 * SECOND)
    request = driver.submit(PROMPT)
    assert driver.wake_us() == 5 * SECOND
    driver.advance(5 * SECOND - 1)
    driver.turn()
    assert driver.request(request).state == "pending"
    driver.advance(1)
    driver.turn()
    assert driver.request(request).state == "expired"


# behaviour 34
def test_without_a_worker_a_request_waits_until_its_deadline_and_is_told_why(driver: Driver) -> None:
    request = driver.submit(PROMPT, deadline_ms=100)
    driver.turn()
    assert driver.wake_us() == 100_000
    driver.advance(100_000)
    driver.turn()
    assert driver.request(request).state == "expired"
    assert "no worker is ready" in str(expired_error(driver, request))
    assert expired_error(driver, request).state == "pending"
    driver.add_worker(16)
    again = driver.submit(PROMPT, deadline_ms=100)
    driver.run_until_idle()
    assert driver.answer_of(again) == continuation(PROMPT, 4)


# ----------------------------------------------------------------------------------------------------- the first token


def test_a_request_without_a_token_in_time_expires(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    request = driver.submit(PROMPT, first_token_ms=20, deadline_ms=50)
    driver.turn()
    assert driver.wake_us() == 20_000
    driver.advance(19_999)
    driver.turn()
    assert driver.request(request).state == "running"
    driver.advance(1)
    driver.turn()
    assert driver.request(request).state == "expired"
    assert "it had no token after 0.02 s; it was running" in str(expired_error(driver, request))
    driver.run_until_idle()
    assert driver.free_or_cached() == 16


def test_a_request_whose_token_came_in_time_goes_on(make_pool: MakePool) -> None:
    driver, worker = make_pool(steps_in_flight_max=1)
    request = driver.submit(PROMPT, first_token_ms=20, deadline_ms=50)
    driver.turn()
    driver.advance(19_999)
    driver.answer(worker)
    driver.advance(1)
    driver.turn()
    assert driver.request(request).state == "running"
    assert driver.wake_us() == 30_000
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT, 4)


@pytest.mark.parametrize(("deadline_ms", "first_token_ms"), [(20, 20), (20, 30)])
def test_a_deadline_that_is_no_later_than_the_first_tokens_is_what_is_told(
    driver: Driver, deadline_ms: int, first_token_ms: int
) -> None:
    request = driver.submit(PROMPT, deadline_ms=deadline_ms, first_token_ms=first_token_ms)
    driver.advance(30_000)
    driver.turn()
    assert "it had not ended within 0.02 s" in str(expired_error(driver, request))


# behaviour 27
@pytest.mark.parametrize("field", ["deadline_ms", "first_token_ms", "priority"])
def test_times_and_priorities_out_of_range_are_refused_by_name(field: str) -> None:
    driver = Driver(deadline_max_us=5 * SECOND)
    driver.add_worker(16)
    lowest, highest = (-100, 100) if field == "priority" else (0, 5000)
    for wrong in (lowest - 1, highest + 1, -(1 << 40), 1 << 40):
        message = driver.submit_message(PROMPT, **{field: wrong})
        assert driver.refused(message, InvalidRequest).field == field
    for right in (lowest, highest):
        driver.submit(PROMPT, **{field: right})
    driver.run_until_idle()


# ---------------------------------------------------------------------------------------------------------- next_wake


def test_nothing_wakes_an_idle_machine(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=SECOND)
    assert driver.wake_us() is None
    request = driver.submit(PROMPT, deadline_ms=100, first_token_ms=50)
    assert driver.wake_us() == 50_000
    driver.run_until_idle()
    assert driver.nothing_due()  # timers of finished requests cause no wake-up
    driver.submit(PROMPT, client=2)
    driver.turn()
    driver.gone(2)
    driver.run_until_idle()
    assert driver.nothing_due()
    assert driver.request(request).state == "finished"


def test_timers_are_as_many_as_live_requests_need() -> None:
    driver = Driver(queue_max=40)
    for i in range(400):
        driver.submit([1], deadline_ms=1000, first_token_ms=500)
        if i >= 20:
            driver.cancel(i - 19)
    assert len(driver.machine._clock.deadlines.heap) <= 64 + 6 * 40


# -------------------------------------------------------------------------------------------------------------- leases


# behaviour 28
def test_a_request_outlives_a_connection_that_vanished_by_its_lease_exactly(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=SECOND, steps_in_flight_max=1)
    request = driver.submit(PROMPT, max_tokens=50, client=5)
    driver.step()
    driver.turn()
    driver.gone(5)
    driver.step()
    generated = driver.answer_of(request)
    assert len(generated) == 2  # it goes on
    assert driver.wake_us() == SECOND
    driver.advance(SECOND - 1)
    driver.turn()
    assert driver.request(request).state == "running"
    assert driver.wake_us() == 1
    driver.advance(1)
    driver.turn()
    info = driver.request(request)
    assert (info.state, info.reason, info.tokens.tolist()) == ("cancelled", "cancelled", generated)
    driver.run_until_idle()
    assert driver.free_or_cached() == 16


# behaviour 28
def test_a_goodbye_cancels_at_once(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=SECOND)
    requests = [driver.submit([i, *PROMPT], client=5) for i in range(3)]
    other = driver.submit(PROMPT, client=6)
    driver.turn()
    driver.gone(5, goodbye=True)
    assert [driver.request(r).state for r in requests] == ["cancelled"] * 3
    driver.run_until_idle()
    assert driver.answer_of(other) == continuation(PROMPT, 4)


def test_whoever_attaches_within_the_lease_keeps_the_request(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=SECOND, steps_in_flight_max=1)
    request = driver.submit(PROMPT, max_tokens=20, client=5)
    driver.step()
    driver.gone(5)
    driver.advance(SECOND - 1)
    driver.attach(request, 0, client=6)
    driver.advance(SECOND)
    driver.step()
    assert driver.request(request).state == "running"
    driver.gone(6)  # the second connection's lease counts from its own end
    driver.advance(SECOND - 1)
    driver.turn()
    assert driver.request(request).state == "running"
    driver.attach(request, 1, client=7)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT, 20)
    assert list(driver.tokens_read(7, request).values()) == continuation(PROMPT, 20)[1:]


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_detached_request_survives_both_and_can_be_read_when_it_has_ended(make_pool: MakePool, goodbye: bool) -> None:
    driver, _ = make_pool(lease_us=SECOND)
    request = driver.submit(PROMPT, max_tokens=5, client=5, detached=True)
    driver.turn()
    driver.gone(5, goodbye)
    driver.advance(2 * SECOND)
    driver.run_until_idle()
    assert driver.request(request).state == "finished"
    assert driver.request(request).detached
    assert request not in driver.streamed
    driver.attach(request, 2, client=6)
    driver.turn()
    assert list(driver.tokens_read(6, request).items()) == list(enumerate(continuation(PROMPT, 5)))[2:]
    assert driver.ended[request].reason == "length"


def test_a_detached_request_that_someone_attached_to_survives_that_one_too(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=SECOND)
    request = driver.submit(PROMPT, max_tokens=5, client=5, detached=True)
    driver.gone(5)
    driver.attach(request, 0, client=6)
    driver.gone(6, goodbye=True)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT, 5)


# ---------------------------------------------------------------------------------- sequences of a disconnected client


def gone_with_sequence(how: dict[str, Any], **limits: Any) -> tuple[Driver, int, int, int]:
    """A disconnected client's request continued one of its sequences: (driver, sequence, request, an idle sequence)."""
    driver = Driver(steps_in_flight_max=1, **{"lease_us": SECOND, **limits})
    driver.add_worker(16)
    idle = driver.create([9, 9, 9], client=5)
    sequence = driver.create([7, 8, 9], client=5)
    request = driver.submit(sequence_id=sequence, max_tokens=6, client=5, detached=how.get("detached", False))
    driver.step()
    driver.gone(5, how.get("goodbye", False))
    assert "its owner's connection ended" in str(driver.refused(GetSequence(rid=1, sequence_id=idle), SequenceNotFound))
    return driver, sequence, request, idle


@pytest.mark.parametrize("how", [{}, {"detached": True}, {"detached": True, "goodbye": True}])
def test_a_sequence_that_a_living_request_continues_stays_with_it(how: dict[str, Any]) -> None:
    driver, sequence, request, _ = gone_with_sequence(how)
    assert driver.info(sequence).idle_ttl_ms == 1000
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([7, 8, 9], 6)
    assert driver.tokens(sequence) == [7, 8, 9, *continuation([7, 8, 9], 6)]
    driver.advance(SECOND - 1)
    driver.turn()
    assert driver.info(sequence).length == 9
    driver.advance(100_001)  # sequences expire at most a tenth of a second late
    driver.turn()
    driver.refused(GetSequence(rid=1, sequence_id=sequence), SequenceNotFound)
    assert driver.free_or_cached() == 16


def test_a_sequence_goes_with_the_request_that_its_vanished_client_took_along() -> None:
    driver, sequence, request, _ = gone_with_sequence({"goodbye": True})
    assert driver.request(request).state == "cancelled"
    driver.refused(GetSequence(rid=1, sequence_id=sequence), SequenceNotFound)
    driver.run_until_idle()
    assert driver.free_or_cached() == 16


def test_a_sequence_goes_soon_after_the_lease_of_its_request() -> None:
    driver, sequence, request, _ = gone_with_sequence({})
    driver.advance(SECOND)
    driver.turn()
    assert driver.request(request).state == "cancelled"
    driver.advance(100_000)
    driver.turn()
    driver.refused(GetSequence(rid=1, sequence_id=sequence), SequenceNotFound)
    driver.run_until_idle()
    assert driver.free_or_cached() == 16


def test_without_a_lease_a_detached_request_keeps_its_sequence_as_long_as_it_needs_it() -> None:
    driver, sequence, request, _ = gone_with_sequence({"detached": True}, lease_us=0)
    driver.advance(200_000)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([7, 8, 9], 6)
    driver.advance(100_000)
    driver.turn()
    driver.refused(GetSequence(rid=1, sequence_id=sequence), SequenceNotFound)


def test_a_sequence_with_a_time_to_live_of_its_own_keeps_that(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=SECOND)
    sequence = driver.create([7, 8, 9], client=5, idle_ttl_ms=60_000)
    driver.submit(sequence_id=sequence, max_tokens=6, client=5)
    driver.gone(5)
    assert driver.info(sequence).idle_ttl_ms == 60_000


def test_the_request_of_another_client_keeps_the_sequence_of_one_that_said_goodbye(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=SECOND)
    sequence = driver.create([7, 8, 9], client=5)
    request = driver.submit(sequence_id=sequence, max_tokens=6, client=6)
    driver.gone(5, goodbye=True)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([7, 8, 9], 6)


def test_a_queue_full_of_the_gone_empties_when_their_leases_end() -> None:
    driver = Driver(queue_max=2, lease_us=SECOND)
    for _ in range(2):
        driver.submit(PROMPT, client=5)
    driver.gone(5)
    driver.refused(driver.submit_message(PROMPT), QueueFull)
    driver.advance(SECOND)
    driver.turn()
    assert driver.submit(PROMPT) == 3
