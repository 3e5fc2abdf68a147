"""Operator's log: one entry per finished request and per incident of a worker.

The driver checks after every event of every test that each end is reported once.
"""

from __future__ import annotations

from typing import Any

from kvforge.coordinator.core.events import Log
from kvforge.protocol.errors import GpuError
from kvforge.protocol.messages import ErrorInfo, WorkerFailed
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver

# The complete list: counts, names and times. A new field must not hold a token of a prompt or an answer.
END_FIELDS = {
    "id",
    "tenant",
    "reason",
    "tokens",
    "prompt_tokens",
    "cached_tokens",
    "worker",
    "queue_ms",
    "first_token_ms",
    "total_ms",
}


def ends(driver: Driver) -> list[dict[str, Any]]:
    return [log.fields for log in driver.logs if log.event == "request_ended"]


def of_workers(driver: Driver) -> list[tuple[str, str]]:
    return [(log.level, log.event) for log in driver.logs if log.event.startswith("worker_")]


def test_an_end_is_told_with_counts_and_times(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=2, tenant="a")
    driver.advance(5_000)
    driver.run_until_idle()
    (fields,) = ends(driver)
    assert set(fields) == END_FIELDS
    assert (fields["id"], fields["tenant"], fields["reason"], fields["tokens"]) == (request, "a", "length", 2)
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["worker"]) == (3, 0, worker.name)
    assert fields["queue_ms"] == 5.0
    assert 5.0 <= fields["first_token_ms"] <= fields["total_ms"]


def test_what_never_happened_to_a_request_has_no_time(driver: Driver) -> None:
    driver.cancel(driver.submit([1, 2, 3]))
    (fields,) = ends(driver)
    assert (fields["reason"], fields["worker"], fields["queue_ms"], fields["first_token_ms"]) == (
        ("cancelled", None, None, None)
    )
    assert fields["total_ms"] == 0.0


def test_a_failure_names_its_error_and_not_what_it_says(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    driver.submit([1, 2, 3], deadline_ms=1)
    driver.advance(2_000)
    driver.turn()
    (fields,) = ends(driver)
    assert (fields["reason"], fields["error"]) == ("expired", "deadline_exceeded")
    assert set(fields) == END_FIELDS | {"error"}


def test_what_befalls_a_worker_is_told_once(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    assert of_workers(driver) == [("info", "worker_connected"), ("info", "worker_ready")]
    ready = next(log for log in driver.logs if log.event == "worker_ready")
    assert ready.fields == {"worker": worker.name, "blocks": 16, "model": "m", "device": "cpu"}
    driver.logs.clear()
    driver.submit([1])
    driver.turn()
    driver.report(worker, WorkerFailed(ErrorInfo.of(GpuError("the device is lost"))))
    assert of_workers(driver) == [("error", "worker_failed"), ("warning", "worker_lost")]
    assert driver.logs[-1] == Log("warning", "worker lost", "worker_lost", {"worker": worker.name, "running": 1})
