"""Models with a recurrent state: its blocks, the chunks of prompts, and what a worker may announce."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.events import FromWorker, ToWorker
from kvforge.protocol.errors import Conflict, InvalidRequest, ProtocolError
from kvforge.protocol.messages import GENERATED, RefBlock, Refused, Rewind, Step, StepResult, WorkerHello
from tests.coordinator.driver import GREEDY, Driver, FakeWorker, continuation, model_info
from tools.simulation.states import EMPTY, advanced, state_of

PROMPT = [7 * i % 50 + 1 for i in range(30)]
BLOCKS, CHUNK = 2, 8


class StatefulWorker(FakeWorker):
    """A worker with a recurrent state: it checks that each row finds the state of exactly the tokens before it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.states: dict[int, tuple[int, int, int]] = {}
        self.texts: dict[int, list[int]] = {}

    def execute(self, step: Step) -> StepResult:
        """Copy blocks of states, advance the states of all rows, and execute the rest of the step."""
        triples = step.copies.reshape(-1, 3)
        of_states = np.array([source in self.states for source in triples[:, 0].tolist()], bool)
        moved = [(target, self.states[source]) for source, target, _ in triples[of_states].tolist()]
        assert (triples[of_states, 2] == self.machine.limits.cache.block_size).all(), "a part of a state is copied"
        self.states.update(moved)
        result = super().execute(msgspec.structs.replace(step, copies=triples[~of_states].reshape(-1)))
        fed, s = 0, self.machine.cache.sequences
        for slot, start, count in zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True):
            text = s.tokens[slot, : start + count].tolist()
            own = step.tokens[fed : fed + count].tolist()
            fed += count
            if s.scheduled[slot] < start + count:  # its request has ended meanwhile
                self.states.update((block, (0, EMPTY, 0)) for block in s.states[slot, :BLOCKS].tolist())
                continue
            if -1 in own:  # the token that is being sampled: known by now
                own = text[start:]
            assert len({token >= GENERATED for token in own}) == 1 and (own[0] < GENERATED or count == 1)
            ids = s.states[slot, :BLOCKS].tolist()
            state = state_of(tuple(text[:start]), CHUNK) if start else EMPTY
            if start:
                assert [self.states[block] for block in ids] == [(start, state, i) for i in range(BLOCKS)]
            state = advanced(state, own, start, CHUNK)
            assert state == state_of(tuple(text), CHUNK), "a prompt is cut elsewhere than at the grid"
            self.states.update((block, (start + count, state, i)) for i, block in enumerate(ids))
        return result


def stateful(blocks: int = 48, **limits: Any) -> tuple[Driver, StatefulWorker]:
    """A driver with a worker of a model with a state of two blocks and chunks of 8 tokens."""
    driver = Driver(**limits)
    driver.worker_type = StatefulWorker
    driver.wants_kinds, driver.state_blocks, driver.prompt_chunk = True, BLOCKS, CHUNK
    worker = driver.add_worker(blocks)
    assert isinstance(worker, StatefulWorker)
    return driver, worker


def rows(worker: FakeWorker) -> list[tuple[int, int]]:
    """The (start, end) of all rows that the worker was sent."""
    return [
        (start, start + count)
        for step in worker.steps
        for start, count in zip(step.starts.tolist(), step.counts.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("announced", "code", "words"),
    [
        ({"state_blocks": -1}, ProtocolError.code, "state_blocks -1"),
        ({"state_blocks": 2, "prompt_chunk": 0}, ProtocolError.code, "prompt_chunk 0"),
        ({"state_blocks": 2, "wants_kinds": False}, ProtocolError.code, "wants_kinds"),
        ({"state_blocks": 5}, Conflict.code, "limits.state_blocks_max = 4"),
        ({"state_blocks": 2, "prompt_chunk": 33}, Conflict.code, "schedule.step_tokens_max = 32"),
        ({"state_blocks": 4, "blocks": 4}, Conflict.code, "more memory"),
    ],
)
def test_a_worker_with_states_that_do_not_fit_is_refused(announced: dict[str, Any], code: str, words: str) -> None:
    driver = Driver(state_blocks_max=4)
    worker = FakeWorker(driver.machine, 7, "hybrid", 16, model_info())
    driver.apply(FromWorker(7, WorkerHello(rid=1, name="hybrid", pid=1)))
    ready = msgspec.structs.replace(driver.ready(worker), **{"wants_kinds": True, **announced})
    effects = driver.apply(FromWorker(7, ready))
    (refusal,) = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Refused)]
    assert refusal.error.code == code and words in refusal.error.message
    assert not driver.machine.cache.groups


def test_a_worker_with_states_too_large_for_the_copies_of_a_step_is_refused() -> None:
    driver = Driver(state_blocks_max=4096, sequences_max=1024)
    worker = FakeWorker(driver.machine, 7, "hybrid", 64, model_info())
    driver.apply(FromWorker(7, WorkerHello(rid=1, name="hybrid", pid=1)))
    ready = msgspec.structs.replace(driver.ready(worker), wants_kinds=True, state_blocks=1366)
    effects = driver.apply(FromWorker(7, ready))
    (refusal,) = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Refused)]
    assert "limits.sequences_max = 1024, steps can copy states of at most 1365" in refusal.error.message


def test_prompts_are_cut_at_the_grid_whatever_the_budget() -> None:
    for step_tokens_max, cuts in ((30, [(0, 24)]), (12, [(0, 8), (8, 16), (16, 24)])):
        driver, worker = stateful(step_tokens_max=step_tokens_max)
        request = driver.submit(PROMPT, max_tokens=2)
        driver.run_until_idle()
        assert rows(worker) == [*cuts, (24, 30), (30, 31)]
        assert driver.answer_of(request) == continuation(PROMPT, 2)


@pytest.mark.parametrize("step_tokens_max", [CHUNK, CHUNK + 4])
def test_a_prompt_gets_its_chunks_beside_decodes_that_fill_the_steps(step_tokens_max: int) -> None:
    driver, worker = stateful(step_tokens_max=step_tokens_max, step_rows_max=8)
    first = [driver.submit([i + 1, i + 2], max_tokens=40) for i in range(7)]
    while not all(len(driver.answer_of(request)) > 1 for request in first):
        driver.step()
    late = driver.submit(PROMPT, max_tokens=1)
    while not driver.answer_of(late):
        driver.step()
    assert driver.answer_of(late) == continuation(PROMPT, 1)
    assert all(driver.request(request).state == "running" for request in first)
    assert [row for row in rows(worker) if row[1] - row[0] > 2] == [(0, 8), (8, 16), (16, 24), (24, 30)]


def test_generated_tokens_are_computed_again_one_by_one() -> None:
    driver, first = stateful()
    request = driver.submit(PROMPT, max_tokens=8)
    while len(driver.answer_of(request)) < 4:
        driver.step()
    driver.lose(first)
    second = driver.add_worker(48)
    driver.run_until_idle()
    assert rows(second)[:7] == [(0, 24), (24, 30), *((i, i + 1) for i in range(30, 35))]
    assert driver.answer_of(request) == continuation(PROMPT, 8)


def test_a_sequence_holds_the_blocks_of_its_state_while_it_is_resident() -> None:
    driver, _ = stateful()
    free = driver.free()
    sequence = driver.create(PROMPT)
    assert driver.info(sequence).blocks == 8 + BLOCKS == free - driver.free()
    driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    held = driver.machine.cache.sequences.states_of(driver.machine.cache.sequences.slot_of[sequence]).tolist()
    assert "recurrent state" in str(
        driver.refused(RefBlock(rid=driver.rid(), block_id=held[0], holder="me"), InvalidRequest)
    )
    assert driver.block(held[0]).holders[0].name == f"sequence {sequence}"
    driver.remove(sequence)
    driver.turn()
    assert driver.free_or_cached() == free


def test_a_sequence_continues_with_its_state_if_that_is_exactly_where_it_ends() -> None:
    driver, worker = stateful()
    sequence = driver.create(PROMPT)
    for more in ([], [3, 4, 5, 6]):
        worker.steps.clear()
        driver.submit(more, sequence_id=sequence, max_tokens=3)
        driver.run_until_idle()
    assert rows(worker)[:2] == [(32, 33), (33, 37)]


@pytest.mark.parametrize(("length", "start"), [(20, 0), (31, 24)])
def test_a_rewound_sequence_goes_back_to_a_checkpoint_or_its_beginning(length: int, start: int) -> None:
    driver, worker = stateful()
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=length))
    assert not driver.info(sequence).resident
    worker.steps.clear()
    request = driver.submit([9], sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    assert rows(worker)[0][0] == start
    whole = [*[*PROMPT, *continuation(PROMPT, 3)][:length], 9]
    assert driver.answer_of(request) == continuation(whole, 2)


def test_tokens_behind_a_whole_prompt_move_its_last_cut() -> None:
    """A prompt of 30 tokens ends with a chunk of 6; with 10 more tokens, that chunk has 8."""
    driver, first = stateful(steps_in_flight_max=1)
    sequence = driver.create(PROMPT, idle_ttl_ms=60_000)
    cancelled = driver.submit(sequence_id=sequence, max_tokens=8)
    while len(driver.answer_of(cancelled)) < 4:
        driver.step()
    driver.lose(first)
    worker = driver.add_worker(48)
    while driver.info(sequence).computed_tokens < len(PROMPT):
        driver.step()
    driver.cancel(cancelled)
    driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=len(PROMPT)))
    info = driver.info(sequence)
    assert (info.resident, info.computed_tokens) == (True, len(PROMPT))
    worker.steps.clear()
    request = driver.submit(PROMPT[:10], sequence_id=sequence, max_tokens=1)
    driver.run_until_idle()
    assert rows(worker)[0][0] % CHUNK == 0
    assert driver.answer_of(request) == continuation(PROMPT + PROMPT[:10], 1)


@pytest.mark.parametrize(("blocks", "others"), [(48, 0), (26, 48)])
def test_a_fork_has_a_copy_of_the_state_if_there_is_room(blocks: int, others: int) -> None:
    driver, worker = stateful(blocks=blocks)
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    other = driver.create(list(range(others)))
    (child,) = driver.fork(sequence)
    assert driver.info(child).resident == (not others)
    driver.remove(other)
    whole = [*PROMPT, *continuation(PROMPT, 3)]
    worker.steps.clear()
    both = [(driver.submit([end], sequence_id=own, max_tokens=3), end) for own, end in ((sequence, 3), (child, 4))]
    driver.run_until_idle()
    assert ((0, 30) in rows(worker)) == bool(others)
    for request, end in both:
        assert driver.answer_of(request) == continuation([*whole, end], 3)


def test_a_fork_of_a_running_sequence_shares_its_tokens_alone() -> None:
    driver, _ = stateful()
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=8)
    driver.turn()
    (child,) = driver.fork(sequence)
    assert not driver.info(child).resident and driver.tokens(child) == PROMPT
    driver.run_until_idle()
    request = driver.submit([3], sequence_id=child, max_tokens=2)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*PROMPT, 3], 2)


def next_turn(driver: Driver, worker: FakeWorker, **fields: Any) -> tuple[list[tuple[int, int]], int]:
    """Serve a request that keeps its sequence, and the next turn: return the latter's rows and what it found."""
    first = driver.submit(PROMPT, 6, keep_ms=60_000, **fields)
    while driver.request(first).state != "finished":  # with a step in flight at any time
        driver.turn()
        driver.answer(worker)
    driver.run_until_idle()
    worker.steps.clear()
    talk = [*PROMPT, *driver.answer_of(first), 3, 4, 5]
    second = driver.submit(talk, 2, continues=driver.ended[first].sequence_id)
    driver.run_until_idle()
    assert driver.answer_of(second) == continuation(talk, 2)
    return rows(worker), driver.request(second).cached_tokens


def test_the_next_turn_continues_with_the_state_of_a_kept_sequence() -> None:
    found, cached = next_turn(*stateful())
    assert (found[:2], cached) == ([(35, 36), (36, 39)], 35)


def test_an_answer_that_stops_leaves_the_state_behind_its_last_token() -> None:
    """The step in flight computes the stop token, before it is known to be one."""
    stop = continuation(PROMPT, 3)[-1]
    found, cached = next_turn(*stateful(), sampling=msgspec.structs.replace(GREEDY, stop_tokens=(stop,)))
    assert (found[:1], cached) == ([(33, 36)], 33)


def test_a_state_that_has_gone_too_far_is_not_continued() -> None:
    stop = continuation(PROMPT, 3)[-1]
    sampling = msgspec.structs.replace(GREEDY, stop_tokens=(stop,))
    found, cached = next_turn(*stateful(steps_in_flight_max=3), sampling=sampling)
    assert (found[0], cached) == ((24, 30), 24)


def test_a_turn_that_differs_before_the_end_of_a_kept_sequence_goes_back_to_a_checkpoint() -> None:
    driver, worker = stateful()
    first = driver.submit(PROMPT, 11, keep_ms=60_000)  # its state is behind 40 tokens, where any prompt may be cut
    driver.run_until_idle()
    worker.steps.clear()
    talk = [*PROMPT, *driver.answer_of(first)[:2], *range(1, 12)]
    second = driver.submit(talk, 2, continues=driver.ended[first].sequence_id)
    driver.run_until_idle()
    assert driver.answer_of(second) == continuation(talk, 2)
    assert driver.request(second).cached_tokens == rows(worker)[0][0] == 24


def test_the_next_turn_waits_for_the_step_that_settles_its_sequence() -> None:
    driver, worker = stateful()
    stop = continuation(PROMPT, 3)[-1]
    sequence = driver.create(PROMPT)
    first = driver.submit(
        sequence_id=sequence, max_tokens=6, sampling=msgspec.structs.replace(GREEDY, stop_tokens=(stop,))
    )
    while driver.request(first).state != "finished":
        driver.turn()
        driver.answer(worker)
    assert driver.info(sequence).computed_tokens == 32, "a step is in flight"
    second = driver.submit([3, 4, 5], sequence_id=sequence, max_tokens=1)
    driver.turn()
    assert driver.request(second).state == "pending"
    driver.run_until_idle()
    assert rows(worker)[-1] == (33, 36)
    assert driver.answer_of(second) == continuation([*PROMPT, *continuation(PROMPT, 3), 3, 4, 5], 1)


def test_rows_that_do_not_fit_with_their_states_preempt_and_end() -> None:
    driver, _ = stateful(blocks=16)
    requests = [driver.submit([*PROMPT[i:], i + 1], max_tokens=8) for i in range(4)]
    driver.run_until_idle()
    for i, request in enumerate(requests):
        assert driver.answer_of(request) == continuation([*PROMPT[i:], i + 1], 8)


def test_a_request_that_only_fits_without_its_state_is_refused() -> None:
    driver, _ = stateful(blocks=10)
    assert driver.submit(PROMPT, max_tokens=2)
    assert "need 11 blocks" in str(driver.refused(driver.submit_message(PROMPT, max_tokens=3), InvalidRequest))
