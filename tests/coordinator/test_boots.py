"""Ids of an earlier life of the coordinator are invalid, and using one raises an error that names the restart."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvforge.coordinator.host.ids import EPOCH_MS, ID_MAX, first_id
from kvforge.protocol.errors import RequestNotFound, SequenceNotFound, StaleGeneration
from kvforge.protocol.messages import Cancel, GetRequest, GetSequence, RefBlock
from tests.coordinator.driver import Driver, continuation

DAY_MS = 86_400_000


def life(unix_ms: int, first_generation: int = 0) -> Driver:
    """A coordinator that was started at this time."""
    driver = Driver(first_id=first_id(unix_ms), first_generation=first_generation)
    driver.add_worker(32)
    return driver


def test_ids_of_a_later_life_are_larger_than_all_of_an_earlier_one_and_exact_in_any_language() -> None:
    starts = [EPOCH_MS, EPOCH_MS + 1, EPOCH_MS + 2, EPOCH_MS + 365 * DAY_MS, EPOCH_MS + 200 * 365 * DAY_MS]
    firsts = [first_id(start) for start in starts]
    assert all(later - earlier >= 1000 for earlier, later in pairwise(firsts))
    assert firsts[0] >= 0
    assert firsts[-1] < ID_MAX <= 1 << 53
    assert first_id(0) == 0, "a clock that was never set gives id 0"


def test_everything_that_has_an_id_has_one_that_no_other_life_gives_out() -> None:
    driver = life(EPOCH_MS + 400 * DAY_MS)
    first = first_id(EPOCH_MS + 400 * DAY_MS)
    sequence = driver.create([1, 2, 3])
    forks = driver.fork(sequence, 2)
    requests = [driver.submit([4, 5], 6), driver.submit(sequence_id=sequence, max_tokens=5)]
    driver.run_until_idle()
    assert driver.answer_of(requests[0]) == driver.streamed[requests[0]] == continuation([4, 5], 6)
    assert driver.answer_of(requests[1]) == continuation([1, 2, 3], 5)
    assert [sequence, *forks] == sorted({sequence, *forks}) and sequence > first
    assert requests == sorted(set(requests)) and requests[0] > first
    holders = {holder.id for holder in driver.block(driver.blocks_of(forks[0])[0]).holders}
    assert holders == set(forks)
    driver.attach(requests[0], 3, client=4)
    driver.turn()
    assert driver.tokens_read(4, requests[0]) == dict(enumerate(continuation([4, 5], 6)[3:], 3))


@pytest.mark.parametrize("what", ["request", "sequence"])
def test_who_names_something_of_an_earlier_life_is_told_that_it_is_lost(what: str) -> None:
    before, now = life(EPOCH_MS + DAY_MS), life(EPOCH_MS + DAY_MS + 1)
    old_request, old_sequence = before.submit([1], 3), before.create([1])
    now.submit([7], 3)
    now.create([7])
    error: Any
    if what == "request":
        for message in (GetRequest(rid=1, request_id=old_request), Cancel(rid=2, request_id=old_request)):
            error = now.refused(message, RequestNotFound)
            assert "before the coordinator was started" in error.message
        assert "before" not in now.refused(now.attach_message(1 << 52), RequestNotFound).message
    else:
        error = now.refused(GetSequence(rid=1, sequence_id=old_sequence), SequenceNotFound)
        assert "before the coordinator was started" in error.message
        assert "before" not in now.refused(GetSequence(rid=1, sequence_id=1 << 52), SequenceNotFound).message


def test_a_block_is_not_known_by_the_generation_that_it_had_in_an_earlier_life() -> None:
    before, now = life(EPOCH_MS, 77), life(EPOCH_MS, 1 << 29)
    names = []
    for driver in (before, now):
        (block,) = driver.blocks_of(driver.create([1, 2, 3]))
        names.append((block, driver.block(block).generation))
    assert names[0][0] == names[1][0]
    block, generation = names[0]
    error = now.refused(RefBlock(rid=1, block_id=block, holder="x", generation=generation), StaleGeneration)
    assert error.fields["current"] == names[1][1]
