"""Windows: which blocks layers with a sliding window hold, when these are released, and what hits them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.blocks import WINDOW
from kvforge.coordinator.core.events import FromWorker, ToWorker
from kvforge.protocol.errors import Conflict, InvalidRequest, ProtocolError
from kvforge.protocol.messages import RefBlock, Refused, Rewind, WorkerHello
from tests.coordinator.driver import Driver, FakeWorker, continuation, model_info
from tests.coordinator.test_drafts import Drafter

SIZE, WINDOW_TOKENS, PAGES = 4, 8, 2
RING = 16  # the longest sequence
PROMPT = [7 * i % 50 + 1 for i in range(41)]


class WindowWorker(FakeWorker):
    """A worker with layers that have a window: each row must find there what its block table has."""

    window = WINDOW_TOKENS

    def _pages(self, slot: int, position: int) -> list[int]:
        columns = position // SIZE % RING * PAGES + np.arange(PAGES)
        pages: list[int] = self.machine.cache.sequences.states[slot, columns].tolist()
        return pages

    def _feed(self, slot: int, start: int, tokens: list[int]) -> int:
        s = self.machine.cache.sequences
        if s.scheduled[slot] >= start + len(tokens):  # otherwise its request has ended meanwhile
            for position in range(max(0, start + 1 - self.window), start):
                whole = self.kv[int(s.table[slot, position // SIZE]), position % SIZE]
                seen = [self.kv[page, position % SIZE] for page in self._pages(slot, position)]
                assert seen == [whole] * PAGES, f"a layer sees other KV at {position}"
        context = super()._feed(slot, start, tokens)
        for position in range(start, start + len(tokens)):
            for page in self._pages(slot, position):
                self.kv[page, position % SIZE] = self.kv[int(s.table[slot, position // SIZE]), position % SIZE]
        return context


def windowed(blocks: int = 64, window: int = WINDOW_TOKENS, **limits: Any) -> tuple[Driver, WindowWorker]:
    """A driver with a worker of a model with layers that see `window` tokens, in two blocks beside each."""
    driver = Driver(**limits)
    driver.worker_type = WindowWorker
    driver.window = (window, PAGES, RING)
    worker = driver.add_worker(blocks)
    assert isinstance(worker, WindowWorker)
    worker.window = window
    return driver, worker


def lose_windows(pool: BlockPool, key: int) -> None:
    """Free the cached window blocks of an entry."""
    gone: list[int] = []
    pool.eviction.uncache(pool.parts.drop_window(key), gone)
    pool.free_gone(gone)


def served(driver: Driver, prompt: list[int], max_tokens: int = 2, **fields: Any) -> int:
    """The tokens that a request with this prompt found in the cache; its answer must be right."""
    request = driver.submit(prompt, max_tokens, **fields)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(prompt, max_tokens)
    return driver.request(request).cached_tokens


def place(driver: Driver, sequence: int) -> tuple[int, int, int]:
    """The blocks of a sequence, and the first and the end of those with window blocks."""
    s = driver.machine.cache.sequences
    slot = s.slot_of[sequence]
    return int(s.used[slot]), int(s.window_first[slot]), int(s.window_end[slot])


def window_blocks(driver: Driver) -> int:
    """Window blocks that are held or cached."""
    return int(np.count_nonzero(driver.machine.cache.blocks.kind == WINDOW))


@pytest.mark.parametrize(
    ("announced", "code", "words"),
    [
        ((8, 2, 0), ProtocolError.code, "window_blocks 0"),
        ((8, -1, 16), ProtocolError.code, "window_pages -1"),
        ((8, 2, 15), ProtocolError.code, "at least 16 blocks"),
        ((8, 9, 16), Conflict.code, "limits.state_blocks_max = 128"),
        ((8, 7, 16), Conflict.code, "more memory"),
    ],
)
def test_a_worker_with_windows_that_do_not_fit_is_refused(announced: Any, code: str, words: str) -> None:
    driver = Driver(state_blocks_max=128)
    driver.window = announced
    worker = FakeWorker(driver.machine, 7, "windowed", 7, model_info())
    driver.apply(FromWorker(7, WorkerHello(rid=1, name="windowed", pid=1)))
    effects = driver.apply(FromWorker(7, driver.ready(worker)))
    (refusal,) = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Refused)]
    assert refusal.error.code == code and words in refusal.error.message


def test_only_what_is_in_sight_is_held_while_a_prompt_is_computed_and_answered() -> None:
    driver, _ = windowed(step_tokens_max=8, steps_in_flight_max=2)
    sequence = driver.create(PROMPT)
    request = driver.submit(sequence_id=sequence, max_tokens=12)
    most = 0
    while len(driver.answer_of(request)) < 12:
        driver.step()
        _, first, end = place(driver, sequence)
        most = max(most, end - first)
        computed = driver.info(sequence).computed_tokens
        assert first == max(0, computed - WINDOW_TOKENS) // SIZE
    assert driver.answer_of(request) == continuation(PROMPT, 12)
    assert most <= (WINDOW_TOKENS + 2 * 8) // SIZE + 2  # two steps in flight
    used, first, end = place(driver, sequence)
    assert (used, end - first) == (14, 3) and used == end
    assert driver.info(sequence).blocks == 14 + 3 * PAGES


def test_a_pool_that_is_too_small_for_whole_layers_serves_a_long_prompt() -> None:
    driver, _ = windowed(blocks=16 + 5 * PAGES, step_tokens_max=8)  # all layers would need 11 * (1 + PAGES) blocks
    assert served(driver, PROMPT, 20) == 0


def test_a_hit_needs_window_blocks_for_its_end_only() -> None:
    driver, _ = windowed()
    served(driver, PROMPT)
    (group,) = driver.machine.cache.groups.values()
    keys = list(group.pool.parts.windows)
    assert len(keys) == 10
    for key in keys[:6]:
        lose_windows(group.pool, key)
    assert served(driver, [*PROMPT[:40], 3, 4]) == 40
    lose_windows(group.pool, list(group.pool.parts.windows)[-1])
    driver.machine.check_invariants()
    assert served(driver, [*PROMPT[:40], 5, 6]) == 36, "the longest prefix with what is in sight at its end"


def test_window_blocks_that_were_computed_again_complete_an_entry() -> None:
    driver, _ = windowed()
    served(driver, PROMPT)
    (group,) = driver.machine.cache.groups.values()
    for key in list(group.pool.parts.windows):
        lose_windows(group.pool, key)
    assert served(driver, PROMPT) == 0
    assert served(driver, PROMPT) == 40


def test_an_entry_takes_its_window_blocks_with_it() -> None:
    driver, _ = windowed(blocks=60)
    served(driver, PROMPT)
    assert window_blocks(driver) == 10 * PAGES
    for first in range(60, 90, 10):
        served(driver, [first + i for i in range(40)])
    (group,) = driver.machine.cache.groups.values()
    assert 0 < window_blocks(driver) <= len(group.index) * PAGES


def test_window_blocks_of_an_entry_are_copied_before_they_are_written() -> None:
    driver, worker = windowed(window=10)  # a rewind by 3 tokens stays in sight
    served(driver, PROMPT)
    (group,) = driver.machine.cache.groups.values()
    for key in list(group.pool.parts.windows):
        lose_windows(group.pool, key)
    sequence = driver.create(PROMPT)  # its blocks are not indexed, but its window blocks complete the entries
    driver.submit(sequence_id=sequence, max_tokens=1)
    driver.run_until_idle()
    s, blocks = driver.machine.cache.sequences, driver.machine.cache.blocks
    slot = s.slot_of[sequence]
    before = driver.machine.cache.windows.of(slot)
    assert blocks.indexed[before[-3 * PAGES : -PAGES]].all() and not blocks.indexed[s.blocks_of(slot)].any()
    driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=38))
    driver.append((sequence, [9, 9]))
    request = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*PROMPT[:38], 9, 9], 3)
    copied = [copy for step in worker.steps for copy in step.copies.reshape(-1, 3).tolist()]
    assert len(copied) == 1 + PAGES and {tokens for _, _, tokens in copied} == {2}
    assert served(driver, PROMPT) == 40, "the entry is as it was"


def test_forks_share_window_blocks_and_copy_what_they_write() -> None:
    driver, _ = windowed()
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    forked = driver.fork(sequence)[0]
    assert place(driver, forked) == place(driver, sequence)
    first, second = (driver.submit(sequence_id=each, max_tokens=6) for each in (sequence, forked))
    driver.run_until_idle()
    assert driver.answer_of(first) == driver.answer_of(second) == continuation(PROMPT, 8)[2:]


def test_a_fork_or_rewind_to_before_the_window_starts_from_the_cache() -> None:
    driver, _ = windowed()
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=40))
    assert driver.info(sequence).resident, "the window still holds what is in sight there"
    driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=18))
    assert not driver.info(sequence).resident
    request = driver.submit(sequence_id=sequence, max_tokens=4)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT[:18], 4)
    assert driver.request(request).cached_tokens == 16


def test_samples_of_a_prompt_share_its_windows() -> None:
    driver, _ = windowed(samples_max=3)
    first = driver.submit(PROMPT, 4, count=3)
    requests = [first, first + 1, first + 2]
    driver.run_until_idle()
    assert all(driver.answer_of(request) == continuation(PROMPT, 4) for request in requests)
    assert [driver.request(request).cached_tokens for request in requests] == [0, 40, 40]


def test_window_blocks_are_counted_explained_and_not_held_by_name() -> None:
    driver, _ = windowed()
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    (pool,) = driver.stats().pools
    assert pool.window_blocks == window_blocks(driver) > 0
    held = driver.machine.cache.windows.of(driver.machine.cache.sequences.slot_of[sequence]).tolist()
    assert "a window" in str(driver.refused(RefBlock(rid=driver.rid(), block_id=held[0], holder="me"), InvalidRequest))
    assert driver.block(held[0]).holders[0].name == f"sequence {sequence}"
    sentences = driver.explain(sequence_id=sequence).sentences
    assert f"{len(held)} more blocks hold the KV of layers with a window of 8 tokens, from token 32 on" in sentences


def test_a_request_that_no_pool_holds_is_refused_by_its_windows() -> None:
    driver, _ = windowed(blocks=20, step_tokens_max=4)
    longest = 20 - 4 * PAGES  # 8 tokens in sight, 4 of a step, and a block more
    error = driver.refused(driver.submit_message([1] * 10, 4 * longest - 9), InvalidRequest)
    assert error.fields["context_tokens"] == 4 * longest
    assert served(driver, [1] * 10, 4 * longest - 10) == 0


class DraftingWorker(WindowWorker, Drafter):
    """A worker with windows that drafts."""


@pytest.mark.parametrize("wrong", range(-1, SIZE - 1))
def test_answers_with_drafts_are_the_answers_without_and_release_what_is_behind_the_window(wrong: int) -> None:
    driver = Driver(drafts_max=8, step_rows_max=16)
    driver.worker_type = DraftingWorker
    driver.window = (WINDOW_TOKENS, PAGES, RING)
    worker = driver.add_worker(64)
    assert isinstance(worker, DraftingWorker)
    worker.window, worker.wrong = WINDOW_TOKENS, wrong
    prompts = [list(range(10, 10 + 5 * count)) for count in range(1, 4)]
    requests = [driver.submit(prompt, 40) for prompt in prompts]
    driver.run_until_idle()
    for request, prompt in zip(requests, prompts, strict=True):
        assert driver.answer_of(request) == driver.streamed[request] == continuation(prompt, 40)
    found = [driver.machine.requests.known(request) for request in requests]
    assert sum(each.drafted_tokens for each in found if each) > 0
    assert (sum(each.accepted_tokens for each in found if each) > 0) == (wrong != 0)
