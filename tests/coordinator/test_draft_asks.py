"""A draft model, asked by the coordinator: it is used where it gains, and costs little elsewhere.

The passes of a proposal come behind its step. They delay the result, and the worker reports what they took.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from kvforge.coordinator.core.cache.costs import DURATION_US_MAX, UNIT
from kvforge.coordinator.core.cache.draft_gains import CYCLES, PLAIN_FIRST, DraftGains, size_of
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.model_drafts import CERTAIN, RESULTS_OF, ModelDrafts, own_chance, own_counts
from kvforge.coordinator.core.cache.row_costs import RowCosts
from kvforge.coordinator.core.events import FromWorker
from kvforge.coordinator.core.scheduling import draft_choice
from kvforge.coordinator.core.scheduling.draft_asks import PLAIN_EVERY, TRIAL_FIRST, TRIAL_TOKENS, ask, tried
from kvforge.protocol.messages import WorkerHello
from tests.coordinator.driver import Driver, choose, continuation, fingerprint
from tests.coordinator.test_draft_choice import ROOM, SOME, TimedDrafter
from tests.coordinator.test_drafts import drafted
from tests.pairs import every_pair

TOKENS = 300


class AskedDrafter(TimedDrafter):
    """A worker with a draft model: each drafted token takes a pass of all rows, and is right with a chance."""

    pass_us, chance = 0, 0.8
    reported_us: int | None = None  # in place of what passes took

    def propose(self, slot: int, context: int) -> list[int]:
        return []

    def propose_asked(self, slot: int, context: int) -> list[int]:
        tokens, size = list[int](), self.model.vocab_size
        for _ in range(self.width):
            token = choose(context, size)
            is_right = (context * 2654435761 >> 7) % 1000 < 1000 * self.chance
            tokens.append(token if is_right else (token + 1) % size)
            context = fingerprint(context, token)
        return tokens

    def execute(self, step: Any) -> Any:
        """Execute a step, and report what its passes took."""
        result = super().execute(step)
        passes = int(result.draft_counts[: result.draft_model_rows].max(initial=0))
        took_us = passes * self.pass_us if self.reported_us is None else self.reported_us
        return msgspec.structs.replace(result, draft_us=took_us)


class AskedDriver(Driver):
    """A driver with such workers: a step starts when it has come, and when the device is free; its result comes later.

    `way_us` is what a step and its result take on their ways, together.
    """

    worker_type = AskedDrafter
    way_us = free_us = 0

    def step(self) -> None:
        """Run one turn, and answer the oldest step in flight."""
        self.turn()
        for worker in list(self.workers):
            if worker.inbox:
                self.answer(worker)

    def report(self, worker: Any, result: Any) -> Any:
        """Deliver a result after its time, and after its passes."""
        (group,) = self.machine.cache.groups.values()
        began_us = max(group.sent[0].sent_us + self.way_us // 2, self.free_us)
        passes_us = result.draft_us if worker.reported_us is None else 0
        self.free_us = began_us + result.duration_us + passes_us
        self.now_us = self.free_us + self.way_us // 2
        return super().report(worker, result)


def asking(drafts: int, pass_us: int, way_us: int, chance: float) -> tuple[AskedDriver, AskedDrafter]:
    """Return a driver and its worker."""
    driver = AskedDriver(drafts_max=drafts, **ROOM)
    driver.way_us, driver.model_drafts = way_us, drafts
    worker = driver.add_worker(4096)
    assert isinstance(worker, AskedDrafter)
    worker.row_us, worker.pass_us, worker.chance = 10, pass_us, chance
    return driver, worker


def time_us(drafts: int, rows: int, pass_us: int, way_us: int, chance: float, number: int = 0) -> tuple[int, int]:
    """Return how long requests take, and the steps with drafts."""
    driver, worker = asking(drafts, pass_us, way_us, chance)
    driver.check_every = SOME
    prompts = [[10 + row, 2 + number, 3, 4] for row in range(rows)]
    first = driver.now_us
    requests = [driver.submit(prompt, TOKENS) for prompt in prompts]
    driver.run_until_idle()
    for request, prompt in zip(requests, prompts, strict=True):
        assert driver.answer_of(request) == continuation(prompt, TOKENS)
    return driver.now_us - first, sum(count > 0 for count in drafted(worker))


def rounds_us(drafts: int, pass_us: int, way_us: int, chance: float, number: int, rounds: int = 3) -> list[int]:
    """Return how long each request takes, one after another, with idle time between them."""
    driver, took_us = asking(drafts, pass_us, way_us, chance)[0], []
    driver.check_every = SOME
    for each in range(rounds):
        prompt, first = [10, 2, 3 + number, 4 + each], driver.now_us
        request = driver.submit(prompt, 256)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(prompt, 256)
        took_us.append(driver.now_us - first)
        driver.advance(280_000)
    return took_us


@cache
def plain_us(way_us: int) -> int:
    """Return how long such a request takes without drafts."""
    return rounds_us(0, 0, way_us, 0.0, 0, rounds=1)[0]


@pytest.mark.parametrize(
    ("pass_us", "way_us", "chance", "gain"),
    [
        (60, 500, 0.8, 1.9),  # five passes, the step and the way: 1.85 steps for 3.7 tokens
        pytest.param(130, 500, 0.8, 1.5, marks=pytest.mark.soak),
        (130, 800, 0.8, 1.3),
        (130, 500, 0.95, 2.4),
        pytest.param(200, 500, 0.8, 1.3, marks=pytest.mark.soak),
    ],
)
def test_all_requests_gain_where_a_draft_model_is_right(pass_us: int, way_us: int, chance: float, gain: float) -> None:
    """Also the first one of a worker, in the mean of four."""
    gains = list[float]()
    for number in range(4):
        gains += [plain_us(way_us) / took for took in rounds_us(8, pass_us, way_us, chance, number)]
    assert sum(gains) / len(gains) >= gain


@pytest.mark.parametrize(
    ("pass_us", "chance", "way_us"),
    every_pair([(60, 0.0), (130, 0.3), (200, 0.0), (1000, 0.5), (1000, 0.9)], [100, 500, 1200]),
)
def test_a_draft_model_that_does_not_pay_costs_a_fiftieth(pass_us: int, chance: float, way_us: int) -> None:
    """Beside the trial of a new worker, which is part of its first request."""
    first, (trial, *took) = plain_us(way_us), rounds_us(8, pass_us, way_us, chance, 1)
    assert all(first / each >= 0.98 for each in took)
    steps = TRIAL_FIRST + 1
    assert 0.98 * (trial - steps * (way_us + TRIAL_TOKENS * (pass_us + 10))) <= first


@pytest.mark.parametrize(("rows", "way_us", "gain"), [(4, 500, 1.4), (16, 500, 1.2), (16, 200, 1.4)])
def test_many_requests_gain_together(rows: int, way_us: int, gain: float) -> None:
    without, _ = time_us(0, rows, 130, way_us, 0.8)
    took, steps = time_us(8, rows, 130, way_us, 0.8)
    assert without / took >= gain
    assert steps > TOKENS / 8


def test_many_requests_whose_rows_are_dear_have_no_drafts() -> None:
    """There are but the trials. With a way so long that two steps do not hide it, drafts gain."""
    without, _ = time_us(0, 16, 800, 1200, 0.8)
    took, steps = time_us(8, 16, 800, 1200, 0.8)
    assert steps <= 2 * TRIAL_FIRST
    assert took <= without + steps * (1200 + 4 * 800 + 16 * 4 * 10)
    assert time_us(0, 16, 200, 6000, 0.8)[0] > 1.1 * time_us(8, 16, 200, 6000, 0.8)[0]


def test_a_step_alone_is_no_measure_of_steps_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 sixteen requests lost 15 %: what a step without drafts costs had come from one that was alone.

    Nothing is asked before two steps overlapped, and then two in a row without drafts come every 128 steps.
    """
    measured, real = list[tuple[int, bool]](), RowCosts.add

    def add(self: RowCosts, rows: int, drafts: int, *times: int, alone: bool = False) -> None:
        measured.append((drafts, alone))
        real(self, rows, drafts, *times, alone=alone)

    monkeypatch.setattr(RowCosts, "add", add)
    driver, worker = asking(2, 10, 500, 1.0)
    driver.submit([10, 2, 3, 4], 900)
    driver.run_until_idle()
    first = next(number for number, (drafts, _) in enumerate(measured) if drafts)
    assert (0, False) in measured[: first - 1]
    assert measured[first:].count((0, False)) == len(worker.steps) // PLAIN_EVERY


def test_other_numbers_of_rows_are_measured_before_they_are_drafted() -> None:
    """What one request gained says little of sixteen: their way is longer, and each pass too."""
    driver, worker = asking(8, 130, 300, 0.8)
    driver.submit([10, 2, 3, 4], TOKENS)
    driver.run_until_idle()
    alone, first = len(worker.steps), driver.now_us
    assert sum(count > 0 for count in drafted(worker)) > 40
    driver.way_us, worker.pass_us = 3000, 400
    requests = [driver.submit([10 + row, 2, 3, 4], TOKENS) for row in range(16)]
    driver.run_until_idle()
    took_us = driver.now_us - first
    assert all(len(driver.answer_of(request)) == TOKENS for request in requests)
    without, _ = time_us(0, 16, 400, 3000, 0.8)
    assert without / took_us >= 0.93, "of which half is the first six steps with drafts"
    assert sum(count > 0 for count in drafted(worker)[alone:]) <= 12


def test_drafts_that_lose_are_put_off_for_longer_and_longer() -> None:
    gains = DraftGains()
    for elapsed_us in (50_000, 1000, 1010):
        assert not gains.knows(4)
        gains.add_plain(4, elapsed_us)
    assert gains.knows(5) and not gains.knows(8), "4 to 7 rows count as one number"
    assert gains.plain_us[3] == 1000
    waits, step = list[int](), 100
    for _ in range(3):
        for _ in range(CYCLES):
            assert not gains.loses(4)
            gains.add_drafted(4, 8, 2500)
        assert gains.loses(4)
        gains.put_off(4, step, 96, 8192)
        waits.append(gains.until[3] - step)
    lost_steps = CYCLES * (2500 - 2 * 1000) // 1000
    assert waits == [96 * (lost_steps + 1) << number for number in range(3)]
    for _ in range(CYCLES):
        gains.add_drafted(4, 12, 2500)
    assert not gains.loses(4) and gains.waits[3] == 0


def test_a_worker_that_reports_any_time_does_no_harm() -> None:
    """Times are bounded, so that a snapshot holds them; without a question there were no passes."""
    driver, worker = asking(8, 130, 500, 0.9)
    for number, took_us in enumerate((1 << 62, -(1 << 62), 1 << 62, 1 << 62)):
        worker.reported_us = took_us
        request = driver.submit([10 + number, 2, 3, 4], 60)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation([10 + number, 2, 3, 4], 60)
    (group,) = driver.machine.cache.groups.values()
    model = group.model_drafts
    assert 1000 <= model.gains.plain_us[1] < 2000, "of steps that asked for nothing"
    model.trial, model.trial_us = 1, 0
    for _ in range(2):
        tried(group, 1, 4, 1 << 62)
    assert model.trial_us <= 2 * DURATION_US_MAX


def test_the_wait_of_lookup_outlasts_steps_that_ask() -> None:
    (group,) = asking(8, 130, 500, 0.9)[0].machine.cache.groups.values()
    group.row_costs.add(1, 0, 1000, 1000)
    group.row_costs.add(1, 2, 1020, 1500)
    group.drafts_from, group.last_step = 900, 100
    assert draft_choice.choose(group, 1, {0: 4}, {0: (900, 900)}, asked=True)
    assert group.drafts_from == 900
    draft_choice.choose(group, 1, {0: 4}, {0: (900, 900)})
    assert group.drafts_from == 0


def test_any_number_of_rows_is_measured() -> None:
    """Steps without drafts are measured whatever their rows are."""
    gains = DraftGains()
    for rows in (1, 1 << 16, 1 << 30):
        gains.add_plain(rows, 1000)
    assert (gains.plain_seen[1], gains.plain_seen[-1]) == (1, 2)


def measured() -> Group:
    """Return a group: its steps of one row take 1,000 us, and 1,500 us with a draft. No trial is due."""
    (group,) = asking(8, 130, 500, 0.9)[0].machine.cache.groups.values()
    for drafts, elapsed_us in ((0, 1000), (1, 1500), (0, 1000), (1, 1500)):
        group.row_costs.add(1, drafts, 1000, elapsed_us)
    for _ in range(3):
        group.model_drafts.gains.add_plain(1, 1000)
    group.last_step, group.model_drafts.next_trial = 200, 10_000
    return group


def test_drafts_begin_with_a_greater_gain_than_they_go_on_with() -> None:
    """On an H200 sixteen requests about break even; drafts that began and ended at once took four steps each time."""
    group = measured()
    model = group.model_drafts
    chances, asked = (CERTAIN, 0), dict[int, tuple[int, int]]()
    for pass_us in range(0, 600, 10):
        model.pass_time = pass_us * UNIT
        asked[pass_us] = (ask(group, 1, 1, chances, True, 200), ask(group, 1, 1, chances, False, 200))
    first_off = [next(us for us, counts in asked.items() if not counts[way]) for way in (0, 1)]
    assert asked[0] == (1, 1) and asked[590] == (0, 0)
    assert first_off[0] > first_off[1], "dearer passes end the beginning first"


def test_drafts_do_not_begin_shortly_before_the_end() -> None:
    """On an H200 fifteen requests began with four tokens left, at the end of each round, and lost four steps."""
    group = measured()
    group.model_drafts.pass_time = 50 * UNIT
    chances = (CERTAIN, 0)  # two tokens in the time of 1.55
    assert [ask(group, 1, 1, chances, False, left) for left in (0, 4, 6, 7, 200)] == [0, 0, 0, 1, 1]
    assert ask(group, 1, 1, chances, True, 4) == 1, "those that have begun go on"


class SlowlyBeginning(AskedDrafter):
    """A worker whose steps take twice as long where rows begin."""

    def execute(self, step: Any) -> Any:
        result = super().execute(step)
        return msgspec.structs.replace(result, duration_us=result.duration_us * (2 if step.begins else 1))


def test_steps_that_begin_many_rows_are_no_measure() -> None:
    """On an H200 steps of 8 to 15 rows counted 6.8 ms in place of 4.9, as they began rows in each round."""
    driver = AskedDriver(drafts_max=4, **ROOM)
    driver.worker_type, driver.way_us, driver.model_drafts = SlowlyBeginning, 0, 4
    worker = driver.add_worker(4096)
    assert isinstance(worker, SlowlyBeginning)
    worker.row_us, worker.pass_us, worker.chance = 10, 2000, 0.0
    gains = next(iter(driver.machine.cache.groups.values())).model_drafts.gains
    first, most = [*range(10, 18)], 1000 + 15 * worker.row_us
    for _ in range(6):
        for row in range(0, 20, 2):
            driver.submit([*first, row], 40)  # all but the last token is cached, except in the first round
            driver.submit([*first, row + 1], 40)
            driver.step()
        for _ in range(80):
            driver.step()
            assert gains.plain_us[size_of(8)] <= 1.1 * most
        driver.run_until_idle()
    assert gains.plain_seen[size_of(8)] == PLAIN_FIRST


def test_a_slow_step_with_drafts_does_not_end_them() -> None:
    gains = DraftGains()
    for elapsed_us in (1000, 1000, 1000):
        gains.add_plain(1, elapsed_us)
    for elapsed_us in (2000, 60_000, 2000, 2000, 2000, 2000):
        gains.add_drafted(1, 3, elapsed_us)
    assert not gains.loses(1)


def test_a_dear_trial_makes_the_next_one_later() -> None:
    """On an H200 each of the first steps that asked sixteen requests computed 2,048 tokens that lacked K and V."""
    (group,) = asking(8, 130, 500, 0.9)[0].machine.cache.groups.values()
    model = group.model_drafts
    model.gains.plain_us[5], model.waits, model.next_trial, model.pass_time = 5000, 1, 400, 500 * UNIT
    model.trial = 1
    tried(group, 16, 4, 13_000)
    assert (model.next_trial, model.trial_us) == (400, 11_000)
    model.trial = 0
    tried(group, 16, 4, 11_000)
    assert (model.next_trial, model.trial_us) == (400 + 96 * 20_000 // 5000, 0)


def test_no_step_follows_one_that_asks() -> None:
    """The driver checks it with each step; here two requests come while such a step is in flight."""
    driver, worker = asking(8, 130, 500, 0.9)
    driver.submit([10, 2, 3, 4], 100)
    for _ in range(60):
        driver.turn()
        if worker.inbox and worker.inbox[-1].propose:
            break
        driver.answer(worker)
    assert worker.inbox[-1].propose
    waiting = len(worker.inbox)
    later = [driver.submit([20 + number, 2, 3], 20) for number in range(2)]
    driver.turn()
    assert len(worker.inbox) == waiting
    driver.run_until_idle()
    assert [len(driver.answer_of(request)) for request in later] == [20, 20]


def test_a_model_that_fails_is_asked_rarely() -> None:
    driver, worker = asking(8, 130, 500, 0.9)
    worker.propose_asked = lambda *_: []  # type: ignore[method-assign]
    driver.submit([10, 2, 3, 4], TOKENS)
    driver.run_until_idle()
    assert 1 <= sum(step.propose > 0 for step in worker.steps) <= 12


def test_lookup_beside_a_model_keeps_chances_of_its_own() -> None:
    driver, worker = asking(8, 130, 500, 0.9)
    worker.propose = lambda slot, context: [1] * 8  # type: ignore[method-assign]
    request = driver.submit([10, 2, 3, 4], TOKENS)
    for _ in range(30):
        driver.step()
    found = driver.machine.requests.live[request]
    (group,) = driver.machine.cache.groups.values()
    assert found.draft_by_model and group.model_drafts.first > 700
    driver.run_until_idle()


def test_proposals_that_were_not_asked_for_are_refused() -> None:
    driver, worker = asking(8, 130, 500, 0.9)
    driver.submit([10, 2, 3, 4], 20)
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    effects = driver.apply(FromWorker(worker.number, msgspec.structs.replace(result, draft_model_rows=1)))
    assert "draft_model_rows" in str(effects)


@pytest.mark.parametrize("announced", [-1, 9])
def test_more_tokens_than_drafts_are_refused_at_the_announcement(announced: int) -> None:
    driver, worker = asking(8, 130, 500, 0.9)
    driver.apply(FromWorker(7, WorkerHello(rid=1, name="another", pid=1)))
    effects = driver.apply(FromWorker(7, msgspec.structs.replace(driver.ready(worker), model_drafts=announced)))
    assert "model_drafts must be 0 to drafts = 8" in str(effects)


def test_a_groups_chances_are_those_of_all_its_results() -> None:
    model = ModelDrafts(8)
    for number in range(1000):
        model.learned(4, number % 5)  # 0 to 4 of 4 accepted, in turn
    assert model.first == pytest.approx(CERTAIN * 4 / 5, rel=0.05)
    assert model.later == pytest.approx(CERTAIN * 6 / 9, rel=0.05)  # 0 of 1, 1 of 2, 2 of 3 and 3 of 3
    assert model.first_tried < 2 * RESULTS_OF and model.later_tried < 2 * RESULTS_OF


def test_a_request_that_differs_has_chances_of_its_own() -> None:
    assert own_chance(800, 0, 0) == 800
    good = expected = 0
    for _ in range(100):
        good, expected = own_counts(good + CERTAIN, expected + 2 * CERTAIN)
    assert own_chance(800, good, expected) == pytest.approx(400, rel=0.3)
    assert own_chance(800, 2 * expected, expected) <= CERTAIN


def test_one_slow_pass_does_not_decide_what_a_pass_takes() -> None:
    model = ModelDrafts(8)
    for took_us in (40_000, 500):
        model.took(4 * took_us, 4)
    assert model.pass_time == 500 * UNIT
    for took_us in (600, 40_000, 600, 600):
        model.took(4 * took_us, 4)
    assert 500 * UNIT <= model.pass_time <= 600 * UNIT
