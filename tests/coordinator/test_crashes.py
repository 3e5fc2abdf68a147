"""Workers that crash or hang: which request is blamed, and that no other request suffers."""

from __future__ import annotations

from typing import Any

import pytest

from kvforge.coordinator.core.events import DropWorker, FromWorker, ReplaceWorker, WorkerGone
from kvforge.protocol.errors import GpuError
from kvforge.protocol.messages import ErrorInfo, GetHealth, StepResult, WorkerFailed, WorkerHello
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, FakeWorker, continuation

POISON = 666
TIMEOUT_US = 60_000_000


def crashes(driver: Driver, *requests: int) -> list[int]:
    return [driver.machine.requests.live[request].crashes for request in requests]


# ------------------------------------------------------------------------------------------------------- what counts


# behaviour 35
def test_a_death_counts_for_what_was_in_its_steps_and_for_nothing_else(make_pool: MakePool) -> None:
    driver, worker = make_pool(steps_in_flight_max=1, step_tokens_max=2, step_rows_max=3)
    first = driver.submit([1, 2, 3, 4, 5, 6], max_tokens=4)
    second = driver.submit([7, 8], max_tokens=4)
    third = driver.submit([9, 9], max_tokens=4)
    pending = driver.submit([5], max_tokens=4)
    driver.turn()
    (step,) = worker.inbox
    slots = {driver.machine.requests.live[r].slot: r for r in (first, second, third)}
    inside = [slots[slot] for slot in step.slots.tolist()]
    assert inside == [first, second]
    driver.lose(worker)
    assert crashes(driver, first, second, third, pending) == [1, 1, 0, 0]
    driver.add_worker(16)
    driver.run_until_idle()
    assert driver.answer_of(third) == continuation([9, 9], 4)


def test_what_the_worker_had_answered_does_not_count(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=9)
    driver.step()
    driver.lose(worker)
    assert crashes(driver, request) == [0]
    worker = driver.add_worker(16)
    driver.turn()
    driver.lose(worker)
    assert crashes(driver, request) == [1]


def test_one_that_was_preempted_in_mid_step_is_not_in_the_step(make_pool: MakePool) -> None:
    driver, worker = make_pool(5)
    driver.submit([1, 2, 3], max_tokens=13)
    second = driver.submit([4, 5, 6, 7], max_tokens=8)
    for _ in range(200):
        driver.turn()
        if driver.request(second).state == "preempted":
            break
        driver.answer(worker)
    assert driver.request(second).state == "preempted"
    assert worker.inbox
    driver.lose(worker)
    assert crashes(driver, 1, second) == [1, 0]


def test_a_request_in_the_slot_of_one_that_is_in_the_step_is_not_in_it(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3])
    first = driver.submit(sequence_id=sequence, max_tokens=9)
    driver.turn()
    driver.cancel(first)
    second = driver.submit(sequence_id=sequence, max_tokens=9)
    driver.turn()
    assert driver.request(second).state == "running"
    assert len(worker.inbox) == 2
    driver.lose(worker)
    assert crashes(driver, second) == [0]


def test_a_goodbye_counts_for_nobody(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3], max_tokens=9)
    for _ in range(10):
        driver.turn()
        driver.workers.remove(worker)
        driver.apply(WorkerGone(worker.number, goodbye=True))
        worker = driver.add_worker(16)
    assert crashes(driver, request) == [0]
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 9)


@pytest.mark.parametrize("how", ["vanished", "failed", "wrong"])
def test_without_a_token_in_between_so_many_deaths_fail_a_request(make_pool: MakePool, how: str) -> None:
    driver, worker = make_pool(crashes_max=3)
    sequence = driver.create([1, 2, 3])
    request = driver.submit(sequence_id=sequence, max_tokens=9)
    for count in range(1, 4):
        assert driver.request(request).state in ("pending", "preempted")
        driver.turn()
        name = worker.name
        if how == "vanished":
            driver.lose(worker)
        elif how == "failed":
            driver.report(worker, WorkerFailed(ErrorInfo.of(GpuError("lost"))))
        else:
            driver.report(worker, StepResult(step_id=2, epoch=worker.epoch))
        if count < 3:
            assert crashes(driver, request) == [count]
            worker = driver.add_worker(16)
    driver.turn()
    error = driver.ended[request].error
    assert error is not None
    assert (error.code, error.fields["request_id"], error.fields["crashes"]) == ("worker_error", request, 3)
    assert error.message == f"request {request}: 3 workers died while running it, the last {name}"
    assert driver.request(request).state == "failed"
    assert driver.info(sequence).request_id == 0
    assert driver.tokens(sequence) == [1, 2, 3]
    driver.add_worker(16)
    again = driver.submit(sequence_id=sequence, max_tokens=9)
    driver.run_until_idle()
    assert driver.answer_of(again) == continuation([1, 2, 3], 9)


def test_a_token_in_between_starts_the_count_anew(make_pool: MakePool) -> None:
    driver, worker = make_pool(crashes_max=2)
    request = driver.submit([1, 2, 3], max_tokens=40)
    for _ in range(6):
        driver.step()
        driver.turn()
        driver.lose(worker)
        assert crashes(driver, request) == [1]
        worker = driver.add_worker(16)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3], 40)


# ------------------------------------------------------------------------------------------------------------- poison


class Fragile(FakeWorker):
    """A worker that crashes on a step with the poisoned token."""

    def dies(self) -> bool:
        return bool((self.inbox[0].tokens == POISON).any())


class FragileDriver(Driver):
    worker_type: type[FakeWorker] = Fragile

    def __init__(self, workers: int, blocks: int, **limits: Any) -> None:
        super().__init__(**limits)
        self.blocks, self.deaths = blocks, 0
        for _ in range(workers):
            self.add_worker(blocks)

    def step(self) -> None:
        """Run one turn and replace crashed workers."""
        self.turn()
        for worker in list(self.workers):
            assert isinstance(worker, Fragile)
            while worker.inbox and worker in self.workers:
                if worker.dies():
                    self.lose(worker)
                    self.deaths += 1
                    self.add_worker(self.blocks)
                else:
                    self.answer(worker)


@pytest.mark.parametrize("crashes_max", [3, 5])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_poisoned_request_fails_and_everyone_beside_it_finishes(at: int, workers: int, crashes_max: int) -> None:
    driver = FragileDriver(workers, 24, crashes_max=crashes_max)
    prompts = [[i, 2, 3] for i in range(10)]
    prompts[at] = [at, POISON, 3]
    requests = [driver.submit(prompt, max_tokens=6) for prompt in prompts]
    worst = dict.fromkeys(requests, 0)
    for _ in range(300):
        driver.step()
        for request in driver.machine.requests.live.values():
            worst[request.id] = max(worst[request.id], request.crashes)
        if not driver.machine.busy:
            break
    driver.turn()
    bad = requests.pop(at)
    info = driver.request(bad)
    assert (info.state, info.error.code if info.error else "") == ("failed", "worker_error")
    assert driver.deaths == crashes_max
    assert max(worst[request] for request in requests) <= 2  # from its second crash on, it runs alone
    assert [driver.answer_of(r) for r in requests] == [continuation([i, 2, 3], 6) for i in range(10) if i != at]
    assert driver.free_or_cached() == 24 * workers


def test_a_poison_that_comes_in_mid_answer(make_pool: MakePool) -> None:
    answer = continuation([1, 2, 3], 6)
    driver = FragileDriver(1, 24, crashes_max=4)

    class OfItsOwnToken(Fragile):
        def dies(self) -> bool:
            return bool((self.inbox[0].tokens == answer[3]).any() or self.last_token.get(0) == answer[3])

    driver.worker_type = OfItsOwnToken
    driver.lose(driver.workers[0])
    driver.add_worker(24)
    bad = driver.submit([1, 2, 3], max_tokens=6)
    good = [driver.submit([i, 2, 4], max_tokens=6) for i in range(4)]
    for _ in range(100):
        driver.step()
    driver.turn()
    assert driver.request(bad).state == "failed"
    assert driver.answer_of(bad) == answer[:4]
    assert [driver.answer_of(r) for r in good] == [continuation([i, 2, 4], 6) for i in range(4)]
    assert driver.deaths == 4


def test_from_its_second_crash_on_a_request_runs_alone_until_it_has_a_token() -> None:
    driver = Driver(steps_in_flight_max=1)
    requests = [driver.submit([i, 2, 3], max_tokens=6) for i in range(3)]
    for _ in range(2):
        worker = driver.add_worker(24)
        driver.turn()
        driver.lose(worker)
    assert crashes(driver, *requests) == [2, 2, 2]
    worker = driver.add_worker(24)
    fresh = driver.submit([9, 9], max_tokens=6)
    alone = []
    while driver.machine.requests.live:
        driver.turn()
        running = [r.id for r in driver.machine.requests.live.values() if r.state == "running"]
        live, choice = driver.machine.requests.live, driver.machine.admission.choice
        suspects = [r for r in running if choice.must_be_alone(live[r])]
        assert len(running) == 1 or not suspects
        alone += [r for r in suspects if r not in alone]
        while worker.inbox:
            driver.answer(worker)
    driver.turn()
    assert alone == requests
    assert [driver.answer_of(r) for r in requests] == [continuation([i, 2, 3], 6) for i in range(3)]
    assert driver.answer_of(fresh) == continuation([9, 9], 6)


def test_another_worker_serves_the_others_meanwhile() -> None:
    driver = Driver(steps_in_flight_max=1)
    suspect = driver.submit([1, 2, 3], max_tokens=20)
    for _ in range(2):
        worker = driver.add_worker(24)
        driver.turn()
        driver.lose(worker)
    for _ in range(2):
        driver.add_worker(24)
    others = [driver.submit([i, 7], max_tokens=3) for i in range(6)]
    driver.turn()
    mine = driver.request(suspect).worker
    assert mine
    assert {driver.request(r).worker for r in others} == {w.name for w in driver.workers} - {mine}
    driver.run_until_idle()
    assert driver.answer_of(suspect) == continuation([1, 2, 3], 20)


# --------------------------------------------------------------------------------------------------------------- hung


# behaviour 35
def test_a_hung_worker_is_dropped_and_replaced_to_the_microsecond() -> None:
    driver = Driver(step_timeout_us=TIMEOUT_US, lease_us=1)
    worker = driver.add_worker(16)
    requests = [driver.submit([i, 2, 3], max_tokens=6) for i in range(2)]
    driver.advance(5)
    driver.turn()
    driver.advance(7)
    driver.answer(worker)  # one of two steps in flight; the worker's time for the other starts now
    assert driver.wake_us() == TIMEOUT_US + 1
    driver.advance(TIMEOUT_US)
    effects = driver.turn()
    assert not [e for e in effects if isinstance(e, DropWorker | ReplaceWorker)]
    assert driver.ask(GetHealth(rid=1)).workers[0].since_step_us == TIMEOUT_US
    driver.advance(1)
    effects = driver.turn()
    reason = f"worker {worker.name} has done no step for 60 s while one was due"
    dropped, replaced = [e for e in effects if isinstance(e, DropWorker | ReplaceWorker)]
    assert (dropped, replaced) == (DropWorker(worker.number, reason), ReplaceWorker(worker.number, 1, reason))
    assert [log.text for log in driver.logs if log.level == "error"] == [f"{reason}: it is replaced"]
    assert not driver.machine.workers
    assert [driver.request(r).state for r in requests] == ["preempted"] * 2
    assert crashes(driver, *requests) == [1, 1]
    driver.add_worker(16)
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in requests] == [continuation([i, 2, 3], 6) for i in range(2)]


def test_a_worker_without_a_step_does_not_hang(make_pool: MakePool) -> None:
    driver, worker = make_pool(step_timeout_us=TIMEOUT_US)
    driver.submit([1], max_tokens=1)
    driver.run_until_idle()
    assert driver.nothing_due()
    driver.advance(10 * TIMEOUT_US)
    driver.turn()
    assert driver.workers == [worker]
    driver.submit([2], max_tokens=1)
    driver.turn()
    assert driver.wake_us() == TIMEOUT_US + 1  # the timeout counts from the send, not from the idle time before
    driver.run_until_idle()
    assert len(driver.ended) == 2


def test_only_the_one_that_hangs_is_replaced() -> None:
    driver = Driver(step_timeout_us=TIMEOUT_US, steps_in_flight_max=1)
    hung, good = driver.add_worker(16), driver.add_worker(16)
    requests = [driver.submit([i, 2, 3], max_tokens=4) for i in range(4)]
    driver.turn()
    driver.advance(TIMEOUT_US)
    driver.answer(good)
    driver.turn()
    driver.advance(1)
    driver.turn()
    assert driver.workers == [good]
    assert hung.dropped
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in requests] == [continuation([i, 2, 3], 4) for i in range(4)]


# ------------------------------------------------------------------------------------------------- departed workers


def test_how_each_worker_went_is_told_until_it_is_back() -> None:
    driver = Driver(pools_max=3)
    first, second = driver.add_worker(16, "w0"), driver.add_worker(16, "w1")
    driver.add_worker(16, "w2")
    driver.report(first, WorkerFailed(ErrorInfo.of(GpuError("the device is lost"))))
    driver.apply(WorkerGone(second.number, goodbye=True))
    health = driver.ask(GetHealth(rid=1))
    assert health.ready and [worker.name for worker in health.workers] == ["w2"]
    assert health.gone == {"w0": "was lost, process 1 (the device is lost)", "w1": "left, process 1"}
    driver.add_worker(16, "w0")
    assert list(driver.ask(GetHealth(rid=1)).gone) == ["w1"]


def test_no_more_of_them_are_remembered_than_there_may_be() -> None:
    driver = Driver(pools_max=3)
    for number in range(5):
        driver.lose(driver.add_worker(16, f"w{number}"))
    assert list(driver.ask(GetHealth(rid=1)).gone) == ["w2", "w3", "w4"]


def test_a_worker_that_is_refused_at_its_hello_changes_nothing_of_how_another_one_went() -> None:
    driver = Driver()
    driver.lose(driver.add_worker(16, "w0"))
    driver.add_worker(16, "w1")
    before = driver.ask(GetHealth(rid=1)).gone
    driver.apply(FromWorker(70, WorkerHello(rid=1, name="w1", pid=9)))
    assert driver.ask(GetHealth(rid=1)).gone == before == {"w0": "was lost, process 1"}
