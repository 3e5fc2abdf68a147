"""The waiting queue: its order, which requests may overtake, and the refusals of a full queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.core.scheduling.admission import BLOCKED_MAX
from kvforge.coordinator.core.scheduling.queue import WaitingQueue
from kvforge.protocol.errors import QueueFull
from kvforge.protocol.messages import Submit
from tests.amount import examples
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import GREEDY, Driver, continuation, int32
from tools.simulation.limits import make_limits


def waiting(driver: Driver) -> list[int]:
    """Ids of the waiting requests, in scheduling order."""
    return [request.id for request in driver.machine.admission.waiting]


def states(driver: Driver, requests: list[int]) -> list[str]:
    return [driver.request(request).state for request in requests]


# --------------------------------------------------------------------------------------------------- order in a tenant


def test_within_a_tenant_priority_goes_first_and_equals_go_by_age(driver: Driver) -> None:
    requests = [driver.submit([1], priority=priority) for priority in (0, -1, 1, 0, 100, -100, 1)]
    one, two, three, four, five, six, seven = requests
    assert waiting(driver) == [five, three, seven, one, four, two, six]


@pytest.mark.parametrize(("later_us", "first"), [(2999, "high"), (3000, "low"), (3001, "low")])
def test_waiting_so_long_is_worth_so_much_priority_to_the_microsecond(later_us: int, first: str) -> None:
    driver = Driver(ageing_us=1000, step_rows_max=1, steps_in_flight_max=1)
    driver.add_worker(16)
    running = driver.submit([9], max_tokens=3)
    driver.step()
    low = driver.submit([1], max_tokens=2, priority=-1)
    driver.advance(later_us)
    high = driver.submit([2], max_tokens=2, priority=2)
    while driver.request(running).state == "running":
        driver.step()
    driver.turn()
    assert driver.request(low if first == "low" else high).state == "running"
    assert driver.request(high if first == "low" else low).state == "pending"


def test_a_preempted_request_goes_before_every_fresh_one(make_pool: MakePool) -> None:
    driver, _ = make_pool(5)
    first = driver.submit([1, 2, 3], max_tokens=13)
    second = driver.submit([4, 5, 6, 7], max_tokens=8, priority=-100)
    while driver.request(second).state != "preempted":
        driver.step()
    fresh = [driver.submit([8], max_tokens=1, priority=100, tenant=tenant) for tenant in ("default", "other")]
    assert waiting(driver)[0] == second
    assert sorted(waiting(driver)) == [second, *fresh]
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation([1, 2, 3], 13)
    assert driver.answer_of(second) == continuation([4, 5, 6, 7], 8)
    assert [driver.answer_of(request) for request in fresh] == [continuation([8], 1)] * 2


# --------------------------------------------------------------------------------------------------------- fair shares


SATURATED = 16  # a step has four rows
FINISHED_MAX = 8  # each event checks every request that the machine knows


class Shares:
    """Tokens computed for each tenant, counted from the steps."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.worker = driver, driver.workers[0]
        self.tokens: dict[str, int] = {}
        self._submitted = 0
        self._saturated: list[str] = []

    def saturate(self, tenant: str) -> None:
        """From now on keep `SATURATED` requests of the tenant waiting before each step."""
        self._saturated.append(tenant)
        self._refill()

    def _refill(self) -> None:
        waiting, names = self.driver.machine.admission.waiting.by_tenant(), self.driver.machine.cache.tenants.names
        held = {names[tenant]: count for tenant, count in waiting.items()}
        for tenant in self._saturated:
            self.fill(tenant, SATURATED - held.get(tenant, 0))

    def fill(self, tenant: str, count: int) -> None:
        """Submit more requests of the tenant, without shared prefixes."""
        for _ in range(count):
            self._submitted += 1
            prompt = [self._submitted % 1000, self._submitted // 1000] + [7] * (self._submitted % 5)
            self.driver.submit(prompt, 3 + self._submitted % 7, tenant=tenant)

    def step(self) -> None:
        self._refill()
        before = len(self.worker.steps)
        self.driver.turn()
        s, names = self.driver.machine.cache.sequences, self.driver.machine.cache.tenants.names
        for step in self.worker.steps[before:]:
            for slot, count in zip(step.slots.tolist(), step.counts.tolist(), strict=True):
                tenant = names[s.tenant[slot]]
                self.tokens[tenant] = self.tokens.get(tenant, 0) + count
        while self.worker.inbox:
            self.driver.answer(self.worker)


@pytest.mark.parametrize("weight", [3.0, 1.0])
def test_tenants_that_saturate_share_what_is_computed_by_weight(weight: float) -> None:
    quotas = {"a": Quota(weight=1.0), "b": Quota(weight=weight)}
    driver = Driver(queue_max=1000, finished_max=FINISHED_MAX, step_rows_max=4, quotas=quotas)
    driver.add_worker(64)
    shares = Shares(driver)
    shares.fill("a", 3 * SATURATED)  # a submitted many requests first
    shares.saturate("a")
    shares.saturate("b")
    for _ in range(300):
        shares.step()
    assert all(tenant.pending for tenant in driver.stats().tenants), "both tenants must stay saturated"
    assert shares.tokens["b"] / shares.tokens["a"] == pytest.approx(weight, rel=0.04)


def test_a_tenant_that_was_idle_gets_no_credit() -> None:
    rows, largest = 4, 7 + 9
    driver = Driver(queue_max=1000, finished_max=FINISHED_MAX, step_rows_max=rows)
    driver.add_worker(64)
    shares = Shares(driver)
    shares.saturate("a")
    for _ in range(200):
        shares.step()
    alone = shares.tokens["a"]
    assert alone > 2000
    shares.saturate("b")
    ahead = []
    for _ in range(200):
        shares.step()
        ahead.append(shares.tokens.get("b", 0) - (shares.tokens["a"] - alone))
    assert all(tenant.pending for tenant in driver.stats().tenants if tenant.tenant in "ab")
    # A tenant starts level with the other, up to the tokens granted since its last start: at most one request per row.
    assert max(map(abs, ahead)) <= rows * largest
    assert shares.tokens["b"] > 900


# behaviour 31
def test_a_tenant_with_one_slow_stream_gathers_no_credit() -> None:
    """Otherwise it could later starve the others for as long as its stream ran."""
    rows, largest = 4, 7 + 9
    room = {"blocks_per_sequence_max": 128, "blocks_max": 256}
    driver = Driver(queue_max=1000, finished_max=FINISHED_MAX, step_rows_max=rows, **room)
    driver.add_worker(256)
    shares = Shares(driver)
    driver.submit([1, 2], max_tokens=400, tenant="b")
    shares.saturate("a")
    for _ in range(200):
        shares.step()
    before = dict(shares.tokens)
    assert before["a"] > 3 * before["b"]
    shares.saturate("b")
    for _ in range(100):
        shares.step()
    grown = {tenant: shares.tokens[tenant] - before[tenant] for tenant in "ab"}
    assert abs(grown["a"] - grown["b"]) <= rows * largest


# ---------------------------------------------------------------------------------------------------- overtaking


def blocked_head(**limits: Any) -> tuple[Driver, int, int]:
    """One request runs and the head of the queue does not fit: (driver, running request, head)."""
    driver = Driver(steps_in_flight_max=1, passes_max=3, **limits)
    driver.add_worker(16)
    running = driver.submit(range(28), max_tokens=32)
    driver.step()
    head = driver.submit(range(100, 140), max_tokens=2)
    driver.step()
    assert states(driver, [running, head]) == ["running", "pending"]
    return driver, running, head


def test_a_head_that_finds_no_room_is_passed_so_often_and_then_room_is_kept_for_it() -> None:
    driver, running, head = blocked_head()
    passed = []
    for i in range(5):
        passed.append(driver.submit([200 + i], max_tokens=2))
        driver.step()
        driver.step()
        driver.step()
    assert states(driver, passed) == ["finished"] * 3 + ["pending"] * 2
    assert driver.explain(request_id=head).facts["passed"] == 3
    while driver.request(running).state == "running":
        assert states(driver, passed[3:]) == ["pending"] * 2
        driver.step()
    driver.turn()
    assert driver.request(head).state == "running"
    driver.run_until_idle()
    assert driver.answer_of(head) == continuation(range(100, 140), 2)
    assert driver.answer_of(running) == continuation(range(28), 32)
    assert [driver.answer_of(r) for r in passed] == [continuation([200 + i], 2) for i in range(5)]


def test_another_pool_goes_on_serving_while_room_is_kept_in_one() -> None:
    driver, running, head = blocked_head()
    for i in range(3):
        driver.submit([200 + i], max_tokens=2)
    for _ in range(4):
        driver.step()
    small = driver.add_worker(6, "small")
    passed = []
    for i in range(6):
        passed.append(driver.submit([300 + i], max_tokens=2))
        driver.step()
        driver.step()
        driver.step()
    assert {driver.request(r).worker for r in passed} == {small.name}
    assert states(driver, passed) == ["finished"] * 6
    assert states(driver, [running, head]) == ["running", "pending"]
    driver.run_until_idle()
    assert driver.answer_of(head) == continuation(range(100, 140), 2)


@pytest.mark.parametrize("heads", [1, BLOCKED_MAX + 4])
def test_no_pool_idles_while_requests_wait_that_it_could_serve(heads: int) -> None:
    driver = Driver(steps_in_flight_max=1)
    driver.add_worker(16, "large")
    running = driver.submit(range(28), max_tokens=32)
    driver.step()
    driver.add_worker(4, "small")
    large = [driver.submit([100 + i, *range(39)], max_tokens=2) for i in range(heads)]
    driver.step()
    small = driver.submit([5], max_tokens=2)
    driver.step()
    assert driver.request(running).state == "running"
    assert driver.request(small).worker == ("small" if heads > 1 else "large")  # the large one has more free blocks
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in large] == [continuation([100 + i, *range(39)], 2) for i in range(heads)]


def test_requests_too_large_for_the_pools_that_are_left_hold_up_nobody() -> None:
    driver = Driver()
    large = driver.add_worker(16, "large")
    heads = [driver.submit([100 + i, *range(39)], max_tokens=2) for i in range(BLOCKED_MAX + 4)]
    driver.lose(large)
    driver.add_worker(4, "small")
    small = [driver.submit([i, *range(8)], max_tokens=2) for i in range(5)]
    driver.step()
    for _ in range(20):
        driver.step()
    assert states(driver, small) == ["finished"] * 5
    assert states(driver, heads) == ["pending"] * len(heads)
    driver.add_worker(16, "large")
    driver.run_until_idle()
    assert [driver.answer_of(r) for r in heads] == [continuation([100 + i, *range(39)], 2) for i in range(len(heads))]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_when_the_one_that_room_was_kept_for_ends_the_others_start_at_once(how: str) -> None:
    driver = Driver(steps_in_flight_max=1, passes_max=1)
    driver.add_worker(16)
    running = driver.submit(range(28), max_tokens=32)
    driver.step()
    head = driver.submit(range(100, 140), max_tokens=2, deadline_ms=1000)
    small = driver.submit([200], max_tokens=1)
    driver.step()
    late = driver.submit([201], max_tokens=1)
    driver.step()
    driver.turn()
    assert states(driver, [running, head, small, late]) == ["running", "pending", "finished", "pending"]
    if how == "cancelled":
        driver.cancel(head)
    else:
        driver.advance(1_000_000)
    driver.turn()
    assert states(driver, [running, head, late]) == ["running", how, "running"]


def test_a_tenant_at_its_ceiling_with_hundreds_waiting_does_not_hold_up_others() -> None:
    driver = Driver(queue_max=400, finished_max=FINISHED_MAX, quotas={"a": Quota(ceiling=3)})
    driver.add_worker(16)
    mine = [driver.submit([i % 10, i // 10, *range(5)], max_tokens=5, tenant="a") for i in range(200)]
    driver.turn()
    assert states(driver, mine[:2]) == ["running", "pending"]
    other = driver.submit([7, 7], max_tokens=3, tenant="b")
    driver.answer(driver.workers[0])
    driver.turn()
    assert driver.request(other).state == "running"
    assert driver.explain(request_id=mine[1]).facts["limit"] == "tenant ceiling"
    driver.run_until_idle(3000)
    assert driver.stats().requests.finished_total == 201


# --------------------------------------------------------------------------------------------------------- a full queue


# behaviour 27
@pytest.mark.parametrize(
    ("every_us", "hint_ms"), [(1_000, 10), (10_000, 10), (250_000, 250), (2_000_000, 2000), (90_000_000, 60_000)]
)
def test_the_hint_of_a_full_queue_is_the_measured_time_between_starts(every_us: int, hint_ms: int) -> None:
    driver = Driver(queue_max=40, step_rows_max=1, steps_in_flight_max=1)
    driver.add_worker(16)
    for i in range(40):
        driver.submit([i], max_tokens=1)
    assert driver.refused(driver.submit_message([1]), QueueFull).retry_after_ms == 1000
    for _ in range(36):
        driver.step()
        driver.advance(every_us)
    while len(driver.machine.admission.waiting) < 40:
        driver.submit([1], max_tokens=1)
    error = driver.refused(driver.submit_message([1]), QueueFull)
    assert (error.limit, error.retry_after_ms) == (40, hint_ms)


# behaviour 27
def test_the_hint_grows_while_nothing_starts() -> None:
    driver = Driver(queue_max=2, step_rows_max=1, steps_in_flight_max=1)
    driver.add_worker(16)
    driver.submit([1], max_tokens=1)
    driver.turn()
    driver.submit([1])
    driver.submit([1])
    for seconds, hint_ms in ((0, 10), (3, 3000), (60, 60_000), (600, 60_000)):
        driver.advance(seconds * 1_000_000 - (driver.now_us - 1_000_000))
        error = driver.refused(driver.submit_message([1]), QueueFull)
        assert error.retry_after_ms == hint_ms


# ---------------------------------------------------------------------------------------- against a naive model


class Naive:
    """The same queue, sorted anew on each query."""

    def __init__(self, ageing_us: int, weights: dict[int, float]) -> None:
        self.ageing_us, self.weights = ageing_us, weights
        self.held: list[Request] = []
        self.service = dict.fromkeys(weights, 0.0)
        self.virtual = 0.0

    def order(self) -> Iterator[Request]:
        yield from sorted((r for r in self.held if r.admitted_order), key=lambda r: r.admitted_order)
        fresh = [r for r in self.held if not r.admitted_order]
        service = dict(self.service)
        while fresh:
            tenant = min({r.tenant for r in fresh}, key=lambda t: (service[t], t))
            mine = [r for r in fresh if r.tenant == tenant]
            first = min(mine, key=lambda r: (r.submitted_us - r.priority * self.ageing_us, r.id))
            service[tenant] = service[tenant] + first.prompt.size / self.weights[tenant]
            fresh.remove(first)
            yield first

    def add(self, request: Request) -> None:
        if not any(r.tenant == request.tenant and not r.admitted_order for r in self.held):
            self.service[request.tenant] = max(self.service[request.tenant], self.virtual)
        self.held.append(request)

    def take(self, request: Request) -> None:
        if not request.admitted_order:
            self.virtual = max(self.virtual, self.service[request.tenant])
        self.held.remove(request)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 3), st.integers(-2, 2), st.integers(0, 25), st.integers(1, 9)),
    st.tuples(st.just("start"), st.integers(0, 3), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("back"), st.integers(0, 9), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("remove"), st.integers(0, 9), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("charge"), st.integers(1, 3), st.integers(1, 50), st.just(0), st.just(0)),
)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(st.lists(ACTIONS, max_size=60))
def test_the_queue_agrees_with_a_naive_one(actions: list[tuple[str, int, int, int, int]]) -> None:
    limits = make_limits(ageing_us=10, tenants_max=3, quotas={"x": Quota(weight=2.0), "y": Quota(weight=0.5)})
    tenants = Tenants(limits)
    for name in ("x", "y", "z"):
        tenants.intern(name)
    queue, naive = WaitingQueue(Clock(), limits, tenants), Naive(10, {1: 2.0, 2: 0.5, 3: 1.0})
    running: list[Request] = []
    now_us = ids = started = 0
    for what, number, priority, later_us, size in actions:
        if what == "add":
            ids += 1
            now_us += later_us
            message = Submit(rid=1, max_tokens=1, sampling=GREEDY, priority=priority)
            request = Request(ids, 1, number, "t", int32([1] * size), message, 1, now_us, 0, 1 << 40)
            queue.add(request)
            naive.add(request)
        elif what == "start" and naive.held:
            request = list(naive.order())[min(number, len(naive.held) - 1)]
            queue.start(request)
            naive.take(request)
            if not request.admitted_order:
                started += 1
                request.admitted_order = started
            running.append(request)
        elif what == "back" and running:
            request = running.pop(number % len(running))
            queue.put_back(request)
            naive.held.append(request)
        elif what == "remove" and naive.held:
            request = naive.held.pop(number % len(naive.held))
            queue.remove(request)
        elif what == "charge":
            queue.charge(number, priority)
            naive.service[number] += priority / naive.weights[number]
        queue.check_invariants()
        assert [r.id for r in queue] == [r.id for r in naive.order()]
        assert len(queue) == len(naive.held)
        assert bool(queue) == bool(naive.held)
        counts = [sum(r.tenant == tenant for r in naive.held) for tenant in (1, 2, 3)]
        assert [queue.by_tenant()[tenant] for tenant in (1, 2, 3)] == counts
