"""What a request waits for: when that comes, it goes on."""

from __future__ import annotations

from tests.coordinator.conftest import MakePool


def test_a_request_starts_when_the_step_is_over_that_kept_an_idle_sequence_from_being_evicted(
    make_pool: MakePool,
) -> None:
    driver, worker = make_pool(8, steps_in_flight_max=1)
    sequence = driver.create(range(1, 8))
    other = driver.submit([1], max_tokens=20)
    cancelled = driver.submit(sequence_id=sequence, max_tokens=10)
    driver.turn()
    assert len(worker.inbox) == 1
    driver.cancel(cancelled)  # nothing of it comes back: its token would have gone into a block that it has
    waiting = driver.submit(range(100, 117), max_tokens=1)
    driver.turn()
    assert driver.request(waiting).state == "pending", "a step still reads the sequence that must make room"
    free = driver.free()
    driver.answer(worker)
    assert driver.free() == free
    driver.turn()
    assert (driver.request(waiting).state, driver.request(other).state) == ("running", "running")
