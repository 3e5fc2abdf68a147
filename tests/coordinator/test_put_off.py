"""Rows that a worker defers are computed later; the other rows continue meanwhile."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvforge.protocol.errors import WorkerError
from kvforge.protocol.messages import ErrorInfo, Grammar, RowError, SamplingParams, StepResult
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import FakeWorker, continuation

SHAPED = SamplingParams(temperature=0.0, grammar=Grammar(kind="regex", text="a+"))
AGAIN_MS = 40


def put_off(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, *slots: int) -> set[int]:
    """Return a set of slots; the worker defers their rows until the test removes them."""
    waiting = set(slots)
    execute = worker.execute

    def executed(step: object) -> StepResult:
        result = execute(step)  # type: ignore[arg-type]
        kept = ~np.isin(result.slots, list(waiting))
        late = [slot for slot in result.slots.tolist() if slot in waiting]
        for slot in late:
            worker.last_token.pop(slot)
        error = ErrorInfo.of(WorkerError("the grammar is being tried"))
        return msgspec.structs.replace(
            result,
            slots=result.slots[kept],
            tokens=result.tokens[kept],
            logprobs=result.logprobs[kept],
            errors=(*result.errors, *(RowError(slot, error, AGAIN_MS) for slot in late)),
        )

    monkeypatch.setattr(worker, "execute", executed)
    return waiting


def test_a_row_that_is_put_off_waits_and_the_others_go_on(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker = make_pool()
    shaped = driver.submit(range(1, 40), max_tokens=3, sampling=SHAPED)
    driver.turn()
    waiting = put_off(worker, monkeypatch, 0)
    other = driver.submit([7, 8, 9], max_tokens=20)
    while not driver.nothing_due() and driver.request(other).state != "finished":
        driver.step()
    assert driver.answer_of(other) == continuation([7, 8, 9], 20)
    request = driver.request(shaped)
    assert (request.state, request.preemptions) == ("preempted", 0)
    assert any("tries its grammar" in sentence for sentence in driver.explain(request_id=shaped).sentences)
    waiting.clear()
    driver.advance(1000 * AGAIN_MS)
    driver.run_until_idle()
    assert driver.answer_of(shaped) == continuation(list(range(1, 40)), 3)
    assert driver.request(shaped).state == "finished"


def test_a_row_that_is_put_off_again_and_again_computes_its_last_block_alone(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, worker = make_pool()
    shaped = driver.submit(range(1, 60), max_tokens=2, sampling=SHAPED)
    driver.turn()
    put_off(worker, monkeypatch, *range(8))
    counts = []
    for _ in range(3):
        driver.step()
        due = driver.wake_us()
        assert due is not None and due == 1000 * AGAIN_MS
        worker.steps.clear()
        driver.advance(1000 * AGAIN_MS)
        driver.turn()
        counts.append(sum(int(step.counts.sum()) for step in worker.steps))
    assert max(counts) <= driver.machine.limits.cache.block_size
    driver.cancel(shaped)
    driver.run_until_idle()
    assert driver.request(shaped).state == "cancelled" and driver.free_or_cached() == 16


def test_a_deadline_ends_a_request_that_is_put_off_for_ever(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, worker = make_pool()
    shaped = driver.submit([1, 2, 3], max_tokens=2, sampling=SHAPED, deadline_ms=300)
    driver.turn()
    put_off(worker, monkeypatch, *range(8))
    for _ in range(20):
        driver.step()
        driver.advance(1000 * AGAIN_MS)
    driver.run_until_idle()
    assert driver.request(shaped).state == "expired"
