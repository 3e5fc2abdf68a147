"""Requests of batches, which have the lowest priority, beside others: they leave rows, and stretch steps by little."""

from __future__ import annotations

from typing import Any

import pytest

from kvforge.protocol.messages import StepResult
from tests.coordinator.driver import Driver, FakeWorker, continuation

BATCH = -100
LONG = list(range(100, 228))  # 128 tokens
TOKEN_US, FIXED_US = 100, 20_000  # of a step: 100 prompt tokens are half of what a decode step takes


class TimedWorker(FakeWorker):
    """A worker with steps of a fixed time and a time for each prompt token."""

    def execute(self, step: Any) -> StepResult:
        """Execute a step, and report what it takes."""
        result = super().execute(step)
        prefill = sum(count for count in step.counts.tolist() if count > 1)
        fields = {name: getattr(result, name) for name in result.__struct_fields__ if name != "duration_us"}
        return StepResult(**fields, duration_us=FIXED_US + TOKEN_US * prefill)


class TimedDriver(Driver):
    """A driver with such workers; each step moves its clock."""

    worker_type = TimedWorker

    def report(self, worker: FakeWorker, result: Any) -> Any:
        """Deliver a result after its time."""
        self.advance(getattr(result, "duration_us", 0))
        return super().report(worker, result)


def service(**limits: Any) -> tuple[Driver, FakeWorker]:
    given = {"step_tokens_max": 512, "step_rows_max": 16, "blocks_per_sequence_max": 128, "blocks_max": 1024, **limits}
    driver = TimedDriver(**{"sequences_max": 64, **given})
    return driver, driver.add_worker(1024)


def learn(driver: Driver, **fields: Any) -> None:
    """Run two requests, after which the costs of steps are known."""
    for first, count in ((400, 128), (600, 64)):
        driver.submit(list(range(first, first + count)), 20, **fields)
        driver.run_until_idle()


def chunks(driver: Driver, worker: FakeWorker, request: int, steps: int) -> list[int]:
    """Run so many steps; return the tokens of the request in each."""
    s, found = driver.machine.cache.sequences, []
    for _ in range(steps):
        driver.turn()
        step = worker.inbox[0]
        mine = [n for slot, n in zip(step.slots, step.counts.tolist(), strict=True) if int(s.request[slot]) == request]
        found.append(sum(mine))
        driver.answer(worker)
    return found


def test_beside_a_decode_a_prompt_of_a_batch_stretches_a_step_by_a_tenth() -> None:
    driver, worker = service(steps_in_flight_max=1)
    learn(driver)
    chat = driver.submit([1, 2, 3, 4], 30)
    driver.step()
    driver.step()
    batch = driver.submit(LONG, 2, priority=BATCH)
    found = chunks(driver, worker, batch, 4)
    assert all(16 <= count <= 24 for count in found), found
    driver.run_until_idle()
    assert driver.answer_of(chat) == continuation([1, 2, 3, 4], 30)
    assert driver.answer_of(batch) == continuation(LONG, 2)


def test_another_prompt_beside_a_decode_is_not_bounded_so() -> None:
    driver, worker = service(steps_in_flight_max=1)
    learn(driver)
    driver.submit([1, 2, 3, 4], 30)
    driver.step()
    driver.step()
    other = driver.submit(LONG, 2, priority=-99)
    assert chunks(driver, worker, other, 1) == [128]
    driver.run_until_idle()


def test_a_batch_alone_has_whole_steps() -> None:
    driver, worker = service(steps_in_flight_max=1)
    learn(driver, priority=BATCH)
    batch = driver.submit([7, *LONG], 2, priority=BATCH)
    assert chunks(driver, worker, batch, 1) == [129]
    driver.run_until_idle()


def test_soon_after_another_request_its_steps_are_short_and_one_at_a_time() -> None:
    driver, worker = service(steps_in_flight_max=2)
    learn(driver)
    batch = driver.submit([7, *LONG], 8, priority=BATCH)
    driver.turn()
    assert len(worker.inbox) == 1
    assert 60 <= worker.inbox[0].counts.sum() <= 110, "half as long again as a step without prompt tokens"
    driver.run_until_idle()
    assert driver.answer_of(batch) == continuation([7, *LONG], 8)


def test_a_while_after_it_they_are_long_again() -> None:
    driver, worker = service(steps_in_flight_max=2)
    learn(driver)
    driver.advance(30_000_000)
    batch = driver.submit([7, *LONG, *LONG], 8, priority=BATCH)
    driver.turn()
    assert worker.inbox[0].counts.sum() == 257 and len(worker.inbox) == 2
    driver.run_until_idle()
    assert driver.answer_of(batch) == continuation([7, *LONG, *LONG], 8)


@pytest.mark.parametrize(("priority", "running"), [(BATCH, 15), (-99, 16), (0, 16)])
def test_batches_leave_a_sixteenth_of_the_rows(priority: int, running: int) -> None:
    driver, _ = service()
    requests = [driver.submit([at, 2, 3], 6, priority=priority) for at in range(1, 21)]
    driver.turn()
    (group,) = driver.machine.cache.groups.values()
    assert group.running == running
    chat = driver.submit([50, 51], 3)
    driver.turn()
    assert (driver.request(chat).state == "running") == (running == 15)
    driver.run_until_idle()
    for at, request in enumerate(requests, 1):
        assert driver.answer_of(request) == continuation([at, 2, 3], 6)


@pytest.mark.parametrize(("rows", "running"), [(4, 3), (3, 3), (1, 1)])
def test_few_rows_leave_one_and_fewer_none(rows: int, running: int) -> None:
    driver, _ = service(step_rows_max=rows)
    for at in range(6):
        driver.submit([at, 2, 3], 6, priority=BATCH)
    driver.turn()
    (group,) = driver.machine.cache.groups.values()
    assert group.running == running
    driver.run_until_idle()
