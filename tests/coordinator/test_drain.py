"""Draining: new requests are refused, running ones end, and the rest is handed back at the deadline."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.events import BeginDrain
from kvforge.coordinator.core.limits import microseconds
from kvforge.protocol.errors import Draining, InvalidRequest
from kvforge.protocol.messages import Drain, GetHealth
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation

WEEK_MS = 7 * 24 * 3600 * 1000


def drain(driver: Driver, deadline_ms: int = 0) -> None:
    driver.ask(Drain(rid=driver.rid(), deadline_ms=deadline_ms))


# behaviours 26 and 29
def test_what_is_left_at_the_deadline_is_handed_back() -> None:
    driver = Driver(steps_in_flight_max=1, step_rows_max=2)
    driver.add_worker(16)
    sequence = driver.create([7, 8, 9], idle_ttl_ms=60_000)
    short = driver.submit([1, 2], max_tokens=2)
    long = driver.submit(sequence_id=sequence, max_tokens=40)
    pending = driver.submit([3, 4], max_tokens=40)
    detached = driver.submit([5, 6], max_tokens=40, detached=True, client=2)
    driver.step()
    drain(driver, 250)
    driver.refused(driver.submit_message([1]), Draining)
    for _ in range(4):
        driver.step()
    assert driver.request(short).state == "finished"
    assert driver.wake_us() == 250_000
    driver.advance(249_999)
    driver.turn()
    left = [long, pending, detached]
    assert [driver.request(r).state for r in left] == ["running", "running", "pending"]
    generated = [driver.answer_of(r) for r in left]
    driver.advance(1)
    driver.turn()
    for request, answer in zip(left, generated, strict=True):
        info = driver.request(request)
        assert (info.state, info.reason, info.tokens.tolist()) == ("failed", "failed", answer)
        error = driver.ended[request].error
        assert error is not None
        assert (error.code, error.fields["request_id"]) == ("draining", request)
        assert "submit it elsewhere" in error.message
        assert driver.ended[request].generated_tokens == len(answer)
    driver.run_until_idle()
    assert driver.tokens(sequence) == [7, 8, 9, *generated[0]]
    driver.remove(sequence)
    assert driver.free_or_cached() == 16
    assert driver.nothing_due()
    driver.refused(driver.submit_message([1]), Draining)


def test_health_says_draining(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    before = driver.ask(GetHealth(rid=1))
    assert (before.live, before.ready, before.draining) == (True, True, False)
    drain(driver, 100)
    for _ in range(2):
        health = driver.ask(GetHealth(rid=1))
        assert (health.live, health.ready, health.draining) == (True, False, True)
        assert health.reason == "draining: no new requests are admitted"
        driver.advance(100_000)
        driver.turn()


@pytest.mark.parametrize(
    ("first_ms", "second_ms", "left_ms"), [(100, 200, 100), (200, 100, 100), (100, 0, 100), (0, 100, 100), (0, 0, None)]
)
def test_the_earlier_of_two_deadlines_counts(first_ms: int, second_ms: int, left_ms: int | None) -> None:
    driver = Driver()
    request = driver.submit([1, 2])
    drain(driver, first_ms)
    drain(driver, second_ms)
    driver.turn()
    if left_ms is None:
        assert driver.wake_us() == microseconds(driver.machine.limits.bounds.deadline_max_s)
        return
    assert driver.wake_us() == left_ms * 1000
    driver.advance(left_ms * 1000 - 1)
    driver.turn()
    assert driver.request(request).state == "pending"
    driver.advance(1)
    driver.turn()
    assert driver.request(request).state == "failed"


def test_a_deadline_that_has_come_already_hands_back_at_once(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    request = driver.submit([1, 2])
    driver.turn()
    driver.apply(BeginDrain(driver.now_us))
    assert driver.request(request).state == "failed"
    driver.run_until_idle()
    assert driver.free_or_cached() == 16


# behaviour 27
@pytest.mark.parametrize("wrong", [-1, WEEK_MS + 1])
def test_a_deadline_out_of_range_is_refused_and_drains_nothing(make_pool: MakePool, wrong: int) -> None:
    driver, _ = make_pool()
    assert driver.refused(Drain(rid=1, deadline_ms=wrong), InvalidRequest).field == "deadline_ms"
    request = driver.submit([1, 2])
    drain(driver, WEEK_MS)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2], 4)


def test_a_draining_core_still_serves_those_who_read_and_vanish() -> None:
    driver = Driver(lease_us=50_000, steps_in_flight_max=1)
    driver.add_worker(16)
    request = driver.submit([1, 2], max_tokens=6, client=5)
    driver.step()
    drain(driver, 1000)
    driver.gone(5)
    driver.attach(request, 0, client=6)
    driver.advance(50_000)
    driver.run_until_idle()
    assert list(driver.tokens_read(6, request).values()) == continuation([1, 2], 6)


def test_while_draining_preempted_requests_of_a_dead_worker_go_on(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2], max_tokens=6)
    driver.step()
    drain(driver)
    driver.turn()
    driver.lose(worker)
    driver.add_worker(16)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2], 6)
