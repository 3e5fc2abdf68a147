"""Prompts of higher priority are computed first, and those of lower priority still progress."""

from __future__ import annotations

from typing import Any

from tests.coordinator.driver import Driver, FakeWorker, continuation

LONG, SHORT = list(range(100, 228)), list(range(300, 364))


def service(**limits: Any) -> tuple[Driver, FakeWorker]:
    driver = Driver(
        **{"step_tokens_max": 32, "steps_in_flight_max": 1, "step_rows_max": 4, "blocks_per_sequence_max": 64, **limits}
    )
    return driver, driver.add_worker(64)


def counts(driver: Driver, worker: FakeWorker) -> dict[int, int]:
    """Run one step; return its tokens by request."""
    s = driver.machine.cache.sequences
    driver.turn()
    (step,) = worker.inbox
    found = {int(s.request[slot]): count for slot, count in zip(step.slots, step.counts.tolist(), strict=True)}
    driver.answer(worker)
    return found


def test_a_later_prompt_of_higher_priority_is_computed_first() -> None:
    driver, worker = service()
    batch = driver.submit(LONG, 1, priority=-50)
    assert counts(driver, worker) == {batch: 32}
    chat = driver.submit(SHORT, 1)
    for _ in range(2):
        assert counts(driver, worker) == {chat: 30, batch: 2}, "a sixteenth is kept for the other"
    driver.run_until_idle()
    assert driver.answer_of(chat) == continuation(SHORT, 1)
    assert driver.answer_of(batch) == continuation(LONG, 1)


def test_prompts_of_one_priority_share_as_before() -> None:
    driver, worker = service()
    old = driver.submit(LONG, 1, priority=-50)
    assert counts(driver, worker) == {old: 32}
    new = driver.submit(SHORT, 1, priority=-50)
    assert counts(driver, worker) == {old: 16, new: 16}
    driver.run_until_idle()


def test_a_budget_of_one_token_goes_to_the_higher() -> None:
    driver, worker = service(step_tokens_max=1)
    driver.submit(LONG[:4], 1, priority=-1)
    driver.step()
    chat = driver.submit(SHORT[:3], 1, priority=1)
    assert counts(driver, worker) == {chat: 1}
    driver.run_until_idle()
