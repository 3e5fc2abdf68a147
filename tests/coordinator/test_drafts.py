"""Drafts: verified in one step, charged and streamed by accepted token, never indexed where they were rejected."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.scheduling.drafts import Drafts, history_sizes
from kvforge.coordinator.core.sizes import DRAFT_HISTORY_TOKENS
from kvforge.protocol.layout import GAUGES
from kvforge.protocol.messages import GENERATED, SamplingParams, StepResult, WipeTenant
from tests.coordinator.driver import GREEDY, Driver, FakeWorker, choose, continuation, fingerprint, int32

PROMPT = [10, 11, 12, 13, 20]


class Drafter(FakeWorker):
    """A worker that proposes the right tokens, but another one at place `wrong`."""

    width, wrong = 8, -1

    def propose(self, slot: int, context: int) -> list[int]:
        tokens = []
        for _ in range(self.width):
            tokens.append(choose(context, self.model.vocab_size))
            context = fingerprint(context, tokens[-1])
        if 0 <= self.wrong < self.width:
            tokens[self.wrong] = (tokens[self.wrong] + 1) % self.model.vocab_size
        return tokens


def drafting(blocks: int = 32, wrong: int = -1, drafts_max: int = 8, **limits: Any) -> tuple[Driver, Drafter]:
    driver = Driver(**{"drafts_max": drafts_max, "step_rows_max": 16, "block_size": 8, **limits})
    driver.worker_type = Drafter
    worker = driver.add_worker(blocks)
    assert isinstance(worker, Drafter)
    worker.wrong = wrong
    return driver, worker


def drafted(worker: FakeWorker) -> list[int]:
    """Return how many drafts each step has had."""
    return [int(step.drafts.sum()) for step in worker.steps]


def state_of(driver: Driver, request: int) -> Any:
    found = driver.machine.requests.known(request)
    assert found is not None
    return found


@pytest.mark.parametrize("wrong", range(-1, 5))
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_an_answer_with_drafts_is_the_answer_without(wrong: int, in_flight: int) -> None:
    driver, worker = drafting(wrong=wrong, steps_in_flight_max=in_flight)
    request = driver.submit(PROMPT, 40)
    other = driver.submit([7, 8], 30)
    driver.run_until_idle()
    assert driver.answer_of(request) == driver.streamed[request] == continuation(PROMPT, 40)
    assert driver.answer_of(other) == driver.streamed[other] == continuation([7, 8], 30)
    assert sum(drafted(worker)) == sum(state_of(driver, each).drafted_tokens for each in (request, other)) > 0


def test_accepted_drafts_take_fewer_steps_and_go_on_behind_the_last_block() -> None:
    driver, worker = drafting()
    request = driver.submit(PROMPT, 43)
    driver.run_until_idle()
    # Two steps are in flight before the first proposal, then steps of 1 + 8 tokens up to the last one.
    assert [int(step.counts.sum()) for step in worker.steps] == [5, 1, 9, 9, 9, 9, 5]
    assert driver.answer_of(request) == continuation(PROMPT, 43)


def blocks_of(driver: Driver, request: int) -> list[int]:
    found: list[int] = driver.machine.cache.sequences.blocks_of(state_of(driver, request).slot).tolist()
    return found


def until_drafts(driver: Driver, worker: FakeWorker) -> None:
    """Go on until a step with drafts is in flight."""
    while not worker.inbox or not worker.inbox[-1].drafts.size:
        if worker.inbox:
            driver.answer(worker)
        driver.turn()


@pytest.mark.parametrize("window", [(0, 0, 0), (4, 1, 30)])
def test_blocks_for_rejected_drafts_are_given_back_with_the_result(window: tuple[int, int, int]) -> None:
    driver = Driver(drafts_max=8, step_rows_max=16, block_size=4, steps_in_flight_max=1, state_blocks_max=32)
    driver.worker_type, driver.window = Drafter, window
    worker = driver.add_worker(48)
    assert isinstance(worker, Drafter)
    worker.wrong = 0
    request = driver.submit(PROMPT, 6)
    until_drafts(driver, worker)
    (group,) = driver.machine.cache.groups.values()
    s, slot = driver.machine.cache.sequences, state_of(driver, request).slot
    assert (s.length[slot], worker.inbox[-1].drafts.tolist()) == (6, [4]), "max_tokens leaves room for 4 drafts"
    before = blocks_of(driver, request)
    assert len(before) == 3, "11 tokens"
    usage, windows = group.pool.usage.sum(), s.window_end[slot]
    driver.answer(worker)
    assert s.length[slot] == 7 and blocks_of(driver, request) == before[:2]
    assert group.pool.quarantined == 0 and group.pool.usage.sum() == usage - 1 - group.window_pages
    assert s.window_end[slot] == windows - bool(group.window_pages)
    assert not driver.machine.cache.blocks.indexed[before[2]]
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT, 6)


@pytest.mark.parametrize(
    ("blocks", "quotas", "count"),
    [
        (9, {}, 1),
        (10, {}, 8),
        (32, {"small": Quota(ceiling=9)}, 1),
        (32, {"small": Quota(ceiling=10)}, 8),
        (32, {"other": Quota(floor=23)}, 1),
        (32, {"other": Quota(floor=22)}, 8),
    ],
)
def test_drafts_evict_no_sequence_and_respect_quotas(blocks: int, quotas: dict[str, Quota], count: int) -> None:
    """An idle sequence has 6 blocks and a row 2: its next token and one draft fit. 8 drafts need 2 blocks more."""
    driver, worker = drafting(blocks=blocks, block_size=4, steps_in_flight_max=1, quotas=quotas)
    sequence = driver.create(range(100, 120), tenant="small")
    driver.submit(max_tokens=1, sequence_id=sequence, tenant="small")
    driver.run_until_idle()
    answer = continuation(PROMPT, 3)
    stop = SamplingParams(temperature=0.0, seed=1, stop_tokens=(answer[2],))
    request = driver.submit(PROMPT, 30, sampling=stop, tenant="small")
    until_drafts(driver, worker)
    assert worker.inbox[-1].drafts.tolist() == [count]
    driver.run_until_idle()
    assert driver.answer_of(request) == answer
    assert driver.machine.cache.residency.evicted_total == 0 and driver.tokens(sequence)[:20] == list(range(100, 120))


def test_drafts_evict_cached_blocks() -> None:
    driver, worker = drafting(blocks=8, block_size=4, steps_in_flight_max=1)
    driver.submit(range(100, 123), 1)
    driver.run_until_idle()
    (group,) = driver.machine.cache.groups.values()
    driver.submit(PROMPT, 20)
    until_drafts(driver, worker)
    assert worker.inbox[-1].drafts.tolist() == [8] and group.pool.cached < 5


def test_drafts_beside_prompt_tokens_end_with_the_block_of_the_next_token() -> None:
    driver, worker = drafting(step_tokens_max=16, block_size=4, blocks=48)
    request = driver.submit(PROMPT, 40)
    for _ in range(3):
        driver.step()
    driver.submit(range(100, 150), 1)
    driver.run_until_idle()
    ends = {True: list[int](), False: list[int]()}
    for step in worker.steps:
        if step.drafts.size and step.drafts[0]:
            next_token, last_draft = int(step.starts[0]) + 1, int(step.starts[0] + step.counts[0])
            ends[step.slots.size > 1].append(last_draft // 4 - next_token // 4)
    assert ends[True] and not any(ends[True]) and any(ends[False])
    assert driver.answer_of(request) == continuation(PROMPT, 40)


@pytest.mark.parametrize("waits", [False, True])
def test_drafts_get_no_block_while_a_request_waits(waits: bool) -> None:
    driver, worker = drafting(blocks=12, block_size=4, steps_in_flight_max=1)
    request = driver.submit(PROMPT, 30)
    driver.turn()
    other = driver.submit(range(100, 143), 2) if waits else 0
    until_drafts(driver, worker)
    assert worker.inbox[-1].drafts.tolist() == [1 if waits else 8]
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT, 30)
    assert not waits or driver.answer_of(other) == continuation(list(range(100, 143)), 2)


def test_a_rejected_draft_is_neither_indexed_nor_computed() -> None:
    driver, worker = drafting(wrong=1, steps_in_flight_max=1)
    request = driver.submit(PROMPT, 30)
    s = driver.machine.cache.sequences
    rejected = 0
    while request in driver.machine.requests.live:
        driver.turn()
        (step,) = worker.inbox
        before = state_of(driver, request).slot
        driver.answer(worker)
        if request in driver.machine.requests.live:
            slot = state_of(driver, request).slot
            assert slot == before
            assert s.computed[slot] == s.scheduled[slot] == s.length[slot] - 1
            assert s.hashed[slot] <= s.computed[slot] // s.block_size
            rejected += int(step.drafts.sum())
    assert rejected > 0
    # Another request hits what was computed, and continues with the same tokens.
    text = [*PROMPT, *driver.answer_of(request)]
    again = driver.submit(text, 6)
    driver.run_until_idle()
    assert driver.request(again).cached_tokens >= len(text) - 8
    assert driver.answer_of(again) == continuation(text, 6)


def test_a_step_with_drafts_has_generated_tokens_behind_the_known_one() -> None:
    driver = Driver(drafts_max=3, step_rows_max=16, block_size=8)
    driver.worker_type, driver.wants_kinds = Drafter, True
    worker = driver.add_worker(32)
    driver.submit(PROMPT[:3], 12)
    driver.run_until_idle()
    step = next(step for step in worker.steps if step.drafts.size)
    answer = continuation(PROMPT[:3], 12)
    at = int(step.starts[0]) - 3
    assert step.samples.tolist() == [1]
    assert step.tokens.tolist() == [token + GENERATED for token in answer[at : at + int(step.counts[0])]]


def test_rows_come_in_the_order_decodes_drafts_chunks() -> None:
    driver, worker = drafting(step_tokens_max=12)
    loud, quiet = driver.submit(PROMPT, 30), driver.submit([3, 4], 30)
    driver.turn()
    assert state_of(driver, loud).slot < state_of(driver, quiet).slot, "drafts change the order"
    quiet_slot = state_of(driver, quiet).slot
    propose = worker.propose
    worker.propose = lambda slot, context: [] if slot == quiet_slot else propose(slot, context)  # type: ignore[method-assign]
    for _ in range(3):
        driver.step()
    driver.submit(range(100, 130), 2)
    driver.run_until_idle()
    mixed = [step for step in worker.steps if step.drafts.size and step.slots.size == 3]
    assert mixed
    for step in mixed:
        assert step.drafts[0] == step.drafts[2] == 0 < step.drafts[1]
        assert step.counts[0] == 1 and step.counts[1] == 1 + step.drafts[1] and step.counts[2] > 1
    assert driver.answer_of(loud) == continuation(PROMPT, 30)
    assert driver.answer_of(quiet) == continuation([3, 4], 30)


@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_ends_the_request_wherever_it_is_accepted(place: int) -> None:
    answer = continuation(PROMPT, 20)
    driver, _ = drafting()
    request = driver.submit(PROMPT, 20, sampling=SamplingParams(temperature=0.0, seed=1, stop_tokens=(answer[place],)))
    driver.run_until_idle()
    assert driver.ended[request].reason == "stop"
    assert driver.answer_of(request) == driver.streamed[request] == answer[: place + 1]
    assert driver.machine.requests.generated_tokens_total == place + 1


@pytest.mark.parametrize("most", range(1, 12))
def test_no_draft_goes_beyond_max_tokens(most: int) -> None:
    driver, _ = drafting()
    request = driver.submit(PROMPT, most)
    driver.run_until_idle()
    assert driver.ended[request].reason == "length"
    assert driver.answer_of(request) == driver.streamed[request] == continuation(PROMPT, most)


def test_a_tenant_pays_for_each_accepted_token_and_for_no_rejected_one() -> None:
    services = []
    for drafts_max, wrong in ((0, -1), (8, -1), (8, 2)):
        driver, worker = drafting(wrong=wrong, drafts_max=drafts_max)
        driver.submit(PROMPT, 33)
        driver.run_until_idle()
        services.append(float(driver.machine.cache.tenants.service.sum()))
        assert driver.machine.requests.generated_tokens_total == 33
        assert bool(sum(drafted(worker))) == bool(drafts_max)
    assert services[0] == services[1] == services[2] > 0


@pytest.mark.parametrize(("wrong", "chances"), [(0, (0, 512)), (2, (1000, 480)), (-1, (1000, 1000))])
def test_a_request_learns_whether_its_first_draft_and_those_behind_it_are_accepted(
    wrong: int, chances: tuple[int, int]
) -> None:
    """None is, the first two of eight are, and all are."""
    driver, worker = drafting(wrong=wrong, block_size=64, blocks_per_sequence_max=8)
    request = driver.submit(PROMPT, 400)
    driver.run_until_idle()
    found = state_of(driver, request)
    assert (found.draft_chance, found.draft_later) == pytest.approx(chances, abs=32)
    assert max(drafted(worker)) == 8, "no step took any time: all proposals are verified"
    assert driver.answer_of(request) == continuation(PROMPT, 400)


def test_many_rows_leave_no_room_for_drafts_and_overlap_their_steps() -> None:
    driver, worker = drafting(draft_rows_max=4, steps_in_flight_max=2)
    requests = [driver.submit([*PROMPT, each], 12 + each * 8) for each in range(4)]
    for _ in range(3):
        driver.turn()
        driver.answer(worker)
    driver.turn()
    assert len(worker.inbox) == 2
    driver.run_until_idle()
    assert sum(drafted(worker)) > 0, "the last ones are few enough"
    assert all(not step.drafts.size for step in worker.steps if step.slots.size == 4)
    for each, request in enumerate(requests):
        assert driver.answer_of(request) == continuation([*PROMPT, each], 12 + each * 8)


def test_no_step_follows_while_a_proposal_waits_or_drafts_are_in_flight() -> None:
    driver, worker = drafting(steps_in_flight_max=2, block_size=32, blocks_per_sequence_max=4)
    driver.submit(PROMPT, 30)
    driver.turn()
    driver.turn()
    assert [step.counts.tolist() for step in worker.inbox] == [[5], [1]]
    driver.answer(worker)
    driver.turn()
    assert len(worker.inbox) == 1, "the proposal waits for the step in flight"
    driver.answer(worker)
    driver.turn()
    driver.turn()
    assert [step.drafts.tolist() for step in worker.inbox] == [[8]]


def test_a_row_that_a_prompt_preempts_leaves_its_step_with_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    real = Drafts.choose

    def choose(self: Drafts, *arguments: Any) -> Any:
        drafts = real(self, *arguments)
        chosen.extend(map(len, drafts.values()))
        return drafts

    monkeypatch.setattr(Drafts, "choose", choose)
    driver, worker = drafting(blocks=8, block_size=4, step_tokens_max=8, steps_in_flight_max=1)
    text = list(range(100, 116))
    old, young = driver.submit(text, 6), driver.submit(PROMPT[:3], 12)
    driver.run_until_idle()
    assert sum(chosen) > sum(drafted(worker)), "no row was preempted after its drafts had been chosen"
    assert driver.answer_of(old) == continuation(text, 6)
    assert driver.answer_of(young) == continuation(PROMPT[:3], 12)


@pytest.mark.parametrize("how", ["cancel", "lose"])
def test_a_proposal_ends_with_the_run_of_its_row(how: str) -> None:
    driver, worker = drafting(steps_in_flight_max=2, block_size=32, blocks_per_sequence_max=4)
    request = driver.submit(PROMPT, 30)
    driver.turn()
    driver.turn()
    driver.answer(worker)
    (group,) = driver.machine.cache.groups.values()
    assert list(group.proposals) == [state_of(driver, request).slot]
    if how == "cancel":
        driver.cancel(request)
        assert not group.proposals
        other = driver.submit([9, 8, 7], 12)
        driver.run_until_idle()
        assert driver.answer_of(other) == continuation([9, 8, 7], 12)
    else:
        driver.lose(worker)
        driver.add_worker(32)
        assert not any(group.proposals for group in driver.machine.cache.groups.values())
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(PROMPT, 30)


def test_a_preempted_request_drops_its_proposal_and_continues() -> None:
    driver, _ = drafting(blocks=8, kept_per_tenant_max=1)
    requests = [driver.submit([*PROMPT, each], 24) for each in range(3)]
    driver.run_until_idle()
    assert driver.machine.requests.preemptions_total > 0
    assert all(driver.answer_of(r) == continuation([*PROMPT, each], 24) for each, r in enumerate(requests))


@pytest.mark.parametrize("event", ["cancel", "lose", "fork"])
def test_what_happens_while_drafts_are_in_flight_leaves_no_wrong_token(event: str) -> None:
    driver, _ = drafting(steps_in_flight_max=1, wrong=3)
    second = driver.add_worker(32) if event == "lose" else None
    sequence = driver.create(PROMPT)
    request = driver.submit(max_tokens=30, sequence_id=sequence)
    busy = next(each for each in driver.workers if driver.turn() is None or each.inbox)
    while not busy.inbox or not busy.inbox[-1].drafts.size:
        if busy.inbox:
            driver.answer(busy)
        driver.turn()
    if event == "cancel":
        driver.cancel(request)
        got = driver.tokens(sequence)
        request = driver.submit(max_tokens=9, sequence_id=sequence)
        driver.run_until_idle()
        assert driver.tokens(sequence) == [*got, *continuation(got, 9)]
    elif event == "lose":
        driver.lose(busy)
        assert second is not None
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(PROMPT, 30)
    else:
        (child,) = driver.fork(sequence)
        text = driver.tokens(child)
        other = driver.submit(max_tokens=20, sequence_id=child)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(PROMPT, 30)
        assert driver.answer_of(other) == continuation(text, 20)


def test_models_with_a_recurrent_state_get_no_drafts() -> None:
    driver = Driver(drafts_max=4, state_blocks_max=32)
    driver.wants_kinds = True
    for driver.state_blocks, driver.window in ((2, (0, 0, 0)), (0, (4, 1, 18)), (0, (0, 0, 0))):
        worker = driver.add_worker(40)
        driver.submit(PROMPT, 8)
        driver.turn()
        drafts = 0 if driver.state_blocks else 4
        assert [group.drafts for group in driver.machine.cache.groups.values()] == [drafts]
        assert {begin.drafts for step in worker.steps for begin in step.begins} == {drafts}
        driver.lose(worker)


def in_flight() -> tuple[Driver, Drafter, StepResult]:
    """Return a worker that executes a step with drafts, and the right result."""
    driver, worker = drafting(steps_in_flight_max=1, block_size=32, blocks_per_sequence_max=4)
    driver.submit(PROMPT, 30)
    while not worker.inbox or not worker.inbox[-1].drafts.size:
        if worker.inbox:
            driver.answer(worker)
        driver.turn()
    return driver, worker, worker.execute(worker.inbox.popleft())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("many", "10 tokens for a row with 8 drafts"),
        ("other", "a token is not the draft that another one follows"),
        ("vocabulary", "outside the vocabulary"),
        ("apart", "not together"),
        ("negative", "tokens for a row with 0 drafts"),
        ("short", "differ in length"),
    ],
)
def test_a_result_that_does_not_fit_the_drafts_ends_the_worker(fault: str, message: str) -> None:
    driver, worker, good = in_flight()
    slots, tokens = good.slots.tolist(), good.tokens.tolist()
    if fault == "many":
        slots, tokens = [*slots, slots[0]], [*tokens, 1]
    elif fault == "other":
        tokens[1] += 1
    elif fault == "vocabulary":
        tokens[-1] = 1000
    elif fault == "apart":
        slots = [slots[0], 9, *slots[2:]]
    elif fault == "negative":
        slots = [-1] * len(slots)
    else:
        tokens.pop()
    logprobs = np.zeros(len(slots), np.float32)
    bad = StepResult(good.step_id, good.epoch, slots=int32(slots), tokens=int32(tokens), logprobs=logprobs)
    driver.report(worker, bad)
    assert message in worker.dropped
    assert driver.machine.requests.generated_tokens_total < 4


def test_a_row_with_drafts_without_a_token_fails() -> None:
    driver, worker, good = in_flight()
    driver.report(worker, StepResult(good.step_id, good.epoch))
    driver.turn()
    assert not worker.dropped
    (ended,) = driver.ended.values()
    assert ended.error is not None and "returned no token" in ended.error.message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_counts": [9]}, "differ in length"),
        ({"draft_counts": [9], "draft_tokens": [1] * 9}, "1 to the announced drafts"),
        ({"draft_counts": [0], "draft_tokens": []}, "1 to the announced drafts"),
        ({"draft_slots": [7]}, "distinct rows with a token"),
        ({"draft_tokens": [-1] * 8}, "outside the vocabulary"),
        ({"draft_slots": []}, "differ in length"),
    ],
)
def test_a_malformed_proposal_ends_the_worker(changed: dict[str, list[int]], message: str) -> None:
    driver, worker, good = in_flight()
    assert good.draft_counts.tolist() == [8]
    driver.report(worker, msgspec.structs.replace(good, **{name: int32(values) for name, values in changed.items()}))
    assert message in worker.dropped


@pytest.mark.parametrize("drafts", [-1, 3])
def test_a_worker_that_drafts_more_than_is_verified_is_refused(drafts: int) -> None:
    driver = Driver(drafts_max=2)
    ready = driver.ready
    driver.ready = lambda worker: msgspec.structs.replace(ready(worker), drafts=drafts)  # type: ignore[method-assign]
    worker = driver.add_worker(8)
    assert f"drafts must be 0 to schedule.drafts_max = 2, not {drafts}" in worker.dropped


@pytest.mark.parametrize("field", ["draft_rows_max", "step_rows_max", "step_tokens_max", "sequences_max"])
def test_drafts_have_room_in_the_smallest_of_four_limits(field: str) -> None:
    sizes = {"draft_rows_max": 50, "step_rows_max": 50, "step_tokens_max": 50, "sequences_max": 50}
    assert Driver(**sizes | {field: 7}).machine.limits.draft_rows_max == 7


def test_requests_are_drafted_by_default() -> None:
    driver = Driver()
    driver.worker_type = Drafter
    worker = driver.add_worker(32)
    request = driver.submit(PROMPT, 40)
    driver.run_until_idle()
    assert [group.drafts for group in driver.machine.cache.groups.values()] == [16]
    assert sum(drafted(worker)) == state_of(driver, request).drafted_tokens > 0


def test_a_row_begins_with_the_ends_of_its_prompt_and_answer() -> None:
    driver, worker = drafting()
    request = driver.submit(PROMPT, 4)
    driver.run_until_idle()
    (begin,) = [begin for step in worker.steps for begin in step.begins]
    assert (begin.prompt_history, begin.generated_history, begin.drafts) == (5, 0, 8)
    assert worker.steps[0].history.tolist() == PROMPT
    assert driver.answer_of(request) == continuation(PROMPT, 4)
    cap, penalised = DRAFT_HISTORY_TOKENS, SamplingParams(repetition_penalty=2.0)
    assert history_sizes(GREEDY, 7, 5, 0) == (0, 0)
    assert history_sizes(GREEDY, cap + 7, cap + 5, 1) == (cap, cap)
    assert history_sizes(penalised, cap + 7, cap + 5, 1) == (cap + 7, cap + 5)
    assert history_sizes(SamplingParams(presence_penalty=1.0), cap + 7, cap + 5, 1) == (cap, cap + 5)
    assert history_sizes(SamplingParams(presence_penalty=1.0), 7, 5, 0) == (0, 5)


def test_what_was_drafted_and_accepted_is_counted_and_explained() -> None:
    driver, worker = drafting(wrong=2, block_size=64, blocks_per_sequence_max=4, steps_in_flight_max=1)
    request = driver.submit(PROMPT, 12)
    quiet = driver.submit([1], 1)
    while not worker.steps or not worker.steps[-1].drafts.size or worker.inbox:
        driver.step()
    facts = driver.explain(request_id=request).facts
    assert (facts["drafted_tokens"], facts["accepted_tokens"], facts["drafts"]) == (8, 2, 8)
    assert (
        "2 of 8 drafted tokens were accepted; its last step with drafts had 8, the next draft by lookup has a chance "
        "of 56 %, and one behind an accepted draft of 49 %" in driver.explain(request_id=request).sentences
    )
    driver.run_until_idle()
    found = state_of(driver, request)
    ended = driver.explain(request_id=request)
    assert f"{found.accepted_tokens} of {found.drafted_tokens} drafted tokens were accepted" in ended.sentences
    assert ended.facts["drafted_tokens"] == found.drafted_tokens == sum(drafted(worker)) and "drafts" not in ended.facts
    assert not any("draft" in sentence for sentence in driver.explain(request_id=quiet).sentences)
    gauges = dict(zip(GAUGES, driver.machine.gauges(driver.now_us), strict=True))
    steps = sum(step.drafts.size > 0 for step in worker.steps)
    assert [gauges[name] for name in ("drafts_total", "drafted_tokens_total", "accepted_drafts_total")] == [
        steps,
        found.drafted_tokens,
        found.accepted_tokens,
    ]
    health = driver.machine.workers[worker.number].health(driver.now_us)
    assert (health.drafts, health.drafted_total, health.accepted_total) == (
        8,
        found.drafted_tokens,
        found.accepted_tokens,
    )


def test_a_wiped_tenant_is_not_drafted_from_what_it_had() -> None:
    driver, worker = drafting(blocks=64)

    def numbers() -> list[int]:
        seen = len(worker.steps)
        for tenant in ("one", "two"):
            driver.submit(PROMPT, 4, tenant=tenant)
        driver.run_until_idle()
        begins = [start for step in worker.steps[seen:] for start in step.begins]
        return [start.shared_drafts for start in sorted(begins, key=lambda start: start.request_id)]

    before = numbers()
    for _ in range(2):
        driver.ask(WipeTenant(rid=driver.rid(), tenant="one"))
        after = numbers()
        assert numbers() == after
        assert after[0] not in (0, before[0]) and after[1] == before[1]
        before = after


def test_rows_of_one_tenant_and_salt_have_one_number_to_share_drafts_by() -> None:
    numbers = {}
    for shared in (True, False):
        driver, worker = drafting(drafts_shared=shared, blocks=64)
        for tenant in ("one", "two"):
            for salt in ("", "", "own"):
                driver.submit(PROMPT, 4, tenant=tenant, salt=salt)
        driver.run_until_idle()
        begins = [start for step in worker.steps for start in step.begins]
        assert {start.drafts for start in begins} == {8}
        numbers[shared] = [start.shared_drafts for start in sorted(begins, key=lambda start: start.request_id)]
    one, again, own, other, other_again, other_own = numbers[True]
    assert (one, other) == (again, other_again)
    assert len({0, one, own, other, other_own}) == 5
    assert numbers[False] == [0] * 6
