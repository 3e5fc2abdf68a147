"""The phases of a request's time; after every event, the phases of each request add up to its age."""

from __future__ import annotations

from collections.abc import Sequence

from kvforge.coordinator.core.events import ClientCame, FromWorker, Restarted
from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.messages import Timings, WorkerHello
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import PROMPT, Driver, continuation, submit, waiting_driver

STEP_US = 1000
PHASES = ("queue", "prefill", "decode", "preempted", "stalled", "recovering")


def step(driver: Driver, count: int = 1) -> None:
    """Run this many steps of one millisecond each."""
    for _ in range(count):
        driver.turn()
        driver.advance(STEP_US)
        for worker in driver.workers:
            while worker.inbox:
                driver.answer(worker)


def idle(driver: Driver) -> None:
    """Run until all requests have ended."""
    while driver.machine.busy:
        step(driver)
    driver.turn()


def spent(timings: Timings) -> dict[str, int]:
    """Microseconds by phase, without phases of length zero."""
    return {phase: us for phase in PHASES if (us := getattr(timings, f"{phase}_us"))}


def sentence(driver: Driver, request: int) -> str:
    """The explanation of the request's timings."""
    ended, told = driver.explain(request_id=request).sentences
    assert ended.startswith("it has ended (finished")
    return told


def test_the_queue_the_prompt_and_the_answer(make_pool: MakePool) -> None:
    driver, _ = make_pool(3, step_tokens_max=4, steps_in_flight_max=1)
    first = driver.submit(range(8), max_tokens=3)
    second = driver.submit(range(50, 57), max_tokens=1)
    idle(driver)
    assert spent(driver.ended[first].timings) == {"prefill": 2 * STEP_US, "decode": 2 * STEP_US}
    assert spent(driver.ended[second].timings) == {"queue": 4 * STEP_US, "prefill": 2 * STEP_US}
    assert driver.ended[second].timings == driver.request(second).timings
    assert sentence(driver, first) == "0.004 s in all: 0.002 s prefill, 0.002 s decoding"
    assert sentence(driver, second) == ("0.006 s in all: waited 0.004 s in the queue for free blocks, 0.002 s prefill")
    facts = driver.explain(request_id=second).facts
    assert (facts["queue_us"], facts["prefill_us"], facts["queued_for"]) == (4 * STEP_US, 2 * STEP_US, "blocks")


def test_one_that_runs_is_asked_how_far_it_is(make_pool: MakePool) -> None:
    driver, _ = make_pool(steps_in_flight_max=1)
    request = driver.submit(PROMPT, max_tokens=9)
    step(driver, 3)
    driver.advance(5)
    assert spent(driver.request(request).timings) == {"prefill": STEP_US, "decode": 2 * STEP_US + 5}


def test_why_it_waited_though_it_was_never_tried(driver: Driver) -> None:
    early = driver.submit([1], max_tokens=1)
    driver.advance(2_000_000)
    driver.add_worker(8)
    idle(driver)
    assert "waited 2 s in the queue for a worker" in sentence(driver, early)


def test_a_full_batch(make_pool: MakePool) -> None:
    driver, _ = make_pool(step_rows_max=1, steps_in_flight_max=1)
    driver.submit([1], max_tokens=4)
    driver.turn()
    later = driver.submit([2], max_tokens=1)
    idle(driver)
    assert "waited 0.004 s in the queue for a row" in sentence(driver, later)


def test_a_sibling_waits_for_the_one_that_computes_the_prompt(make_pool: MakePool) -> None:
    driver, _ = make_pool(step_tokens_max=4, steps_in_flight_max=1)
    first = driver.submit(range(8), max_tokens=1, count=2)
    idle(driver)
    assert "waited 0.002 s in the queue for the request that computed its prompt" in sentence(driver, first + 1)


# Four blocks of four tokens: the older request takes the last block for its ninth token.
def test_a_preemption_lasts_until_the_next_token(make_pool: MakePool) -> None:
    driver, _ = make_pool(4, steps_in_flight_max=1)
    elder, younger = driver.submit([1, 2, 3], max_tokens=9), driver.submit([5, 6], max_tokens=7)
    idle(driver)
    assert driver.answer_of(younger) == continuation([5, 6], 7)
    lost, alone = driver.ended[younger].timings, driver.ended[elder].timings
    assert spent(alone) == {"prefill": STEP_US, "decode": 8 * STEP_US}
    assert (
        spent(lost)["prefill"] == STEP_US
        and spent(lost)["decode"] + spent(lost)["preempted"] + STEP_US == lost.ended_us
    )
    # It has at most six tokens before its preemption, and resumes when the older request has ended.
    assert lost.ended_us > alone.ended_us and spent(lost)["preempted"] >= 4 * STEP_US
    assert f"preempted once for {lost.preempted_us / 1e6:.3g} s in all" in sentence(driver, younger)
    assert driver.explain(request_id=younger).facts["preemptions"] == 1


def test_a_lost_worker_is_recovered_from_with_the_next_token() -> None:
    driver = Driver(steps_in_flight_max=1)
    worker = driver.add_worker(16)
    request = driver.submit(PROMPT, max_tokens=4)
    step(driver, 2)
    driver.turn()
    driver.lose(worker)
    driver.advance(3_000_000)
    driver.add_worker(16)
    idle(driver)
    assert spent(driver.ended[request].timings) == {
        "prefill": STEP_US,
        "decode": 2 * STEP_US,
        "recovering": 3_000_000 + STEP_US,
    }
    assert "recovered once for 3 s in all" in sentence(driver, request)
    assert driver.explain(request_id=request).facts["preemptions"] == 0


def test_one_that_has_no_token_goes_on_with_its_prompt_when_it_runs_again() -> None:
    driver = Driver(steps_in_flight_max=1, step_tokens_max=4)
    worker = driver.add_worker(16)
    request = driver.submit(range(8), max_tokens=1)
    step(driver)
    driver.lose(worker)
    driver.advance(500)
    driver.add_worker(16)
    idle(driver)
    assert spent(driver.ended[request].timings) == {"prefill": 3 * STEP_US, "recovering": 500}


def restarted(came_back: Sequence[str]) -> tuple[Driver, list[int]]:
    """A coordinator that was down for a second, and its worker for three; one request ran, one waited."""
    driver = waiting_driver(step_rows_max=1, steps_in_flight_max=1)
    driver.apply(ClientCame(1, "a session"))
    worker = driver.add_worker(16)
    requests = [submit(driver, rid=rid, max_tokens=3, detached=True).request_id for rid in (100, 101)]
    step(driver, 2)
    worker.inbox.clear()
    driver.advance(1_000_000)
    driver._due.clear()
    driver.apply(Restarted())
    driver.advance(2_000_000)
    for name in came_back:
        if name == worker.name:
            worker.number = 50
            hello = WorkerHello(rid=1, name=name, pid=1, boot="boot", epoch=worker.epoch)
            driver.apply(FromWorker(worker.number, hello))
        else:
            driver.workers.remove(worker)
            driver.advance(3_000_000)
            driver.turn()
            driver.add_worker(16, name)
    idle(driver)
    return driver, requests


def test_where_there_was_no_coordinator() -> None:
    """A running request recovers until its next token; a waiting one waits again from the restart on."""
    driver, (ran, waited) = restarted(["w1"])
    timings = driver.request(ran).timings
    assert spent(timings) == {"prefill": STEP_US, "decode": STEP_US, "recovering": 3_000_000 + STEP_US}
    assert "recovered once for 3 s in all" in sentence(driver, ran)
    timings = driver.request(waited).timings
    assert spent(timings)["recovering"] == 1_000_000
    assert spent(timings)["queue"] == 2_000_000 + 3 * STEP_US
    assert "waited 1 s while there was no coordinator" in sentence(driver, waited)


def test_a_worker_that_does_not_come_back_is_one_recovery() -> None:
    driver, (ran, _) = restarted(["another"])
    assert spent(driver.request(ran).timings)["recovering"] == 6_000_000 + STEP_US
    assert driver.explain(request_id=ran).facts["recoveries"] == 1


def test_a_row_that_stands_still() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=4)}, partial_tokens_min=100, steps_in_flight_max=1)
    driver.add_worker(30)
    driver.submit([*range(8), 1], 1, tenant="a", salt="s")
    idle(driver)
    driver.submit([*range(8), 2], 20, tenant="b", salt="s")  # two blocks that are charged to a
    step(driver)
    request = driver.submit([50, 51, 52], 10, tenant="a")
    idle(driver)
    timings = driver.ended[request].timings
    # Two blocks hold its prompt and five tokens; the next block is free when the other request ends, in its 20th step.
    assert spent(timings) == {"prefill": STEP_US, "decode": 9 * STEP_US, "stalled": 14 * STEP_US}
    assert "stalled for 0.014 s for lack of blocks" in sentence(driver, request)


def test_a_turn_that_plans_nothing_leaves_a_stalled_row_as_it_is() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=4)}, partial_tokens_min=100, steps_in_flight_max=2)
    driver.add_worker(30)
    driver.submit([*range(8), 1], 1, tenant="a", salt="s")
    idle(driver)
    driver.submit([*range(8), 2], 21, tenant="b", salt="s")  # two blocks that are charged to a
    step(driver)
    request = driver.machine.requests.find(driver.submit([50, 51, 52], 10, tenant="a"))
    for _ in range(40):
        driver.turn()
        if request.wait is not None and len(driver.machine.cache.groups[0].sent) == 1:
            break  # the last step of the other row is in flight, and another one could be sent
        step(driver)
    before, stalled_us = request.wait, request.phases.since_us
    assert before is not None and stalled_us < driver.now_us
    driver.advance(100)
    driver.turn()
    assert (request.wait, request.phases.since_us) == (before, stalled_us)


def test_the_pause_of_a_stream_is_beside_the_phases(make_pool: MakePool) -> None:
    driver, _ = make_pool(steps_in_flight_max=1)
    request = driver.submit(PROMPT, max_tokens=4)
    step(driver, 2)
    driver.full.add(1)
    driver.turn()
    driver.full.clear()
    idle(driver)
    driver.advance(700_000)
    driver.attach(request, 1)
    driver.turn()
    timings = driver.ended[request].timings
    assert spent(timings) == {"prefill": STEP_US, "decode": 3 * STEP_US}
    assert timings.paused_us == 700_000 + 2 * STEP_US
    assert sentence(driver, request).endswith("; its stream was paused for 0.702 s")


def test_a_client_that_goes_away_after_the_end_paused_nothing(make_pool: MakePool) -> None:
    """As when a coordinator restarts: finished requests count as read."""
    driver, _ = make_pool(steps_in_flight_max=1)
    driver.apply(ClientCame(1, "a session"))
    request = driver.submit(PROMPT, max_tokens=4)
    idle(driver)
    driver.apply(Restarted())
    driver.advance(700_000)
    assert "paused" not in sentence(driver, request)
    # The client reconnects and attaches, so it had not read everything.
    driver.attach(request, 1)
    driver.turn()
    assert sentence(driver, request).endswith("; its stream was paused for 0.7 s")
