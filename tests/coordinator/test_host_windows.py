"""The host tier with windows: a hit needs the KV of the whole prefix, and window blocks for its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.cache.blocks import WINDOW
from kvforge.coordinator.core.cache.host_node import HostNode
from kvforge.coordinator.core.cache.host_parts import part_number
from kvforge.protocol.messages import Explain, Rewind
from tests.coordinator.driver import continuation
from tests.coordinator.test_host_tier import HostDriver, HostFile, HostWorker, books
from tests.coordinator.test_windows import PAGES, RING, SIZE, WINDOW_TOKENS, WindowWorker, lose_windows

FIRST, SECOND = [7 * i % 50 + 1 for i in range(25)], [11 * i % 47 + 2 for i in range(25)]
FULL = len(FIRST) // SIZE
IN_SIGHT = WINDOW_TOKENS // SIZE


class HostWindowWorker(HostWorker, WindowWorker):
    """A worker with a host file and layers with a window. What it computes from damaged blocks is not checked."""

    def _feed(self, slot: int, start: int, tokens: list[int]) -> int:
        whole = self.window
        self.window = 1 if self.file.flipped else whole  # which sees no earlier token
        try:
            return super()._feed(slot, start, tokens)
        finally:
            self.window = whole


class WindowHostDriver(HostDriver):
    """A driver with such workers."""

    worker_type = HostWindowWorker


def hosted(blocks: int = 24, host: int = 60, **limits: Any) -> tuple[WindowHostDriver, HostWindowWorker]:
    """A driver with a worker that has room for one prompt, and a file."""
    driver = WindowHostDriver(**limits)
    driver.window = (WINDOW_TOKENS, PAGES, RING)
    driver.files["w"] = HostFile(host)
    worker = driver.add_worker(blocks, "w")
    assert isinstance(worker, HostWindowWorker)
    return driver, worker


def parts(driver: WindowHostDriver, prompt: list[int]) -> dict[int, list[HostNode]]:
    """Return the window blocks of a prompt on the host, by the number of their block."""
    nodes, found = driver.tier.nodes, dict[int, list[HostNode]]()
    for number, node_id in enumerate(driver.found(prompt)):
        behind = [node for node in nodes.values() if node.parent == node_id and part_number(node.tokens) >= 0]
        if behind:
            found[number] = [node for node in behind if node.written]
    return found


def read(worker: HostWindowWorker) -> int:
    """Return how many blocks its steps read from the host."""
    return sum(step.host_reads.size // 4 for step in worker.steps)


# behaviour: a prefix that was evicted comes back with the window blocks in sight of its end
def test_an_evicted_prefix_comes_back_with_its_window() -> None:
    driver, worker = hosted()
    assert (driver.serve(FIRST), driver.serve(SECOND)) == (0, 0)
    assert driver.serve(FIRST) == FULL * SIZE
    (pool,) = (group.pool for group in driver.machine.cache.groups.values())
    assert driver.tier.loaded_total == read(worker) >= IN_SIGHT * PAGES + 1
    assert pool.parts.windows, "window blocks that came back hang on entries again"
    assert driver.tier.referenced == 0


def test_window_blocks_that_no_turn_goes_on_from_are_not_copied() -> None:
    """Of a prompt that was used once, those in sight of its end are, and one block more."""
    driver, _ = hosted()
    driver.serve(FIRST)
    driver.serve(SECOND)
    assert set(parts(driver, FIRST)) <= set(range(FULL - IN_SIGHT - 1, FULL))
    assert all(len(nodes) == PAGES for nodes in parts(driver, FIRST).values())


def test_a_hit_ends_where_the_host_has_the_window() -> None:
    driver, _ = hosted()
    driver.serve(FIRST)
    driver.serve(SECOND)
    last = max(parts(driver, FIRST))
    (node, *_) = parts(driver, FIRST)[last]
    driver.tier.drop(next(number for number, each in driver.tier.nodes.items() if each is node))
    assert driver.serve(FIRST) == last * SIZE, "no hit sees the block, and a shorter one has its window"


def test_the_window_alone_comes_back_to_blocks_of_the_pool() -> None:
    driver, worker = hosted(blocks=40)
    driver.serve(FIRST)
    (group,) = driver.machine.cache.groups.values()
    windows = dict(group.pool.parts.windows)
    for key, ids in windows.items():
        assert group.host is not None
        group.host.reuse(np.array(ids))
        group.host.save_parts(key, ids, 0)
    driver.serve(SECOND)  # makes the copies
    for key in windows:
        lose_windows(group.pool, key)
    assert driver.serve(FIRST) == FULL * SIZE
    assert read(worker) == IN_SIGHT * PAGES, "no KV block is read that the pool has"
    assert driver.serve(FIRST) == FULL * SIZE and read(worker) == IN_SIGHT * PAGES, "they are in the pool again"


# behaviour: a window block with other bytes is a miss, whatever its tokens
@pytest.mark.parametrize("part", [0, PAGES])
def test_a_flipped_bit_of_a_window_block_is_a_miss(part: int) -> None:
    driver, worker = hosted()
    driver.serve(FIRST)
    driver.serve(SECOND)
    nodes = [node for number in sorted(parts(driver, FIRST))[-IN_SIGHT:] for node in parts(driver, FIRST)[number]]
    driver.files["w"].flipped.add(nodes[part].block)
    request = driver.submit(FIRST, 2)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST, 2) and not worker.dropped
    assert driver.request(request).preemptions == 1
    assert driver.tier.missed_checksums_total == 1 and driver.tier.referenced == 0
    for prompt in (SECOND, FIRST, SECOND):  # it is computed once more, and evicted
        driver.serve(prompt)
    assert driver.serve(FIRST) == FULL * SIZE


# behaviour: what is on its way to a sequence that ends or changes meanwhile leaves no gap in its window
@pytest.mark.parametrize("how", ["cancel", "rewind", "lose"])
def test_a_sequence_that_changes_while_its_window_comes(how: str) -> None:
    driver, worker = hosted()
    sequence = driver.create(FIRST)
    driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    driver.serve(SECOND)
    request = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.turn()
    assert worker.inbox and worker.inbox[0].host_reads.size
    answer = continuation(FIRST, 6)
    if how == "lose":
        driver.lose(worker)
        driver.add_worker(24, "w")
        driver.run_until_idle()
        assert driver.answer_of(request) == answer[3:]
        return
    driver.cancel(request)
    if how == "rewind":
        driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=len(FIRST) + 1))
    kept = 1 if how == "rewind" else 3
    again = driver.submit(sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    assert driver.answer_of(again) == answer[kept : kept + 2]
    assert driver.tier.referenced == 0


# behaviour: a worker's successor goes on with the windows that were written back
@pytest.mark.parametrize("writeback", [0, 1, 4])
def test_a_successor_goes_on_from_windows_that_were_written_back(writeback: int) -> None:
    driver, worker = hosted(blocks=60, host_writeback_blocks=writeback)
    request = driver.submit(FIRST, 24)
    s = driver.machine.cache.sequences
    while s.length.max() < len(FIRST) + 18:
        driver.turn()
        driver.answer(worker)
    driver.lose(worker)
    driver.add_worker(60, "w")
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST, 24)
    again = driver.machine.requests.recomputed_tokens_total
    assert again >= len(FIRST) + 17 if not writeback else again < len(FIRST) + 17
    assert writeback < 4 or again <= 4 * SIZE


@pytest.mark.parametrize("host", [1, 2, 3, 5])
def test_a_small_file_ends_write_back(host: int) -> None:
    """Parts of one entry do not take each other's blocks for ever."""
    driver, _ = hosted(blocks=60, host=host, host_writeback_blocks=1)
    driver.serve(FIRST, 12)
    assert sum(books(driver.tier)) == host and driver.tier.referenced == 0


def test_a_file_that_is_full_gives_window_blocks_up_before_their_entry() -> None:
    driver, _ = hosted(host=FULL + IN_SIGHT * PAGES)
    for number in range(6):
        driver.serve([100 * number + token for token in FIRST])
    nodes = driver.tier.nodes.values()
    assert driver.tier.evicted_total > 0
    assert all(driver.tier.nodes[node.parent].written for node in nodes if part_number(node.tokens) >= 0)


def test_a_window_block_is_explained() -> None:
    driver, _ = hosted(blocks=40, host_writeback_blocks=4)
    driver.serve(FIRST, 12)
    (group,) = driver.machine.cache.groups.values()
    last = list(group.pool.parts.windows.values())[-1]
    assert all(driver.machine.cache.blocks.kind[list(last)] == WINDOW)
    words = " ".join(driver.ask(Explain(rid=driver.rid(), block_id=last[0])).sentences)
    assert "its content is in block" in words and "of the host tier" in words


def test_a_sequence_in_the_tier_is_explained_as_far_as_it_comes_back() -> None:
    driver, _ = hosted()
    sequence = driver.create(FIRST)
    driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    driver.serve(SECOND)
    words = " ".join(driver.explain(sequence_id=sequence).sentences)
    assert "of its tokens are in the host tier of w" in words
    for node_id in [node_id for node_id, node in driver.tier.nodes.items() if part_number(node.tokens) >= 0]:
        driver.tier.drop(node_id)
    words = " ".join(driver.explain(sequence_id=sequence).sentences)
    assert "in the host tier" not in words, "KV without its window is of no use"
