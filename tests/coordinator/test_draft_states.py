"""Drafts over recurrent states: the state of a sequence is behind exactly the tokens that the core counts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.events import FromWorker, ToWorker
from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import Refused, SamplingParams, Step, StepResult, WorkerHello
from tests.coordinator.driver import GREEDY, Driver, FakeWorker, continuation, model_info
from tests.coordinator.test_drafts import PROMPT, Drafter, drafted, state_of

BLOCKS, CHUNK, STATES = 2, 8, 6


class StatefulDrafter(Drafter):
    """A worker that drafts over states, and checks that each row finds the state behind the tokens before it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.states: dict[int, int] = {}

    def execute(self, step: Step) -> StepResult:
        triples = step.copies.reshape(-1, 3)
        of_states = np.array([source in self.states for source in triples[:, 0].tolist()], bool)
        self.states |= {target: self.states[source] for source, target, _ in triples[of_states].tolist()}
        result = super().execute(msgspec.structs.replace(step, copies=triples[~of_states].reshape(-1)))
        drafts = step.drafts.tolist() or [0] * step.slots.size
        rows = zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), drafts, strict=True)
        for slot, start, count, drafts_of in rows:
            ids = self.machine.cache.sequences.states[slot, :BLOCKS].tolist()
            assert not start or [self.states[block] for block in ids] == [start] * BLOCKS
            kept = int(np.count_nonzero(result.slots == slot)) if drafts_of else count
            self.states |= dict.fromkeys(ids, start + kept)
        return result


def stateful(wrong: int = -1, states: int = STATES, **limits: Any) -> tuple[Driver, StatefulDrafter]:
    driver = Driver(**{"drafts_max": 4, "step_rows_max": 16, "block_size": 4, "steps_in_flight_max": 1} | limits)
    driver.worker_type = StatefulDrafter
    driver.wants_kinds, driver.state_blocks, driver.prompt_chunk, driver.draft_states = True, BLOCKS, CHUNK, states
    worker = driver.add_worker(64)
    assert isinstance(worker, StatefulDrafter)
    worker.wrong = wrong
    return driver, worker


@pytest.mark.parametrize("wrong", range(-1, 4))
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_an_answer_over_states_is_the_answer_without_drafts(wrong: int, in_flight: int) -> None:
    driver, worker = stateful(wrong, steps_in_flight_max=in_flight)
    request = driver.submit(PROMPT, 40)
    driver.run_until_idle()
    assert driver.answer_of(request) == driver.streamed[request] == continuation(PROMPT, 40)
    assert sum(drafted(worker)) == state_of(driver, request).drafted_tokens > 0
    assert max(drafted(worker)) == 4


def test_a_step_has_no_more_drafts_than_states() -> None:
    for states, most in ((STATES, 6), (3, 3), (2, 2), (1, 1), (0, 0)):
        driver, worker = stateful(states=states)
        requests = [driver.submit([7 + number, 8], 20) for number in range(3)]
        driver.run_until_idle()
        assert max(drafted(worker)) <= most and (sum(drafted(worker)) > 0) == (states > 0)
        for number, request in enumerate(requests):
            assert driver.answer_of(request) == continuation([7 + number, 8], 20)


def test_a_stop_token_is_no_draft_so_that_the_next_turn_goes_on_with_the_state() -> None:
    answer = continuation(PROMPT, 20)
    place = next(place for place in range(6, 20) if answer[place] not in answer[:place])
    driver, worker = stateful()
    sequence = driver.create(PROMPT)
    stop = SamplingParams(temperature=0.0, seed=1, stop_tokens=(answer[place],))
    request = driver.submit(max_tokens=30, sequence_id=sequence, sampling=stop)
    driver.run_until_idle()
    assert driver.answer_of(request) == answer[: place + 1]
    assert sum(drafted(worker)) > 0
    before = len(worker.steps)
    again = driver.submit(max_tokens=5, sequence_id=sequence, sampling=GREEDY)
    driver.run_until_idle()
    assert driver.answer_of(again) == continuation([*PROMPT, *answer[: place + 1]], 5)
    first = next(step for step in worker.steps[before:] if step.slots.size)
    assert first.starts.tolist() == [len(PROMPT) + place], "nothing is computed again"


@pytest.mark.parametrize("wrong", [-1, 0, 2])
def test_checkpoints_are_taken_at_each_position_where_one_is_wanted(wrong: int) -> None:
    taken = {}
    for states in (STATES, 0):
        driver, worker = stateful(wrong, states, checkpoint_tokens=8)
        request = driver.submit(PROMPT, 40)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(PROMPT, 40)
        (group,) = driver.machine.cache.groups.values()
        kept = sorted({worker.states[int(ids[0])] for ids in group.pool.parts.checkpoints.values()})
        taken[states] = kept
    assert taken[STATES] == taken[0] == [8, 16, 24, 32, 40]


def test_drafts_leave_room_for_a_chunk_of_a_prompt() -> None:
    driver, worker = stateful(step_tokens_max=12)
    first = driver.submit(PROMPT, 50)
    while not any(drafted(worker)):
        if worker.inbox:
            driver.answer(worker)
        driver.turn()
    prompt = [3 + place for place in range(24)]
    other = driver.submit(prompt, 2)
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation(PROMPT, 50)
    assert driver.answer_of(other) == continuation(prompt, 2)
    chunks = [step for step in worker.steps if step.counts.max(initial=0) >= CHUNK]
    assert len(chunks) >= 3


@pytest.mark.parametrize("announced", [-1, 1 << 17])
def test_an_impossible_number_of_states_is_refused(announced: int) -> None:
    driver = Driver(state_blocks_max=4)
    worker = FakeWorker(driver.machine, 7, "hybrid", 16, model_info())
    driver.apply(FromWorker(7, WorkerHello(rid=1, name="hybrid", pid=1)))
    effects = driver.apply(FromWorker(7, msgspec.structs.replace(driver.ready(worker), draft_states=announced)))
    (refusal,) = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Refused)]
    assert refusal.error.code == ProtocolError.code and "draft_states must be 0 to 65536" in refusal.error.message
