"""No work waits for an unrelated message: a turn runs until nothing follows, and reports when the next one is due."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import RequestNotFound, SequenceNotFound
from kvforge.protocol.messages import GetRequest, GetSequence
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation
from tools.simulation.digest import digest

SECOND = 1_000_000
TTL_US = 600 * SECOND  # default retention of finished requests


def gone(driver: Driver, sequence: int) -> bool:
    """Return whether a sequence was removed, without running a turn."""
    s = driver.machine.cache.sequences
    return sequence not in s.slot_of


# ------------------------------------------------------------------------------------------ until nothing follows


def test_a_row_that_must_start_again_on_blocks_of_its_own_does_so_in_the_same_turn() -> None:
    """Alone, with a shared last block: planning frees its blocks after admission has run."""
    driver = Driver()
    worker = driver.add_worker(2)
    sequence = driver.create([1, 2, 3, 4, 5, 6])
    driver.fork(sequence)
    request = driver.submit(max_tokens=1, sequence_id=sequence)
    driver.turn()
    assert driver.request(request).state == "running"
    assert len(worker.inbox) == 1
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3, 4, 5, 6], 1)


def test_blocks_of_a_copy_that_is_not_owed_any_more_are_given_out_in_the_same_turn() -> None:
    """With no step in flight, giving up a step's id releases its blocks after admission has run."""
    driver = Driver(policy="none")
    worker = driver.add_worker(4)
    sequence = driver.create([1, 2, 3, 4, 5, 6, 7, 8, 9])
    driver.submit(max_tokens=1, sequence_id=sequence)
    driver.run_until_idle()
    (fork,) = driver.fork(sequence)
    driver.append((fork, [7]))
    driver.remove(sequence, fork)
    prompt = list(range(100, 114))
    request = driver.submit(prompt, max_tokens=2)
    driver.turn()
    assert driver.request(request).state == "running"
    assert worker.inbox
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(prompt, 2)


def test_a_row_that_waits_for_such_blocks_gets_them_in_the_same_turn() -> None:
    """With an empty queue the worker group itself must plan again."""
    driver = Driver(policy="none", steps_in_flight_max=1)
    worker = driver.add_worker(6)
    sequence = driver.create([1, 2, 3, 4, 5, 6, 7, 8, 9])
    driver.submit(max_tokens=1, sequence_id=sequence)
    driver.run_until_idle()
    request = driver.submit([50, 51, 52, 53], max_tokens=8)
    while driver.request(request).generated_tokens < 4:
        driver.step()
    (fork,) = driver.fork(sequence)
    driver.append((fork, [7]))
    driver.remove(sequence, fork)
    assert driver.free_or_cached() == 0
    driver.turn()
    assert worker.inbox
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([50, 51, 52, 53], 8)


def test_a_sequence_whose_time_is_over_goes_with_the_request_that_kept_it(make_pool: MakePool) -> None:
    """The request expires in the turn; only then is its sequence idle, and its time to live is long over."""
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3], idle_ttl_ms=10)
    request = driver.submit(max_tokens=8, sequence_id=sequence, deadline_ms=50)
    driver.turn()
    driver.advance(50_000)
    driver.turn()
    assert driver.request(request).state == "expired"
    assert gone(driver, sequence)
    worker.inbox.clear()


def test_a_request_without_room_starts_when_a_sequence_has_had_its_time(make_pool: MakePool) -> None:
    driver, worker = make_pool(3, policy="none")
    driver.create(list(range(1, 10)), idle_ttl_ms=20)
    request = driver.submit([5, 6, 7], max_tokens=2)
    driver.turn()
    assert driver.request(request).state == "pending"
    assert driver.wake_us() == 20_000
    driver.advance(20_000)
    driver.turn()
    assert driver.request(request).state == "running"
    assert worker.inbox


# --------------------------------------------------------------------------------------------------------- what is due


def test_a_sequence_is_removed_at_the_end_of_its_time_to_live_and_not_a_microsecond_before(driver: Driver) -> None:
    sequence = driver.create([1, 2, 3], idle_ttl_ms=500)
    later = driver.create([1, 2, 3], idle_ttl_ms=700)
    driver.turn()
    assert driver.wake_us() == 500_000
    driver.advance(499_999)
    driver.turn()
    assert not gone(driver, sequence)
    assert driver.wake_us() == 1
    driver.advance(1)
    driver.turn()
    assert gone(driver, sequence)
    assert "time to live of 0.5 s" in str(driver.refused(GetSequence(rid=1, sequence_id=sequence), SequenceNotFound))
    assert driver.wake_us() == 200_000
    driver.advance(200_000)
    driver.turn()
    assert gone(driver, later)
    assert driver.wake_us() is None


def test_whoever_uses_a_sequence_moves_the_end_of_its_time(driver: Driver) -> None:
    sequence = driver.create([1, 2, 3], idle_ttl_ms=500)
    driver.turn()
    driver.advance(400_000)
    driver.tokens(sequence)
    driver.advance(100_000)
    driver.turn()  # the time at which it would have been due
    assert not gone(driver, sequence)
    assert driver.wake_us() == 400_000
    driver.append((sequence, [4]))
    driver.advance(499_999)
    driver.turn()
    assert not gone(driver, sequence)
    driver.advance(driver.wake_us() or 0)
    driver.turn()
    assert gone(driver, sequence)


def test_a_fork_has_the_time_to_live_of_its_parent_and_an_end_of_its_own(driver: Driver) -> None:
    sequence = driver.create([1, 2, 3], idle_ttl_ms=500)
    driver.advance(100_000)
    (fork,) = driver.fork(sequence)
    driver.advance(300_000)
    driver.tokens(sequence)
    driver.turn()
    driver.advance(200_000)
    driver.turn()
    assert (gone(driver, sequence), gone(driver, fork)) == (False, True)
    assert driver.wake_us() == 300_000


def test_the_time_of_a_sequence_begins_when_its_request_ends(make_pool: MakePool) -> None:
    driver, _ = make_pool(steps_in_flight_max=1)
    sequence = driver.create([1, 2, 3], idle_ttl_ms=500)
    driver.submit(max_tokens=2, sequence_id=sequence)
    driver.step()
    driver.advance(600_000)
    driver.step()
    driver.turn()
    assert not gone(driver, sequence)
    assert driver.wake_us() == 500_000
    driver.advance(500_000)
    driver.turn()
    assert gone(driver, sequence)


def test_a_request_that_ended_is_forgotten_at_the_end_of_its_time(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    request = driver.submit([1, 2], max_tokens=2)
    driver.run_until_idle()
    assert driver.wake_us() == TTL_US
    driver.advance(TTL_US - 1)
    driver.turn()
    assert driver.request(request).state == "finished"
    driver.advance(1)
    driver.turn()
    driver.refused(GetRequest(rid=1, request_id=request), RequestNotFound)
    assert driver.wake_us() is None


def test_a_paused_stream_is_tried_again_at_a_time_that_stays(make_pool: MakePool) -> None:
    """A due time that is recomputed on every query never arrives."""
    driver, _ = make_pool()
    driver.full.add(1)
    driver.submit([1, 2], max_tokens=2)
    driver.run_until_idle()
    assert driver.wake_us() == 50_000
    driver.advance(49_999)
    assert driver.wake_us() == 1
    driver.advance(1)
    assert driver.wake_us() == 0
    driver.turn()
    assert driver.wake_us() == 50_000  # it still accepts nothing
    driver.full.clear()
    driver.advance(50_000)
    driver.turn()
    assert driver.notices == [(1, "paused", 1)]


# --------------------------------------------------------------------------------------------------------- queries


@pytest.mark.parametrize("ended", [1, 2])
def test_asking_when_something_is_due_changes_nothing(ended: int) -> None:
    driver = Driver(lease_us=SECOND)
    requests = [driver.submit([1], deadline_ms=10), driver.submit([1], deadline_ms=20, client=2)]
    driver.create([1], idle_ttl_ms=5, client=2)
    driver.gone(2)
    for request in requests[:ended]:
        driver.cancel(request)
    before = digest(driver.machine)
    asked = driver.wake_us()
    assert driver.wake_us() == asked
    assert digest(driver.machine) == before


def test_a_holder_that_leaves_a_block_to_an_idle_sequence_wakes_a_request() -> None:
    driver = Driver(quotas={"t": Quota(ceiling=6)})
    driver.add_worker(16)
    sequence = driver.create([*range(1, 10)], tenant="t")
    driver.submit(sequence_id=sequence, max_tokens=1)
    driver.run_until_idle()
    block = driver.blocks_of(sequence)[0]
    driver.ref(block, "me", tenant="t")
    request = driver.submit([*range(30, 50)], 4, tenant="t")
    driver.step()
    assert driver.request(request).state == "pending", "the holder keeps one of the six blocks"
    driver.unref(block, "me")
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*range(30, 50)], 4)
