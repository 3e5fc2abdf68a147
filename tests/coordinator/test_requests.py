"""Requests: their states, the steps that serve them, preemption, and faulty or crashed workers."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.events import DropWorker, FromWorker, Log, ToWorker
from kvforge.coordinator.core.limits import Bounds, Quota
from kvforge.coordinator.core.requests.request import PENDING, TERMINAL, TRANSITIONS, Request
from kvforge.coordinator.core.requests.table import RequestTable
from kvforge.protocol.errors import (
    AlreadyFinished,
    Draining,
    GpuError,
    InvalidRequest,
    InvalidTransition,
    KvforgeError,
    QueueFull,
    QuotaExceeded,
    RequestNotFound,
    SequenceBusy,
)
from kvforge.protocol.messages import (
    Cancel,
    Drain,
    ErrorInfo,
    GetHealth,
    GetRequest,
    ListRequests,
    PurgeFinished,
    RowError,
    SamplingParams,
    StepResult,
    Submit,
    WorkerFailed,
    WorkerHello,
)
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import GREEDY, Driver, FakeWorker, continuation, int32, model_info
from tools.simulation.digest import digest
from tools.simulation.limits import make_limits

STATES = ("pending", "running", "preempted", *TERMINAL)
EVENTS = ("schedule", "preempt", "finish", "fail", "cancel", "expire")


def new_request(state: str = PENDING) -> Request:
    """A request in a given state."""
    request = Request(3, 1, 1, "t", int32([1]), Submit(rid=1, max_tokens=4, sampling=GREEDY), 1, 0, 0, 1 << 40)
    request.state = state
    return request


def levels(driver: Driver) -> list[str]:
    """Texts of the warnings so far."""
    return [log.text for log in driver.logs if log.level == "warning"]


# ---------------------------------------------------------------------------------------------- the transition table


# behaviour 25
@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_every_transition_comes_from_the_table_and_any_other_is_an_error(state: str, event: str) -> None:
    request = new_request(state)
    target = TRANSITIONS.get((state, event))
    if target is not None:
        request.move(event)
        assert request.state == target
        return
    before = digest(request)
    with pytest.raises(AlreadyFinished if state in TERMINAL else InvalidTransition) as caught:
        request.move(event)
    assert (caught.value.request_id, caught.value.state) == (3, state)
    assert digest(request) == before


# behaviour 25
def test_a_terminal_state_has_no_way_out_and_every_state_can_be_reached() -> None:
    assert not [state for state, _ in TRANSITIONS if state in TERMINAL]
    assert {PENDING, *TRANSITIONS.values()} == set(STATES)
    assert {event for _, event in TRANSITIONS} == set(EVENTS)


# behaviour 25
def test_ids_are_unique_and_a_new_request_is_pending(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    ids = [driver.submit([1, 2], max_tokens=2) for _ in range(5)]
    assert ids == [1, 2, 3, 4, 5]
    assert {driver.request(i).state for i in ids} == {"pending"}
    driver.turn()
    assert {driver.request(i).state for i in ids} == {"running"}
    driver.run_until_idle()
    assert {driver.request(i).state for i in ids} == {"finished"}


# ------------------------------------------------------------------------------------------------------- finishing


# behaviour 26
def test_a_request_ends_by_length_at_max_tokens(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=5)
    driver.run_until_idle()
    info = driver.request(request)
    assert (info.state, info.reason, info.generated_tokens) == ("finished", "length", 5)
    assert driver.answer_of(request) == driver.streamed[request] == continuation([1, 2, 3], 5)
    assert driver.ended[request].generated_tokens == 5


# behaviours 26 and 32: the step after the stop was already in flight; only its token is discarded
def test_a_stop_token_is_the_last_one_though_it_is_discovered_a_step_late(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    expected = continuation([1, 2, 3], 8)
    request = driver.submit(
        [1, 2, 3], max_tokens=8, sampling=SamplingParams(temperature=0.0, stop_tokens=(expected[2],))
    )
    other = driver.submit([4, 5, 6], max_tokens=8)
    driver.run_until_idle()
    info = driver.request(request)
    assert (info.reason, info.generated_tokens) == ("stop", 3)
    assert driver.answer_of(request) == driver.streamed[request] == expected[:3]
    assert driver.answer_of(other) == continuation([4, 5, 6], 8)
    assert sum(int(step.samples.sum()) for step in worker.steps) == 3 + 1 + 8
    assert driver.stats().requests.generated_tokens_total == 11
    assert driver.free_or_cached() == 16


# behaviour 26
@pytest.mark.parametrize(("ignore_eos", "reason", "count"), [(False, "stop", 2), (True, "length", 6)])
def test_the_models_own_end_token_stops_unless_it_is_ignored(ignore_eos: bool, reason: str, count: int) -> None:
    expected = continuation([1, 2, 3], 6)
    driver = Driver()
    driver.add_worker(16, model=model_info(eos=(expected[1],)))
    sampling = SamplingParams(temperature=0.0, ignore_eos=ignore_eos)
    request = driver.submit([1, 2, 3], max_tokens=6, sampling=sampling)
    driver.run_until_idle()
    assert driver.request(request).reason == reason
    assert driver.answer_of(request) == expected[:count]


def test_a_request_that_does_not_stream_gets_its_tokens_at_the_end(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=6, stream=False)
    for _ in range(3):
        driver.step()
    assert driver.request(request).generated_tokens > 0
    assert request not in driver.streamed
    driver.run_until_idle()
    assert driver.streamed[request] == continuation([1, 2, 3], 6)


def test_timings_are_since_submission(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=1)
    assert driver.request(request).timings.first_scheduled_us == -1
    driver.advance(5)
    driver.turn()
    driver.advance(20)
    driver.answer(worker)
    timings = driver.request(request).timings
    assert (timings.first_scheduled_us, timings.first_token_us, timings.ended_us) == (5, 25, 25)
    waiting = driver.submit([1, 2], max_tokens=1)
    listed = {row.request_id: (row.first_token_us, row.ended_us) for row in driver.ask(ListRequests(rid=1)).requests}
    assert listed == {request: (25, 25), waiting: (-1, -1)}


# ------------------------------------------------------------------------------------------------------- admission


# behaviour 27
def test_a_full_queue_refuses_with_a_retry_hint(driver: Driver) -> None:
    driver = Driver(queue_max=2)
    driver.submit([1])
    driver.submit([1])
    error = driver.refused(driver.submit_message([1]), QueueFull)
    assert (error.limit, error.retry_after_ms) == (2, 1000)
    assert driver.stats().requests.refused_total == 1
    driver.cancel(1)
    assert driver.submit([1]) == 3


# behaviour 27
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [1, 1000]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": range(64)}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 62}),
        ("tenant", {"tenant": ""}),
        ("tenant", {"tenant": "a\0"}),
        ("tenant", {"tenant": "x" * 129}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=-0.1)}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=100.5)}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=float("nan"))}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=float("inf"))}),
        ("sampling.seed", {"sampling": SamplingParams(seed=-1)}),
        ("sampling.seed", {"sampling": SamplingParams(seed=1 << 64)}),
        ("sampling.stop_tokens", {"sampling": SamplingParams(stop_tokens=(-1,))}),
        ("sampling.stop_tokens", {"sampling": SamplingParams(stop_tokens=(3, 1000))}),
        ("sampling.stop_tokens", {"sampling": SamplingParams(stop_tokens=tuple(range(17)))}),
    ],
)
def test_what_can_never_be_served_is_refused_at_the_door(make_pool: MakePool, field: str, change: Any) -> None:
    driver, _ = make_pool()
    fields = {"prompt": [1, 2, 3], "max_tokens": 2, **change}
    assert driver.refused(driver.submit_message(**fields), InvalidRequest).field == field
    assert driver.stats().requests.refused_total == 1
    assert driver.stats().requests.accepted_total == 0


# behaviour 27
def test_a_request_above_its_tenants_ceiling_is_refused_at_the_door() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=2)})
    driver.add_worker(16)
    error = driver.refused(driver.submit_message(range(8), 1, tenant="a"), QuotaExceeded)
    assert (error.tenant, error.needed, error.ceiling) == ("a", 3, 2)
    assert driver.submit(range(7), 1, tenant="a")


def test_a_sequence_that_is_refused_more_is_not_appended_to(make_pool: MakePool) -> None:
    driver, _ = make_pool(policy="none", queue_max=1)
    sequence = driver.create(range(60))
    driver.refused(driver.submit_message([1, 2], 4, sequence_id=sequence), InvalidRequest)
    driver.submit([1])
    driver.refused(driver.submit_message([1], 1, sequence_id=sequence), QueueFull)
    assert driver.info(sequence).length == 60


def test_requests_that_came_before_the_model_are_held_to_its_limits_when_it_comes(driver: Driver) -> None:
    good = driver.submit([1, 2], max_tokens=2)
    bad_token = driver.submit([1, 5000], max_tokens=2)
    too_long = driver.submit([1] * 30, max_tokens=30)
    driver.add_worker(8)
    driver.run_until_idle()
    assert [driver.request(i).state for i in (good, bad_token, too_long)] == ["finished", "failed", "failed"]
    assert driver.request(bad_token).error.code == "invalid_request"
    assert driver.ended[too_long].error.fields["field"] == "max_tokens"


def test_a_draining_coordinator_admits_nothing_and_finishes_what_runs(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    request = driver.submit([1, 2], max_tokens=3)
    driver.ask(Drain(rid=1))
    driver.refused(driver.submit_message([1]), Draining)
    health = driver.ask(GetHealth(rid=1))
    assert (health.live, health.ready, health.draining) == (True, False, True)
    driver.run_until_idle()
    assert driver.request(request).state == "finished"


# ------------------------------------------------------------------------------------------------------------- cancel


# behaviours 28 and 29
@pytest.mark.parametrize("when", ["pending", "in flight", "streaming", "two in flight"])
def test_a_cancelled_request_gives_everything_back_and_cancelling_again_is_the_same_answer(
    make_pool: MakePool, when: str
) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=8)
    if when != "pending":
        driver.turn()
    if when == "streaming":
        driver.answer(worker)
        driver.answer(worker)
        driver.turn()
        assert len(driver.streamed[request]) == 2
    driver.cancel(request)
    driver.cancel(request)
    driver.run_until_idle()
    assert driver.request(request).state == "cancelled"
    assert driver.ended[request].reason == "cancelled"
    assert driver.free_or_cached() == 16
    assert driver.stats().sequences == 0
    assert driver.answer_of(request) == continuation([1, 2, 3, 4, 5], 8)[: 2 if when == "streaming" else 0]


# behaviour 28
def test_cancelling_after_the_end_or_an_unknown_request_is_an_error(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    request = driver.submit([1], max_tokens=1)
    driver.run_until_idle()
    error = driver.refused(Cancel(rid=1, request_id=request), AlreadyFinished)
    assert (error.request_id, error.state) == (request, "finished")
    assert driver.refused(Cancel(rid=1, request_id=99), RequestNotFound).request_id == 99


# behaviours 20 and 28
def test_a_preempted_request_can_be_cancelled(make_pool: MakePool) -> None:
    driver, preempted, _ = preempt_one(make_pool)
    driver.cancel(preempted)
    assert driver.request(preempted).state == "cancelled"
    driver.run_until_idle()
    assert driver.free_or_cached() == 5
    tokens = driver.answer_of(preempted)
    assert tokens == continuation([4, 5, 6, 7], 8)[: len(tokens)] == driver.streamed.get(preempted, [])


# behaviour 29
def test_a_client_that_dies_takes_its_requests_and_sequences_with_it(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    mine = [driver.submit([i, 2, 3], max_tokens=8, client=5) for i in range(3)]
    other = driver.submit([1, 2, 3], max_tokens=8, client=6)
    sequence = driver.create([1, 2, 3], client=5)
    driver.submit(sequence_id=sequence, max_tokens=8, client=5)
    driver.step()
    driver.turn()
    driver.gone(5)
    driver.run_until_idle()
    assert [driver.request(i).state for i in mine] == ["cancelled"] * 3
    assert driver.request(other).state == "finished"
    assert driver.stats().sequences == 0
    assert driver.free_or_cached() == 16


# behaviour 29
def test_a_thousand_requests_leave_nothing_behind() -> None:
    driver = Driver(finished_max=10)
    driver.add_worker(24)
    for i in range(1000):
        driver.submit([i % 50, i % 3, 7], max_tokens=1 + i % 4, tenant="abc"[i % 3])
        if i % 20 == 19:
            driver.run_until_idle()
    stats = driver.stats()
    assert (stats.sequences, stats.requests.finished_total, stats.requests.running) == (0, 1000, 0)
    assert stats.pools[0].free + stats.pools[0].cached == 24
    assert (stats.pools[0].referenced, stats.pools[0].quarantined) == (0, 0)
    assert len(driver.machine.requests.finished) == 10
    assert not driver.machine.requests.live


# --------------------------------------------------------------------------------------------------- finished requests


# behaviour 30
def test_finished_requests_are_purged_by_age_and_on_demand(make_pool: MakePool) -> None:
    driver, _ = make_pool(finished_ttl_us=1000_000)
    old = driver.submit([1], max_tokens=1)
    driver.run_until_idle()
    driver.advance(600_000)
    new = driver.submit([1], max_tokens=1)
    driver.run_until_idle()
    assert driver.ask(PurgeFinished(rid=1, older_than_ms=601)).count == 0
    driver.advance(399_999)
    driver.turn()
    assert driver.request(old).state == "finished"
    driver.advance(1)
    driver.turn()
    driver.refused(GetRequest(rid=1, request_id=old), RequestNotFound)
    assert driver.ask(PurgeFinished(rid=1, older_than_ms=0)).count == 1
    driver.refused(GetRequest(rid=1, request_id=new), RequestNotFound)
    assert driver.refused(PurgeFinished(rid=1, older_than_ms=-1), InvalidRequest).field == "older_than_ms"


# behaviour 30
def test_the_table_of_finished_requests_keeps_the_newest() -> None:
    clock = Clock()
    table = RequestTable(clock, Bounds(finished_max=3), Tenants(make_limits()))
    for i in range(1, 6):
        request = Request(i, 1, 1, "t", int32([1]), Submit(rid=1, max_tokens=1, sampling=GREEDY), 1, 0, 0, 1 << 40)
        table.add(request)
        request.move("cancel")
        request.reason = "cancelled"
        clock.now_us = i
        table.retire(request)
        table.check_invariants()
    assert list(table.finished) == [3, 4, 5]
    clock.now_us = 10
    assert table.purge(6) == 2
    assert list(table.finished) == [5]


def test_requests_are_listed_newest_first_within_a_bound(make_pool: MakePool) -> None:
    driver, _ = make_pool(list_max=3)
    for i in range(5):
        driver.submit([1, 2, 3][: 1 + i % 3], max_tokens=1 + i)
    driver.run_until_idle()
    reply = driver.ask(ListRequests(rid=1, count_max=3))
    assert [row.request_id for row in reply.requests] == [5, 4, 3]
    assert [row.generated_tokens for row in reply.requests] == [5, 4, 3]
    assert reply.total == 5
    for count in (0, 4):
        assert driver.refused(ListRequests(rid=1, count_max=count), InvalidRequest).field == "count_max"


# ----------------------------------------------------------------------------------------------------------- batching


# behaviour 31
def test_a_finished_slot_is_filled_in_the_next_step(make_pool: MakePool) -> None:
    driver, worker = make_pool(step_rows_max=2, steps_in_flight_max=1)
    first = driver.submit([1], max_tokens=1)
    driver.submit([2], max_tokens=4)
    third = driver.submit([3], max_tokens=4)
    driver.turn()
    assert driver.request(third).state == "pending"
    driver.answer(worker)
    assert driver.request(first).state == "finished"
    driver.turn()
    assert driver.request(third).state == "running"
    assert worker.steps[-1].slots.size == 2
    assert len(worker.steps[-1].begins) == 1
    assert worker.steps[-1].begins[0].request_id == third


# behaviour 31: take() checks each step against the limits in rows and tokens
@pytest.mark.parametrize(("rows", "tokens", "in_flight"), [(1, 1, 1), (2, 3, 2), (3, 16, 2), (8, 5, 3)])
def test_a_batch_never_exceeds_its_limits_and_everyone_is_served(rows: int, tokens: int, in_flight: int) -> None:
    driver = Driver(step_rows_max=rows, step_tokens_max=tokens, steps_in_flight_max=in_flight)
    worker = driver.add_worker(32)
    prompts = [[i, *range(i * 3)] for i in range(10)]
    requests = [driver.submit(prompt, max_tokens=3 + i % 3) for i, prompt in enumerate(prompts)]
    driver.run_until_idle()
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert driver.answer_of(request) == continuation(prompt, 3 + i % 3)
    assert max(step.tokens.size for step in worker.steps) == tokens
    assert max(step.slots.size for step in worker.steps) > 1 or rows == 1


# behaviour 31
def test_a_long_prompt_is_computed_in_chunks_while_others_decode(make_pool: MakePool) -> None:
    driver, worker = make_pool(32, step_tokens_max=8, steps_in_flight_max=1)
    short = driver.submit([1, 2], max_tokens=12)
    driver.step()
    long = driver.submit(range(40), max_tokens=2)
    late = driver.submit([3, 4], max_tokens=2)
    generated = []
    while driver.request(long).generated_tokens == 0:
        driver.step()
        generated.append(driver.request(short).generated_tokens)
    assert generated == list(range(2, 2 + len(generated)))  # a token in every step
    chunks = [step.counts.max() for step in worker.steps[1 : 1 + len(generated)]]
    # The decode leaves 7 of the budget of 8. The later, short prompt takes 2, then its decode takes 1.
    assert chunks == [5, 6, 7, 7, 7, 7, 1]
    driver.run_until_idle()
    assert driver.answer_of(short) == continuation([1, 2], 12)
    assert driver.answer_of(long) == continuation(range(40), 2)
    assert driver.answer_of(late) == continuation([3, 4], 2)


# behaviour 31
def test_short_requests_do_not_starve_a_long_prompt(make_pool: MakePool) -> None:
    driver, _ = make_pool(48, step_tokens_max=8)
    long = driver.submit(range(40), max_tokens=2)
    for i in range(30):
        driver.submit([i], max_tokens=2)
        driver.step()
        if driver.request(long).generated_tokens:
            break
    assert i <= 8
    driver.run_until_idle()
    assert driver.answer_of(long) == continuation(range(40), 2)


# behaviour 33
def test_decoding_goes_on_with_an_empty_queue_and_a_request_in_mid_step_joins_the_next_one(make_pool: MakePool) -> None:
    driver, worker = make_pool(steps_in_flight_max=1)
    first = driver.submit([1, 2, 3], max_tokens=6)
    driver.turn()
    second = driver.submit([4, 5], max_tokens=2)
    driver.turn()
    assert len(worker.steps) == 1
    driver.answer(worker)
    driver.turn()
    assert sorted(worker.steps[1].counts.tolist()) == [1, 2]
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation([1, 2, 3], 6)
    assert driver.answer_of(second) == continuation([4, 5], 2)
    assert len(worker.steps) == 6


def test_with_two_steps_in_flight_the_second_is_fed_the_token_that_stays_on_the_device(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=4)
    driver.turn()
    assert [step.tokens.tolist() for step in worker.steps] == [[1, 2, 3], [-1]]
    assert [step.starts.tolist() for step in worker.steps] == [[0], [3]]
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 4)
    assert len(worker.steps) == 4


# behaviour 34 (without a deadline the request waits)
def test_without_a_worker_requests_wait_and_the_core_is_not_ready(driver: Driver) -> None:
    request = driver.submit([1, 2, 3], max_tokens=2)
    driver.turn()
    health = driver.ask(GetHealth(rid=1))
    assert (health.live, health.ready, health.workers) == (True, False, ())
    assert "no worker has connected" in health.reason and "start one with" in health.reason
    assert driver.request(request).state == "pending"
    worker = FakeWorker(driver.machine, 9, "w", 4, model_info())
    driver.workers.append(worker)
    driver.report(worker, WorkerHello(rid=1, name="w", pid=1))
    assert "loading" in driver.ask(GetHealth(rid=1)).reason
    driver.report(worker, driver.ready(worker))
    assert driver.ask(GetHealth(rid=1)).ready
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 2)


# --------------------------------------------------------------------------------------------------------- preemption


def preempt_one(make_pool: MakePool, **fields: Any) -> tuple[Driver, int, int]:
    """Two requests that fit at first, but not to their ends: (driver, preempted request, other request)."""
    driver, _ = make_pool(5)
    first = driver.submit([1, 2, 3], max_tokens=13)
    second = driver.submit([4, 5, 6, 7], max_tokens=8, **fields)
    for _ in range(40):
        driver.step()
        if driver.request(second).state == "preempted":
            return driver, second, first
    raise AssertionError("no request was preempted")


def test_the_younger_request_gives_way_and_both_end_with_the_right_tokens(make_pool: MakePool) -> None:
    driver, preempted, other = preempt_one(make_pool)
    assert driver.request(other).state == "running"
    before = driver.answer_of(preempted)
    assert before
    driver.run_until_idle()
    assert driver.answer_of(preempted) == continuation([4, 5, 6, 7], 8)
    assert driver.answer_of(other) == continuation([1, 2, 3], 13)
    assert driver.machine.requests.preemptions_total >= 1
    assert driver.stats().requests.recomputed_tokens_total > 0
    assert driver.streamed[preempted][: len(before)] == before


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("blocks", [4, 5, 7, 10])
def test_in_a_pool_too_small_for_all_every_request_ends_with_the_right_tokens(blocks: int, in_flight: int) -> None:
    driver = Driver(steps_in_flight_max=in_flight)
    driver.add_worker(blocks)
    prompts = [[i % 4, 1, i % 3, *range(i % 5)] for i in range(12)]
    requests = [driver.submit(prompt, max_tokens=8) for prompt in prompts]
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in requests] == [continuation(prompt, 8) for prompt in prompts]
    assert driver.free_or_cached() == blocks


@pytest.mark.parametrize("blocks", [4, 6, 9])
def test_client_sequences_in_a_pool_too_small_for_all_resume_and_end_right(blocks: int) -> None:
    driver = Driver()
    driver.add_worker(blocks)
    prompts = [[i, 1, 2, 3, 4] for i in range(6)]
    sequences = [driver.create(prompt) for prompt in prompts]
    requests = [driver.submit(sequence_id=sequence, max_tokens=8) for sequence in sequences]
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in requests] == [continuation(prompt, 8) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert driver.tokens(sequence) == prompt + continuation(prompt, 8)
    driver.remove(*sequences)
    assert driver.free_or_cached() == blocks


def preempt_sequence(make_pool: MakePool) -> tuple[Driver, int, int, int]:
    """A client sequence with a preempted request: (driver, sequence, its request, the other request)."""
    driver, _ = make_pool(5)
    first = driver.submit([1, 2, 3], max_tokens=13)
    sequence = driver.create([4, 5, 6, 7])
    second = driver.submit(sequence_id=sequence, max_tokens=8)
    for _ in range(40):
        driver.step()
        if driver.request(second).state == "preempted":
            return driver, sequence, second, first
    raise AssertionError("no request was preempted")


def test_a_preempted_request_of_a_client_sequence_resumes(make_pool: MakePool) -> None:
    driver, sequence, request, other = preempt_sequence(make_pool)
    assert not driver.info(sequence).resident
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([4, 5, 6, 7], 8)
    assert driver.tokens(sequence) == [4, 5, 6, 7, *continuation([4, 5, 6, 7], 8)]
    assert driver.answer_of(other) == continuation([1, 2, 3], 13)


# behaviour 20
def test_a_client_sequence_is_busy_while_its_request_is_preempted(make_pool: MakePool) -> None:
    driver, sequence, request, _ = preempt_sequence(make_pool)
    assert driver.info(sequence).request_id == request
    driver.refused(driver.append_message((sequence, [9])), SequenceBusy)
    driver.refused(driver.submit_message([9], sequence_id=sequence), SequenceBusy)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([4, 5, 6, 7], 8)


# behaviours 20 and 28
def test_removing_a_client_sequence_cancels_its_preempted_request(make_pool: MakePool) -> None:
    driver, sequence, request, other = preempt_sequence(make_pool)
    driver.remove(sequence)
    assert driver.request(request).state == "cancelled"
    driver.run_until_idle()
    assert driver.request(other).state == "finished"
    assert driver.free_or_cached() == 5


# behaviour 24
def test_a_client_sequence_does_not_expire_while_its_request_is_preempted(make_pool: MakePool) -> None:
    driver, _ = make_pool(5)
    first = driver.submit([1, 2, 3], max_tokens=13)
    sequence = driver.create([4, 5, 6, 7], idle_ttl_ms=1000)
    second = driver.submit(sequence_id=sequence, max_tokens=8)
    while driver.request(second).state != "preempted":
        driver.step()
    driver.advance(5_000_000)
    driver.run_until_idle()
    assert driver.answer_of(second) == continuation([4, 5, 6, 7], 8)
    assert driver.answer_of(first) == continuation([1, 2, 3], 13)


def test_a_client_sequence_preempted_in_mid_step_starts_again_only_when_that_step_is_over() -> None:
    driver = Driver()
    driver.add_worker(5, "first")
    one = driver.submit([1, 2, 3], max_tokens=13)
    sequence = driver.create([4, 5, 6, 7])
    two = driver.submit(sequence_id=sequence, max_tokens=8)
    for _ in range(200):
        driver.turn()
        if driver.request(two).state == "preempted":
            break
        driver.answer(driver.workers[0])
    assert driver.request(two).state == "preempted"
    assert driver.workers[0].inbox
    driver.add_worker(16, "second")  # room elsewhere, while the first still executes steps of the preempted request
    driver.turn()
    driver.run_until_idle()
    assert driver.answer_of(two) == continuation([4, 5, 6, 7], 8)
    assert driver.tokens(sequence) == [4, 5, 6, 7, *continuation([4, 5, 6, 7], 8)]
    assert driver.answer_of(one) == continuation([1, 2, 3], 13)


@pytest.mark.parametrize("policy", ["lru", "none"])
def test_a_sequence_that_cannot_copy_what_it_shares_starts_again_on_blocks_of_its_own(
    make_pool: MakePool, policy: str
) -> None:
    driver, _ = make_pool(4, policy=policy)
    sequence = driver.create(range(11))
    (fork,) = driver.fork(sequence)
    request = driver.submit(sequence_id=sequence, max_tokens=1)  # three blocks to copy, one is free
    for _ in range(5):
        driver.step()
    if policy == "none":
        told = driver.explain(request_id=request)
        assert (told.facts["limit"], told.facts["blocks_short"]) == ("blocks", 2)
        driver.remove(fork)
    driver.run_until_idle(50)
    assert driver.answer_of(request) == continuation(range(11), 1)


# ------------------------------------------------------------------------------------------------------ step results


# behaviour 32
def test_a_duplicate_result_is_ignored_and_logged(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=6)
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    driver.report(worker, result)
    before = digest(driver.machine)
    effects = driver.report(worker, result)
    assert effects == [Log("warning", f"worker {worker.name}: stale result of step 1 ignored")]
    assert digest(driver.machine) == before
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 6)


# behaviours 32 and 35
def test_a_result_of_another_epoch_is_ignored_and_logged(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=6)
    driver.turn()
    old = worker.execute(worker.inbox[0])
    driver.lose(worker)
    again = driver.add_worker(16, worker.name)
    driver.turn()
    assert again.epoch != worker.epoch
    before = digest(driver.machine)
    effects = driver.report(again, old)
    assert [type(effect) for effect in effects] == [Log]
    assert "another epoch ignored" in effects[0].text
    driver.machine._turn_due = False  # the only side effect is that a turn is due
    assert digest(driver.machine) == before
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 6)


def test_a_result_before_its_turn_is_a_protocol_error_and_the_worker_is_dropped(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=6)
    driver.turn()
    results = [worker.execute(step) for step in worker.inbox]
    effects = driver.report(worker, results[1])
    assert isinstance(effects[-1], DropWorker)
    assert "step 1 is due, but the result is for step 2" in worker.dropped
    assert driver.request(request).state == "preempted"
    driver.add_worker(16)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 6)


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("differ in length", {"tokens": int32([])}),
        ("outside the vocabulary", {"tokens": int32([1000])}),
        ("outside the vocabulary", {"tokens": int32([-1])}),
        ("did not sample", {"slots": int32([15])}),
    ],
)
def test_a_result_that_does_not_fit_its_step_costs_the_worker_and_no_request(
    make_pool: MakePool, problem: str, change: Any
) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=6)
    driver.turn()
    driver.report(worker, msgspec.structs.replace(worker.execute(worker.inbox[0]), **change))
    assert problem in worker.dropped
    assert not driver.machine.cache.groups
    assert driver.answer_of(request) == []
    driver.add_worker(16)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 6)


def test_results_may_come_in_another_order_of_rows_than_the_step(make_pool: MakePool) -> None:
    driver, worker = make_pool(steps_in_flight_max=1)
    requests = [driver.submit([i, 2], max_tokens=3) for i in range(3)]
    while driver.machine.busy:
        driver.turn()
        if not worker.inbox:
            break
        result = worker.execute(worker.inbox.popleft())
        turned = {name: getattr(result, name)[::-1].copy() for name in ("slots", "tokens", "logprobs")}
        driver.report(worker, msgspec.structs.replace(result, **turned))
    assert [driver.answer_of(r) for r in requests] == [continuation([i, 2], 3) for i in range(3)]


# behaviours 26 and 29
def test_a_poisoned_row_fails_alone(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    worker.poison = {666}
    good = [driver.submit([i, 2, 3], max_tokens=5) for i in range(2)]
    bad = driver.submit([1, 666, 3], max_tokens=5)
    sequence = driver.create([4, 666, 5])
    bad_too = driver.submit(sequence_id=sequence, max_tokens=5)
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in good] == [continuation([i, 2, 3], 5) for i in range(2)]
    for request in (bad, bad_too):
        info = driver.request(request)
        assert (info.state, info.reason, info.generated_tokens) == ("failed", "failed", 0)
        assert info.error.code == "gpu_error"
        assert driver.ended[request].error.code == "gpu_error"
    assert not worker.dropped
    assert driver.tokens(sequence) == [4, 666, 5]
    driver.remove(sequence)
    assert driver.free_or_cached() == 16


def test_a_row_without_a_token_fails_alone(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    one, two = driver.submit([1, 2], max_tokens=4), driver.submit([3, 4], max_tokens=4)
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    first_only = {name: getattr(result, name)[:1] for name in ("slots", "tokens", "logprobs")}
    driver.report(worker, msgspec.structs.replace(result, **first_only))
    driver.run_until_idle()
    assert driver.answer_of(one) == continuation([1, 2], 4)
    assert driver.request(two).error.code == "worker_error"


# ------------------------------------------------------------------------------------------------------- worker deaths


# behaviour 35
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_worker_that_dies_returns_its_blocks_and_its_requests_continue_when_it_is_back(
    make_pool: MakePool, steps: int
) -> None:
    driver, worker = make_pool()
    requests = [driver.submit([i, 2, 3], max_tokens=9) for i in range(3)]
    sequence = driver.create([7, 8, 9, 10, 11])
    requests.append(driver.submit(sequence_id=sequence, max_tokens=9))
    for _ in range(steps):
        driver.step()
    driver.turn()
    driver.lose(worker)
    assert {driver.request(r).state for r in requests} == {"preempted"}
    assert not driver.machine.cache.groups
    assert not driver.machine.cache.blocks.refcount.any()
    assert not driver.info(sequence).resident
    streamed = {r: list(driver.streamed.get(r, [])) for r in requests}
    driver.turn()
    driver.add_worker(16, worker.name)
    driver.run_until_idle()
    prompts = [[0, 2, 3], [1, 2, 3], [2, 2, 3], [7, 8, 9, 10, 11]]
    for request, prompt in zip(requests, prompts, strict=True):
        assert driver.answer_of(request) == driver.streamed[request] == continuation(prompt, 9)
        assert driver.streamed[request][: len(streamed[request])] == streamed[request]


# behaviour 35
def test_requests_of_a_dead_worker_continue_on_another_one() -> None:
    driver = Driver()
    first, second = driver.add_worker(16), driver.add_worker(16)
    requests = [driver.submit([i, 2, 3], max_tokens=9) for i in range(6)]
    driver.step()
    assert {driver.request(r).worker for r in requests} == {first.name, second.name}
    driver.turn()
    driver.lose(first)
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in requests] == [continuation([i, 2, 3], 9) for i in range(6)]
    assert {driver.request(r).worker for r in requests} == {second.name}
    assert driver.stats().pools[0].worker == second.name
    assert driver.free_or_cached() == 16


def test_the_oldest_request_of_a_dead_worker_is_first_again(make_pool: MakePool) -> None:
    driver, worker = make_pool(step_rows_max=2)
    requests = [driver.submit([i, 2, 3], max_tokens=9) for i in range(4)]
    driver.step()
    driver.lose(worker)
    assert [request.id for request in driver.machine.admission.waiting] == requests


def test_a_worker_that_says_it_failed_is_dropped(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    driver.submit([1], max_tokens=3)
    driver.turn()
    error: KvforgeError = GpuError("the device is lost")
    pid = driver.ask(GetHealth(rid=1)).workers[0].pid
    driver.report(worker, WorkerFailed(ErrorInfo.of(error)))
    assert worker.dropped == "the device is lost"
    text, fields = f"worker {worker.name} failed: the device is lost", {"worker": worker.name, "error": "gpu_error"}
    assert Log("error", text, "worker_failed", fields) in driver.logs
    assert (
        f"the last one, {worker.name}, was lost, process {pid} (the device is lost): "
        in driver.ask(GetHealth(rid=1)).reason
    )
    assert not driver.machine.workers


def test_a_worker_speaks_in_order_or_is_dropped() -> None:
    driver = Driver()
    stranger = FakeWorker(driver.machine, 5, "stranger", 4, model_info())
    driver.workers.append(stranger)
    driver.report(stranger, driver.ready(stranger))
    assert "first message of a worker must be worker_hello" in stranger.dropped
    assert not driver.machine.cache.groups


def test_a_second_worker_of_the_same_name_is_refused_and_the_first_stays(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    twin = FakeWorker(driver.machine, 77, worker.name, 4, model_info())
    driver.workers.append(twin)
    driver.report(twin, WorkerHello(rid=1, name=worker.name, pid=2))
    assert "give each worker its own name" in twin.dropped
    assert driver.workers == [worker]
    assert len(driver.machine.cache.groups) == 1


@pytest.mark.parametrize("message", ["hello", "ready"])
def test_a_worker_that_introduces_itself_twice_is_dropped_and_its_pool_with_it(
    make_pool: MakePool, message: str
) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=4)
    driver.turn()
    again = WorkerHello(rid=9, name="other", pid=1) if message == "hello" else driver.ready(worker)
    driver.report(worker, again)
    assert worker.dropped
    assert not driver.machine.cache.groups
    assert not driver.machine.workers
    driver.add_worker(16)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 4)


def test_a_worker_with_another_model_is_refused(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    other = driver.add_worker(8, "other", model_info("another"))
    assert "all must use the same model" in other.dropped
    assert driver.workers == [worker]
    assert driver.machine.cache.model is not None
    assert driver.machine.cache.model.name == "m"


def test_more_pools_or_blocks_than_there_may_be_are_refused() -> None:
    driver = Driver(pools_max=2, blocks_max=40)
    driver.add_worker(16)
    large = driver.add_worker(32)
    assert "blocks_max" in large.dropped
    second = driver.add_worker(16)
    third = driver.add_worker(4)
    assert "pools" in third.dropped
    driver.lose(second)
    assert driver.add_worker(20).base == 16


def test_a_message_of_the_wrong_kind_reaches_only_its_sender(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    effects = driver.machine.apply(
        FromWorker(
            worker.number, StepResult(step_id=5, epoch=worker.epoch, errors=(RowError(1, ErrorInfo("x", "y")),))
        ),
        driver.now_us,
    ).effects
    assert not [effect for effect in effects if isinstance(effect, ToWorker)]
    assert "stale result of step 5 ignored" in effects[0].text
    assert np.array_equal(driver.machine.cache.blocks.refcount, np.zeros(64, np.int32))
