"""How many drafts a step verifies: as many as pay, by what steps took."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvforge.coordinator.core.cache.costs import UNIT
from kvforge.coordinator.core.cache.row_costs import RowCosts
from kvforge.coordinator.core.scheduling.draft_chances import Chances, learned, likeliest, observed, rank, run_of
from kvforge.coordinator.core.scheduling.draft_choice import CERTAIN, best, choose, pays, put_off
from kvforge.protocol.messages import StepResult
from tests.coordinator.driver import Driver, FakeWorker, continuation
from tests.coordinator.test_drafts import Drafter, drafted, state_of

STEP_US, TOKENS = 1000, 200
# Tests that measure hundreds of steps check invariants after every seventh event: an odd number, so that both turns and
# results are checked. Tests of the drafts themselves check each event.
SOME = 7


def costs(row_us: int, way_us: int = 0) -> RowCosts:
    """Return costs as measured of steps of 1 to 16 rows, the larger ones with drafts."""
    found = RowCosts()
    for rows in (1, 16, 4, 8, 2, 16, 1):
        took_us = STEP_US + row_us * rows
        found.add(1, rows - 1, took_us, took_us + way_us * (rows > 1))
    return found


@pytest.mark.parametrize(
    ("results", "first", "later"),
    [
        ([(4, 4)] * 30, range(960, CERTAIN + 1), range(960, CERTAIN + 1)),
        ([(4, 0)] * 30, range(33), range(512, 513)),  # nothing is known of drafts behind an accepted one
        ([(1, 1), (1, 0)] * 60, range(440, 580), range(512, 513)),
        ([(8, 3)] * 60, range(960, CERTAIN + 1), range(610, 690)),  # two accepted of three that were tried
        ([(16, 16), (16, 1)] * 60, range(960, CERTAIN + 1), range(850, 950)),  # 15 of 16: each token counts
        ([(8, 8), (8, 0)] * 60, range(440, 580), range(960, CERTAIN + 1)),  # a run begins half the time, and goes on
    ],
)
def test_chances_follow_what_was_accepted(results: list[tuple[int, int]], first: range, later: range) -> None:
    chances = (512, 512)
    for number, accepted in results:
        chances = learned(chances, number, accepted)
    assert chances[0] in first and chances[1] in later


def test_each_draft_needs_those_before_it() -> None:
    assert run_of((CERTAIN // 2, CERTAIN // 2), 4) == [512, 256, 128, 64]
    assert run_of((CERTAIN // 4, CERTAIN), 3) == [256] * 3


@pytest.mark.parametrize(
    ("row_us", "way_us", "chance", "count"),
    [
        (0, 0, 900, 8),  # rows that cost nothing: all
        (10, 0, 900, 8),
        (100, 0, 512, 2),  # 1.75 tokens in 1,300 us; 1.875 in 1,400 are fewer in a second
        (10, 500, 512, 6),
        (10, 1500, 512, 0),  # the way of the result costs more than all drafts gain
        (50_000, 0, 900, 0),  # each row costs as much as the first
        (30_000, 0, 1000, 0),  # a gain of less than a sixteenth
    ],
)
def test_as_many_drafts_as_pay(row_us: int, way_us: int, chance: int, count: int) -> None:
    assert best(costs(row_us, way_us), 1, rank([run_of((chance, chance), 8)])) == count


@pytest.mark.parametrize("seed", range(200))
def test_no_other_number_of_drafts_is_better(seed: int) -> None:
    """The bisection finds what a trial of each number finds: the first one with the most tokens in a time."""
    draw = random.Random(seed)
    found, rows, margin = costs(draw.choice((0, 5, 60, 3000)), draw.choice((0, 300, 2000))), draw.choice((1, 16)), 4
    runs = {slot: run_of(drawn(draw), draw.randrange(1, 17)) for slot in draw.sample(range(99), draw.randrange(1, 20))}
    each = sorted(((chance, slot) for slot, run in runs.items() for chance in run), key=lambda draft: -draft[0])
    chances = [chance for chance, _ in each]
    count, most, least = 0, rows * CERTAIN * (margin + 1), found.of(rows) * margin
    for number in range(1, len(chances) + 1):
        tokens, took = rows * CERTAIN + sum(chances[:number]), found.of(rows, 1) + (number - 1) * found.line.token
        if tokens * least > most * took:
            count, most, least = number, tokens, took
    ranked = rank([*runs.values()])
    assert best(found, rows, ranked, margin=margin) == count
    for chosen in (0, count, len(chances) // 2, len(chances)):
        numbers = Counter(slot for _, slot in each[:chosen])
        assert [*likeliest(runs, ranked, chosen).items()] == [*numbers.items()]


def drawn(draw: random.Random) -> Chances:
    """Return chances, some of which are often equal."""
    values = (0, 512, 1000, CERTAIN, draw.randrange(CERTAIN))
    return draw.choice(values), draw.choice(values)


def test_a_cost_is_that_of_all_rows_and_of_the_way_of_a_result_with_drafts() -> None:
    found = costs(100, 500)
    assert found.of(12) == pytest.approx(UNIT * 2200, rel=0.03)
    assert found.of(4, 8) == pytest.approx(UNIT * 2700, rel=0.03)


def test_costs_are_known_once_both_kinds_of_steps_were_measured() -> None:
    found = RowCosts()
    assert not found.is_known and not found.has_times
    found.add(4, 0, 1000, 1000)
    assert not found.is_known and found.has_times
    found.add(4, 2, 1000, 1500)
    assert found.is_known


@pytest.mark.parametrize(
    ("step", "drafts_from", "wait", "count"),
    [(63, 0, 16, 0), (64, 0, 16, 0), (63, 48, 96, 1), (64, 48, 96, 1), (63, 48, 48, 0)],
)
def test_a_trial_after_the_longest_wait_comes_before_the_step_of_32_without_drafts(
    step: int, drafts_from: int, wait: int, count: int
) -> None:
    (group,) = timed(8, 50_000, 0, 1.0)[0].machine.cache.groups.values()
    group.row_costs, group.last_step, group.drafts_from, group.draft_wait = costs(50_000), step - 1, drafts_from, wait
    assert sum(choose(group, 1, {0: 8}, {0: (900, 900)}).values()) == count


def test_the_second_step_with_drafts_comes_after_any_wait() -> None:
    """The first one may have taken several times as long as others, as where a graph is captured."""
    (group,) = timed(8, 50_000, 0, 1.0)[0].machine.cache.groups.values()
    group.last_step, group.drafts_from, group.draft_wait = 20, 10, 4
    for measured, count in ((1, 1), (2, 0)):
        group.row_costs = RowCosts()
        group.row_costs.add(1, 0, 50_000, 50_000)
        for _ in range(measured):
            group.row_costs.add(1, 8, 450_000, 450_000)
        assert sum(choose(group, 1, {0: 8}, {0: (900, 900)}).values()) == count
        group.drafts_from = 10


def test_chances_follow_proposals_that_no_step_verified() -> None:
    """Nine of ten are right to their eighth token, and the tenth is wrong at once."""
    chances = (512, 512)
    for number in range(60):
        for place in range(8):
            chances = observed(chances, place, is_right=number % 10 != 0)
            if number % 10 == 0:
                break
    assert chances[0] in range(800, 1000) and chances[1] > 1000
    for _ in range(30):
        chances = observed(chances, 0, is_right=False)
    assert chances[0] < 33 and chances[1] > 1000


def test_proposals_are_not_waited_for_where_free_drafts_would_not_pay() -> None:
    (group,) = timed(8, 5, 0, 1.0)[0].machine.cache.groups.values()
    group.row_costs = costs(5)
    assert pays(group, 1, {0: 8}, {0: (512, 512)})
    assert not pays(group, 1, {0: 8}, {0: (30, 512)}) and not group.draft_wait, "not even a trial"
    assert not pays(group, 16, {0: 8}, {0: (512, 512)}), "the gain is shared by 16 rows"
    group.row_costs = RowCosts()
    assert pays(group, 1, {0: 8}, {0: (512, 512)}), "costs are to be measured"


def test_steps_without_drafts_are_measured_before_a_second_one_with_some() -> None:
    """As at the start of a worker, if all decodes were beside prompts."""
    (group,) = timed(8, 5, 0, 1.0)[0].machine.cache.groups.values()
    group.row_costs = RowCosts()
    wanted, chances = {0: 8}, {0: (900, 900)}
    assert sum(choose(group, 1, wanted, chances).values()) == 8, "no step was measured"
    group.row_costs.add(1, 8, 1000, 1500)
    assert choose(group, 1, wanted, chances) == {}
    group.row_costs.add(1, 0, 1000, 1500, alone=True)
    assert group.row_costs.plain_way == 500 * UNIT
    group.row_costs.add(1, 0, 1000, 1000)
    assert group.row_costs.plain_way == 0, "at once"
    assert sum(choose(group, 1, wanted, chances).values()) == 8


def test_a_step_alone_without_drafts_tells_the_way_of_one_with_drafts() -> None:
    found = RowCosts()
    found.add(1, 0, 1000, 4000, alone=True)
    assert found.is_known and found.of(1, 3) > 3000 * UNIT
    found.add(1, 2, 1000, 1500)
    assert found.drafted_way < 3000 * UNIT


def test_one_slow_step_does_not_decide_what_drafts_cost() -> None:
    """The first step of a worker on an H200 took twice as long as others, and its way five times as long."""
    found = RowCosts()
    found.add(1, 0, 8178, 17_111, alone=True)
    found.add(1, 0, 4400, 6000, alone=True)
    assert found.drafted_way == 1600 * UNIT
    found.add(1, 2, 4400, 24_000)
    assert found.drafted_way == 1600 * UNIT, "one alone may be slow"
    found.add(1, 0, 4400, 4900, alone=True)
    assert found.drafted_way == 1600 * UNIT, "a step alone without drafts counts until there is one with some"
    found.add(1, 2, 4400, 5200)
    found.add(1, 2, 4400, 24_000)
    found.add(1, 2, 4400, 5200)
    assert found.drafted_way == pytest.approx((7 * (7 * 1600 + 1600) // 8 + 19_600) // 8 * UNIT, rel=0.3)
    for _ in range(40):
        found.add(1, 2, 4400, 12_400)
    assert found.drafted_way > 7500 * UNIT, "of many steps, the longer way counts"


def test_behind_a_step_in_flight_a_proposal_loses_its_first_token() -> None:
    """At 512 each, 8 drafts give 1 token in the mean, and 7 behind a right one give a half."""
    driver, _ = timed(8, 5, 0, 1.0)
    (group,) = driver.machine.cache.groups.values()
    group.row_costs = costs(5, 700)
    assert pays(group, 1, {0: 8}, {0: (512, 512)})
    driver.submit([10, 2, 3, 4], 50)
    driver.turn()
    assert group.sent
    assert not pays(group, 1, {0: 8}, {0: (512, 512)})
    group.draft_wait = group.drafts_from = 0
    assert pays(group, 1, {0: 8}, {0: (512, 512)}, goes_on=True), "the steps behind it lose none"


@pytest.mark.parametrize(
    ("trial_from", "wait", "expected"), [(40, 16, (32, 82)), (40, 1024, (1024, 1074)), (0, 16, (16, 0))]
)
def test_a_trial_without_proposals_is_put_off(trial_from: int, wait: int, expected: tuple[int, int]) -> None:
    (group,) = timed(8, 5, 0, 1.0)[0].machine.cache.groups.values()
    group.drafts_from, group.draft_wait, group.last_step = trial_from, wait, 49
    put_off(group)
    assert (group.draft_wait, group.drafts_from) == expected


@pytest.mark.parametrize(("row_us", "longest"), [(5, 4), (250, 19), (50_000, 94)])
def test_trials_that_find_nothing_take_a_96th_of_the_time(row_us: int, longest: int) -> None:
    (group,) = timed(8, row_us, 0, 1.0)[0].machine.cache.groups.values()
    group.row_costs, waits = costs(row_us), []
    for _ in range(12):
        group.last_step, group.drafts_from = 0, 0
        assert choose(group, 1, {0: 8}, {0: (1, 1)}) == {}
        waits.append(group.draft_wait)
    assert waits[0] == 4 and waits[-1] == pytest.approx(longest, abs=1) and waits == sorted(waits)


class TimedDrafter(Drafter):
    """A worker with steps of a fixed time and a time for each row. Some of its drafts are wrong; below 0: all are."""

    row_us, right = 0, 1.0

    def propose(self, slot: int, context: int) -> list[int]:
        self.wrong = -1 if context % 1000 < 1000 * self.right else context % 3 if self.right >= 0 else 0
        return super().propose(slot, context)

    def execute(self, step: Any) -> StepResult:
        """Execute a step, and report what it takes."""
        result = super().execute(step)
        fields = {name: getattr(result, name) for name in result.__struct_fields__ if name != "duration_us"}
        return StepResult(**fields, duration_us=STEP_US + self.row_us * int(step.counts.sum()))


class TimedDriver(Driver):
    """A driver with such workers. Its clock moves by each step, and by the way of a result that the next waits for."""

    worker_type = TimedDrafter
    way_us = 0

    def report(self, worker: FakeWorker, result: Any) -> Any:
        """Deliver a result after its time."""
        group = next(iter(self.machine.cache.groups.values()))
        alone = group.sent[0].sent_us >= group.result_us  # else the worker had it before the result of the step before
        self.advance(result.duration_us + (self.way_us if alone else 0))
        return super().report(worker, result)


ROOM = {"step_rows_max": 96, "step_tokens_max": 96, "draft_rows_max": 96, "sequences_max": 96, "block_size": 8}
ROOM |= {"blocks_max": 4096, "blocks_per_sequence_max": 256, "steps_in_flight_max": 2}


def timed(
    drafts: int, row_us: int, way_us: int, right: float, kind: type[TimedDrafter] = TimedDrafter
) -> tuple[TimedDriver, TimedDrafter]:
    """Return a driver and its worker."""
    driver = TimedDriver(drafts_max=drafts, **ROOM)
    driver.way_us, driver.worker_type = way_us, kind
    worker = driver.add_worker(4096)
    assert isinstance(worker, TimedDrafter)
    worker.row_us, worker.right = row_us, right
    return driver, worker


def time_us(drafts: int, rows: int, row_us: int, way_us: int, right: float) -> tuple[int, int]:
    """Return how long requests take, and the steps with drafts."""
    driver, worker = timed(drafts, row_us, way_us, right)
    driver.check_every = SOME
    prompts = [[10 + row, 2, 3, 4] for row in range(rows)]
    first = driver.now_us
    requests = [driver.submit(prompt, TOKENS) for prompt in prompts]
    driver.run_until_idle()
    for request, prompt in zip(requests, prompts, strict=True):
        assert driver.answer_of(request) == continuation(prompt, TOKENS)
    return driver.now_us - first, sum(count > 0 for count in drafted(worker))


@pytest.mark.parametrize(
    ("rows", "row_us", "way_us", "right"),
    [
        (2, 5, 400, 0.0),
        (1, 5, 3000, 0.6),
        (2, 200, 400, 0.6),
        (2, 1000, 0, 0.6),
        (1, 1000, 400, 0.3),
        (2, 50_000, 400, 1.0),
        (16, 20, 6000, 0.6),  # two steps that overlap have more tokens than one with drafts and its way
        (16, 20, 1000, 0.6),
        (16, 5, 3000, 1.0),
    ],
)
def test_drafts_cost_at_most_a_fiftieth(rows: int, row_us: int, way_us: int, right: float) -> None:
    without, _ = time_us(0, rows, row_us, way_us, right)
    took, _ = time_us(8, rows, row_us, way_us, right)
    assert without / took >= 0.98


class PhasedDrafter(TimedDrafter):
    """Of each three stretches of a request's answer, one is drafted right, and none elsewhere."""

    stretch = 10  # tokens

    def propose(self, slot: int, context: int) -> list[int]:
        sequence = self.machine.cache.sequences
        self.right = 1.0 if (int(sequence.length[slot]) // self.stretch + slot) % 3 == 0 else -1.0
        return super().propose(slot, context)


@pytest.mark.parametrize(("stretch", "way_us"), [(10, 850), (10, 1150)])
def test_requests_that_repeat_text_in_short_stretches_lose_little(stretch: int, way_us: int) -> None:
    """Answers of agents are such. Sixteen of them lost 1 to 2 % by trials after short waits, and recorded ones 6."""
    took = []
    for drafts in (0, 8):
        driver, worker = timed(drafts, 10, way_us, 1.0, PhasedDrafter)
        assert isinstance(worker, PhasedDrafter)
        driver.check_every, worker.stretch = SOME, stretch
        requests = [driver.submit([10 + row, 2, 3, 4], TOKENS) for row in range(16)]
        first = driver.now_us
        driver.run_until_idle()
        took.append(driver.now_us - first)
        for row, request in enumerate(requests):
            assert driver.answer_of(request) == continuation([10 + row, 2, 3, 4], TOKENS)
    assert took[0] / took[1] >= 0.993


def test_steps_overlap_while_proposals_are_wrong_and_do_not_once_they_are_right() -> None:
    """The proposals of each result are compared with the next token: no step has to verify them for that."""
    driver, worker = timed(8, 5, 1000, -1.0)
    request = driver.submit([10, 2, 3, 4], 900)
    (group,) = driver.machine.cache.groups.values()

    def run(tokens: int) -> tuple[int, int]:
        """Return how many steps were alone in flight, and how many had drafts, until so many tokens are known."""
        alone, before = 0, len(worker.steps)
        while len(driver.streamed.get(request, [])) < tokens:
            driver.turn()
            alone += len(group.sent) == 1
            driver.answer(worker)
        return alone, sum(count > 0 for count in drafted(worker)[before:])

    run(60)
    assert run(400) == (0, 0)
    worker.right = 1.0
    _, steps = run(800)
    assert 40 <= steps <= 70, "400 tokens, mostly drafted by eights"
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([10, 2, 3, 4], 900)


def test_a_wait_ends_once_proposals_are_right() -> None:
    """Sixteen agents on an H200 waited for up to 103 steps while proposals were right, because they had been wrong."""
    driver, worker = timed(8, 20, 1500, 0.3)
    driver.check_every = SOME
    requests = [driver.submit([10 + row, 2, 3, 4], 900) for row in range(16)]
    (group,) = driver.machine.cache.groups.values()
    while group.drafts_from < group.next_step + 20:
        driver.step()
    worker.right, first = 1.0, group.next_step
    end = group.drafts_from
    while not any(step.drafts.size for step in worker.steps[first + 2 :]):  # two are in flight
        driver.step()
    assert worker.steps[-1].step_id < end - 5
    driver.run_until_idle()
    for row, request in enumerate(requests):
        assert driver.answer_of(request) == continuation([10 + row, 2, 3, 4], 900)


def test_a_request_begins_with_the_chances_of_its_group() -> None:
    driver, worker = timed(8, 5, 1000, -1.0)
    driver.submit([10, 2, 3, 4], 300)
    driver.run_until_idle()
    before = sum(drafted(worker))
    again = driver.submit([7, 2, 3, 4], 300)
    driver.run_until_idle()
    assert sum(drafted(worker)) == before > 0
    assert state_of(driver, again).draft_chance < 33


def test_where_rows_are_cheap_drafts_make_it_three_times_as_fast() -> None:
    without, _ = time_us(0, 1, 5, 400, 1.0)
    took, _ = time_us(8, 1, 5, 400, 1.0)
    assert without / took >= 3


def test_one_step_of_32_has_no_drafts_and_tells_what_such_a_step_takes() -> None:
    """Rows become dear while drafts pay: that is seen at the next step without drafts."""
    driver, worker = timed(8, 5, 0, 1.0)
    driver.submit([10, 2, 3, 4], 900)
    while len(worker.steps) < 40:
        driver.step()
    (without,) = [step for step in worker.steps if step.step_id == 32]
    assert not without.drafts.size
    assert all(step.drafts.size for step in worker.steps if 33 < step.step_id < 40)
    worker.row_us = 50_000
    driver.run_until_idle()
    after = [step.step_id for step in worker.steps if step.step_id > 66 and step.drafts.size]
    assert len(after) <= 5 + len(worker.steps) / 94 and len(worker.steps) > 400, "tried ever more rarely"


def test_drafts_end_once_two_steps_that_overlap_have_more_tokens() -> None:
    """The way of results becomes long while drafts pay: steps without them are measured two at a time, as they run."""
    driver, worker = timed(8, 20, 0, 1.0)
    for row in range(16):
        driver.submit([10 + row, 2, 3, 4], 600)
    while len(worker.steps) < 60:
        driver.step()
    assert sum(step.drafts.size > 0 for step in worker.steps[20:]) > 35
    driver.way_us, before = 8000, len(worker.steps)
    driver.run_until_idle()
    after = worker.steps[before + 100 :]
    assert len(after) > 150
    assert sum(step.drafts.size > 0 for step in after) <= 2 + len(after) / 16


def test_where_rows_are_dear_drafts_are_tried_ever_more_rarely() -> None:
    _, steps = time_us(8, 2, 50_000, 400, 1.0)
    assert 2 <= steps <= 8, "the first, and after 4, 8, 16, 32 and 64 steps without"


@pytest.mark.parametrize(("right", "verified"), [(-1.0, False), (1.0, True)])
def test_the_first_proposal_of_a_request_is_compared_before_any_is_verified(right: float, verified: bool) -> None:
    """Wrong after a group of right ones: its chance falls below a half without a step that verifies anything."""
    driver, worker = timed(8, 5, 3000, 1.0)
    driver.submit([10, 2, 3, 4], 200)
    driver.run_until_idle()
    worker.right = right
    first, request = len(worker.steps), driver.submit([7, 2, 3, 4], 200)
    while state_of(driver, request).draft_chance < 0:
        driver.turn()
        driver.answer(worker)
    assert not sum(drafted(worker)[first:])
    assert (state_of(driver, request).draft_chance > CERTAIN // 2) == verified
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([7, 2, 3, 4], 200)
