"""Checkpoints of recurrent states: where they are taken, what hits them, and when they go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.cache.blocks import CHECKPOINT
from kvforge.coordinator.core.cache.checkpoint_positions import CheckpointPositions
from kvforge.coordinator.core.cache.states import chunk_end, is_cut
from kvforge.protocol.messages import GENERATED, FindPrefix
from tests.coordinator.driver import Driver, continuation, int32
from tests.coordinator.test_states import BLOCKS, CHUNK, PROMPT, StatefulWorker, rows, stateful

OTHER = [60 + i for i in range(12)]


def served(driver: Driver, prompt: list[int], max_tokens: int = 2, **fields: Any) -> int:
    """The tokens that a request with this prompt found in the cache; its answer must be right."""
    request = driver.submit(prompt, max_tokens, **fields)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(prompt, max_tokens)
    return driver.request(request).cached_tokens


def checkpoints(driver: Driver) -> int:
    """The number of checkpoints of the only pool."""
    (group,) = driver.machine.cache.groups.values()
    return len(group.pool.parts.checkpoints)


def kinds(driver: Driver, kind: int) -> int:
    """The number of blocks of a kind."""
    return int(np.count_nonzero(driver.machine.cache.blocks.kind == kind))


def marked(*parts: tuple[str, int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens: p for prompt tokens, g for generated ones."""
    return np.concatenate([np.full(count, GENERATED if kind == "g" else 0, np.int32) for kind, count in parts])


@pytest.mark.parametrize(
    ("tokens", "end", "position"),
    [
        (marked(("p", 30)), 29, 24),
        (marked(("p", 30)), 7, 0),
        (marked(("p", 10), ("g", 20)), 29, 28),  # behind a generated token
        (marked(("p", 10), ("g", 20), ("p", 10)), 39, 32),
        (marked(("p", 10), ("g", 3), ("p", 9)), 20, 16),
        (marked(("p", 9), ("g", 3), ("p", 3)), 14, 12),  # the prompt behind it begins there
    ],
)
def test_valid_positions_end_a_block_and_a_chunk(tokens: Any, end: int, position: int) -> None:
    assert CheckpointPositions(4, 8, 2048).last(tokens, end) == position
    assert not position or is_cut(np.append(tokens, np.int32(0)), position, 8)


def test_positions_follow_each_other() -> None:
    positions = CheckpointPositions(4, 6, 20)
    assert positions.every == 24
    assert [positions.following(marked(("p", 50)), 50, 12, start) for start in (0, 12, 24, 48)] == [12, 24, 48, 72]


@pytest.mark.parametrize(
    ("tokens", "start", "room", "end"),
    [
        (marked(("p", 30)), 0, 30, 30),
        (marked(("p", 30)), 0, 29, 24),
        (marked(("p", 30)), 24, 5, 24),  # neither the end of the run nor the next multiple is within reach
        (marked(("p", 30)), 24, 6, 30),
        (marked(("p", 10), ("g", 3)), 0, 10, 10),
        (marked(("p", 10), ("g", 3)), 10, 10, 11),
        (marked(("p", 10), ("g", 3), ("p", 20)), 13, 3, 16),
        (marked(("p", 10)), 10, 5, 11),  # a token that is still being sampled
        (marked(("p", 10)), 0, 0, 0),
    ],
)
def test_chunks_end_at_the_grid_or_with_their_run(tokens: Any, start: int, room: int, end: int) -> None:
    assert chunk_end(tokens, start, room, 8) == end


def test_a_prompt_is_found_up_to_its_last_checkpoint() -> None:
    driver, worker = stateful()
    assert [served(driver, PROMPT) for _ in range(2)] == [0, 24]
    assert served(driver, PROMPT[:24]) == 0, "a checkpoint needs a token behind it"
    assert served(driver, PROMPT[:25]) == 24
    reply = driver.ask(FindPrefix(rid=driver.rid(), prompt=int32(PROMPT), tenant="default"))
    assert reply.cached_tokens == 24
    assert isinstance(worker, StatefulWorker)


def test_long_prompts_and_answers_have_checkpoints_at_regular_distances() -> None:
    driver, worker = stateful(blocks=64, checkpoint_tokens=8)
    served(driver, PROMPT, 20)
    assert checkpoints(driver) == 6
    worker.steps.clear()
    assert served(driver, [*PROMPT[:18], 1]) == 16


def test_a_prefix_that_prompts_share_is_found_by_the_third() -> None:
    driver, worker = stateful(blocks=64, blocks_max=64)
    system = PROMPT[:20]
    assert served(driver, [*system, *OTHER]) == 0
    worker.steps.clear()
    assert served(driver, [*system, *OTHER[::-1]]) == 0
    assert (0, 16) in rows(worker), "the prompt was not cut where the shared prefix ends"
    assert served(driver, [*system, *OTHER[4:], 1, 2, 3, 4]) == 16


def test_answers_to_one_prompt_share_its_checkpoint() -> None:
    driver, worker = stateful(blocks=60, blocks_max=64)
    driver.submit(PROMPT, 3, count=3)
    driver.run_until_idle()
    assert sorted(rows(worker))[:3] == [(0, 24), (24, 30), (24, 30)]


def test_a_preempted_request_goes_on_from_its_checkpoint() -> None:
    driver, worker = stateful(blocks=25)
    requests = [driver.submit([*PROMPT[i:], i + 1], max_tokens=16) for i in range(3)]
    driver.run_until_idle()
    assert driver.machine.requests.preemptions_total
    for i, request in enumerate(requests):
        assert driver.answer_of(request) == continuation([*PROMPT[i:], i + 1], 16)
    assert any(start == 24 for start, _ in rows(worker)[6:])


def test_a_checkpoint_goes_with_the_block_that_it_hangs_on_and_as_a_whole() -> None:
    driver, _ = stateful(blocks=24)
    served(driver, PROMPT)
    (group,) = driver.machine.cache.groups.values()
    (key,) = group.pool.parts.checkpoints
    assert kinds(driver, CHECKPOINT) == BLOCKS
    group.pool.unindex(key & 0xFFFFFFFF)
    driver.machine.check_invariants()
    assert not checkpoints(driver) and not kinds(driver, CHECKPOINT)
    served(driver, OTHER)
    driver.create(list(range(64)))
    assert checkpoints(driver) == 1
    free = group.pool.free + group.pool.cached
    driver.create([1])  # needs one block of the checkpoint
    assert not checkpoints(driver) and not kinds(driver, CHECKPOINT)
    assert group.pool.free + group.pool.cached == free - 1 - BLOCKS


def test_requests_for_the_same_text_take_one_checkpoint() -> None:
    driver, _ = stateful(step_tokens_max=CHUNK, steps_in_flight_max=1)
    requests = [driver.submit(PROMPT, 12)]
    driver.step()
    driver.step()
    requests.append(driver.submit(PROMPT, 12))
    while driver.machine.busy:
        driver.step()
        assert kinds(driver, CHECKPOINT) <= 2 * BLOCKS  # the second request has one where its shared prefix ends
    assert [driver.request(request).cached_tokens for request in requests] == [0, 0]
    alike, _ = stateful()
    alike.submit(PROMPT, 2)
    alike.submit(PROMPT, 2)
    alike.turn()
    assert kinds(alike, CHECKPOINT) == BLOCKS


def test_the_end_of_a_prompt_is_no_checkpoint_for_it() -> None:
    driver, _ = stateful()
    assert [served(driver, PROMPT[:24]) for _ in range(2)] == [0, 16]


def test_a_checkpoint_outlives_what_is_behind_it() -> None:
    driver, _ = stateful(blocks=24)
    served(driver, PROMPT)
    (group,) = driver.machine.cache.groups.values()
    driver.create(list(range(4 * (group.pool.free + 1 - BLOCKS))))
    assert group.pool.cached == 7 - 1 + BLOCKS and checkpoints(driver) == 1


def test_no_sequence_gives_way_to_a_checkpoint() -> None:
    for blocks, taken in ((10, 0), (12, 0), (14, 1)):  # rows keep a block each to grow into, and one more
        driver, _ = stateful(blocks=blocks)
        assert served(driver, PROMPT) == 0
        assert checkpoints(driver) == taken
    kept, _ = stateful(blocks=20)
    sequence = kept.create(OTHER)
    assert served(kept, PROMPT) == 0
    assert kept.info(sequence).resident


def test_a_checkpoint_of_a_row_without_a_result_is_dropped() -> None:
    driver, worker = stateful(steps_in_flight_max=3)
    request = driver.submit(PROMPT, 4)
    driver.turn()
    assert kinds(driver, CHECKPOINT) == BLOCKS
    driver.cancel(request)
    (group,) = driver.machine.cache.groups.values()
    assert not group.forming, "its blocks are held although nothing will need them"
    while worker.inbox:
        driver.answer(worker)
    driver.turn()
    assert not kinds(driver, CHECKPOINT) and not checkpoints(driver)


def test_a_worker_takes_its_checkpoints_with_it() -> None:
    driver, worker = stateful()
    served(driver, PROMPT)
    driver.lose(worker)
    assert not kinds(driver, CHECKPOINT)
    driver.add_worker(48)
    assert served(driver, PROMPT) == 0


def test_statistics_and_explanations_know_states_and_checkpoints() -> None:
    driver, _ = stateful()
    sequence = driver.create(PROMPT)
    request = driver.submit(sequence_id=sequence, max_tokens=9)
    while len(driver.answer_of(request)) < 4:
        driver.step()
    (pool,) = driver.stats().pools
    assert (pool.state_blocks, pool.checkpoint_blocks) == (BLOCKS, BLOCKS)
    assert pool.live_tokens <= 4 * driver.machine.cache.sequences.used.sum()
    for subject in ({"sequence_id": sequence}, {"request_id": request}):
        text = str(driver.explain(**subject))
        assert "2 more blocks hold its recurrent state" in text and "its last checkpoint is behind 24 tokens" in text
    driver.remove(sequence)
    driver.turn()
    assert driver.stats().pools[0].state_blocks == 0
