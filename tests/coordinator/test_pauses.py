"""The next step of a batch alone is sent shortly before the end of the one in flight: its device never waits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvforge.coordinator.core.cache.pauses import LATE_US, Pauses
from kvforge.coordinator.core.deadlines import NEVER
from kvforge.protocol.messages import StepResult
from tests.coordinator.driver import Driver, continuation
from tests.coordinator.test_batches_beside import BATCH, TimedWorker, learn, service

STEP_US, PAUSE_US = 30_000, 6_000  # a step of decodes, and the pause before one that is sent with a result


class PausingWorker(TimedWorker):
    """A timed worker that reports a pause, or none."""

    idle_us = -1

    def execute(self, step: Any) -> StepResult:
        """Execute a step, and report the pause before it."""
        return msgspec.structs.replace(super().execute(step), idle_us=self.idle_us)


def batch_alone(idle_us: int = PAUSE_US, **limits: Any) -> tuple[Driver, PausingWorker, int]:
    """Return a driver, its worker, and a request of a batch that decodes alone soon after others."""
    driver, worker = service(**{"steps_in_flight_max": 2, **limits})
    worker.__class__ = PausingWorker
    assert isinstance(worker, PausingWorker)
    worker.idle_us = idle_us
    learn(driver)
    worker.idle_us = -1  # what was measured stays
    line = driver.submit([5, 6, 7], 60, priority=BATCH)
    for _ in range(3):
        driver.step()
    driver.turn()
    return driver, worker, line


def send_us(driver: Driver) -> int:
    """Return when the next step is due; NEVER: with the result."""
    return driver.machine.scheduler.pass_time()


def test_the_next_step_leaves_when_the_one_in_flight_is_about_to_end() -> None:
    driver, worker, line = batch_alone()
    (group,) = driver.machine.cache.groups.values()
    assert group.pauses.usual_us == group.pauses.lead_us == PAUSE_US
    assert driver.machine.due_us() == send_us(driver) == driver.now_us + STEP_US - PAUSE_US
    driver.advance(STEP_US - PAUSE_US - 1)
    driver.turn()
    assert len(worker.inbox) == 1
    driver.advance(1)
    driver.turn()
    assert len(worker.inbox) == 2 and send_us(driver) == NEVER, "the third follows the result of the first"
    driver.run_until_idle()
    assert driver.answer_of(line) == continuation([5, 6, 7], 60)


def test_a_request_that_comes_before_joins_the_very_next_step() -> None:
    driver, worker, line = batch_alone()
    driver.advance(STEP_US - PAUSE_US - 1)
    chat = driver.submit([20, 21], 5)
    driver.turn()
    assert [step.slots.size for step in worker.inbox] == [1, 2]
    driver.run_until_idle()
    assert driver.answer_of(chat) == continuation([20, 21], 5)
    assert driver.answer_of(line) == continuation([5, 6, 7], 60)


def test_one_that_comes_after_it_waits_for_one_step_more() -> None:
    driver, worker, line = batch_alone()
    driver.advance(STEP_US - PAUSE_US)
    driver.turn()
    chat = driver.submit([20, 21], 5)
    driver.turn()
    assert len(worker.inbox) == 2
    driver.answer(worker)
    driver.turn()
    assert worker.inbox[-1].tokens.size == 3, "two prompt tokens, and a decode of the batch beside them"
    driver.run_until_idle()
    assert driver.answer_of(chat) == continuation([20, 21], 5)
    assert driver.answer_of(line) == continuation([5, 6, 7], 60)


def test_a_result_that_comes_early_has_the_next_step_sent_at_once() -> None:
    driver, worker, line = batch_alone()
    result = worker.execute(worker.inbox.popleft())
    driver.advance(-result.duration_us + STEP_US // 2)
    driver.report(worker, result)
    driver.turn()
    assert len(worker.inbox) == 1
    driver.run_until_idle()
    assert driver.answer_of(line) == continuation([5, 6, 7], 60)


@pytest.mark.parametrize(
    ("idle_us", "steps_in_flight"), [(-1, 2), (0, 2), (STEP_US // 17, 2), (PAUSE_US, 1)],
    ids=["not measured", "no pause", "a small one", "one step in flight"],
)  # fmt: skip
def test_where_no_lead_is_worth_it_the_next_step_follows_the_result(idle_us: int, steps_in_flight: int) -> None:
    driver, worker, line = batch_alone(idle_us, steps_in_flight_max=steps_in_flight)
    assert send_us(driver) == NEVER and len(worker.inbox) == 1
    driver.advance(STEP_US)
    driver.turn()
    assert len(worker.inbox) == 1
    driver.run_until_idle()
    assert driver.answer_of(line) == continuation([5, 6, 7], 60)


def test_a_lead_grows_by_much_with_a_late_step_and_shrinks_by_little_with_others() -> None:
    pauses = Pauses()
    pauses.add(2000, 8000, with_result=True, in_time=False)
    assert (pauses.usual_us, pauses.lead(8000)) == (2000, 2000)
    pauses.add(LATE_US + 1, 8000, with_result=False, in_time=True)
    assert pauses.lead(8000) == 2250
    for _ in range(7):
        pauses.add(0, 8000, with_result=False, in_time=True)
    assert 2000 < pauses.lead(8000) < 2050
    for _ in range(100):
        pauses.add(5000, 8000, with_result=False, in_time=True)
    assert pauses.lead(8000) == 4000, "half a step at most"
    assert pauses.lead(5000) == 2500
    assert pauses.lead(2000 * 16 + 1) == 0, "a pause of less than a sixteenth is not worth it"
    assert pauses.total_us == 2000 + LATE_US + 1 + 100 * 5000


def test_a_pause_that_is_an_exception_counts_as_four_usual_ones() -> None:
    pauses = Pauses()
    pauses.add(2000, 8000, with_result=True, in_time=False)
    pauses.add(1 << 60, 8000, with_result=True, in_time=False)
    assert pauses.usual_us == 2000 + 6000 // 8
    pauses.add(0, -1, with_result=True, in_time=True)
    assert pauses.lead(0) == 0
