"""Idle sequences and pinned prefixes move down to the host tier, and come back when a request for them is queued."""

from __future__ import annotations

import numpy as np

from tests.coordinator.driver import continuation
from tests.coordinator.test_host_tier import FIRST, SECOND, HostDriver, HostFile, HostWorker

MINUTE_MS = 60_000
OTHERS = [[token + 100 * n for token in SECOND] for n in (1, 2)]


def hosted(blocks: int = 12, **limits: int) -> tuple[HostDriver, HostWorker]:
    """A driver with a worker that has room for two prompts, and a file."""
    driver = HostDriver(**{"pinned_percent_max": 50, **limits})
    driver.files["w"] = HostFile(64)
    worker = driver.add_worker(blocks, "w")
    assert isinstance(worker, HostWorker)
    return driver, worker


def kept(driver: HostDriver) -> tuple[int, list[int]]:
    """Return a sequence that a request has left, and its tokens."""
    request = driver.submit(FIRST, 4, keep_ms=MINUTE_MS)
    driver.run_until_idle()
    return driver.ended[request].sequence_id, [*FIRST, *continuation(FIRST, 4)]


def resident(driver: HostDriver, sequence: int) -> bool:
    """Return whether a sequence holds blocks."""
    return bool(driver.info(sequence).resident)


def move_down(driver: HostDriver) -> None:
    """Run other prompts, which take the blocks of idle sequences."""
    for prompt in (*OTHERS, SECOND):
        driver.serve(prompt, 8)


# behaviour: a sequence that moved down stays, and comes back with the next turn
def test_a_kept_sequence_moves_down_and_comes_back() -> None:
    driver, _ = hosted()
    sequence, tokens = kept(driver)
    move_down(driver)
    assert not resident(driver, sequence)
    said = driver.explain(sequence_id=sequence).sentences
    assert any("of its tokens are in the host tier of w" in sentence for sentence in said), said
    request = driver.submit([*tokens, 40, 41], 2, continues=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*tokens, 40, 41], 2)
    assert driver.request(request).cached_tokens == 20


# behaviour: it comes back while the request for it waits for a row, and the request waits for no copy then
def test_a_sequence_comes_back_while_its_request_waits_for_a_row() -> None:
    driver, worker = hosted(blocks=16, step_rows_max=1)
    sequence, tokens = kept(driver)
    driver.serve(SECOND, 30)
    assert not resident(driver, sequence)
    other = driver.submit([1, 2, 3], 30)
    driver.step()
    request = driver.submit([*tokens, 40, 41], 2, continues=sequence)
    driver.turn()
    assert resident(driver, sequence) and any(step.host_reads.size for step in worker.inbox)
    driver.step()
    s = driver.machine.cache.sequences
    assert s.computed[s.find(sequence)] == 20 and driver.request(request).state == "pending"
    before = len(worker.steps)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*tokens, 40, 41], 2)
    assert driver.answer_of(other) == continuation([1, 2, 3], 30)
    assert not any(step.host_reads.size for step in worker.steps[before:])
    assert driver.request(request).cached_tokens >= 20


def test_a_request_waits_for_its_sequence_if_it_is_on_its_way() -> None:
    """A start before that would compute again what is coming."""
    driver, worker = hosted()
    sequence, tokens = kept(driver)
    move_down(driver)
    idle = driver.create(tokens)
    driver.turn()
    assert worker.inbox[0].host_reads.size
    request = driver.submit([40, 41], 2, sequence_id=idle)
    driver.turn()
    assert driver.explain(request_id=request).facts["limit"] == "host"
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*tokens, 40, 41], 2)
    assert driver.request(request).cached_tokens == 20 and driver.info(sequence).length == len(tokens)


def test_nothing_is_brought_back_where_rows_need_the_room() -> None:
    driver, worker = hosted(step_rows_max=1)
    sequence, tokens = kept(driver)
    move_down(driver)
    driver.submit(OTHERS[0], 24)
    driver.step()
    driver.submit([*tokens, 40, 41], 2, continues=sequence)
    driver.turn()
    assert not resident(driver, sequence) and not any(step.host_reads.size for step in worker.inbox)
    driver.run_until_idle()


# behaviour: a pinned prefix moves down before a request is preempted, and is still pinned
def test_a_pinned_prefix_moves_down_instead_of_being_removed() -> None:
    driver, _ = hosted()
    driver.submit(FIRST, 2, pins=((16, MINUTE_MS),))
    driver.run_until_idle()
    s = driver.machine.cache.sequences
    (slot,) = np.flatnonzero(s.pinned).tolist()
    requests = [driver.submit(prompt, 16) for prompt in OTHERS]
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests] == [continuation(prompt, 16) for prompt in OTHERS]
    assert s.pinned[slot] and not s.used[slot]
    assert driver.serve([*FIRST[:16], 77]) == 16


def test_without_a_host_tier_it_keeps_its_blocks_while_rows_can_be_preempted() -> None:
    driver = HostDriver(pinned_percent_max=50)
    driver.files["w"] = HostFile(0)
    driver.add_worker(12, "w")
    driver.submit(FIRST, 2, pins=((16, MINUTE_MS),))
    driver.run_until_idle()
    s = driver.machine.cache.sequences
    (slot,) = np.flatnonzero(s.pinned).tolist()
    requests = [driver.submit(prompt, 8) for prompt in OTHERS]
    driver.run_until_idle()
    assert s.pinned[slot] and s.used[slot] == 4
    assert all(driver.request(request).state == "finished" for request in requests)
