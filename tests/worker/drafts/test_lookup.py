"""Drafts by lookup equal a search through the whole history, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import numpy as np
import pytest

from kvforge.coordinator.core.sizes import DRAFT_HISTORY_TOKENS
from kvforge.protocol.messages import NO_INT32, Int32Array
from kvforge.worker.drafts import history as histories
from kvforge.worker.drafts import lookup, recent
from kvforge.worker.drafts.drafter import Proposals
from kvforge.worker.drafts.history import FIRST_TOKENS, LENGTHS
from kvforge.worker.drafts.lookup import HISTORY_MIN, HOST_BYTES_MAX, LookupDrafter
from kvforge.worker.drafts.recent import RECENT_BYTES_MAX, SEARCHED_MAX

MOST = 6
DRAWN = histories.MIX


@pytest.fixture(autouse=True)
def same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put runs into the same buckets in each process: where many share one, a lookup may miss an occurrence."""
    monkeypatch.setattr(histories, "MIX", 0x9E3779B97F4A7C15)


def test_a_process_draws_its_own_odd_multiplier() -> None:
    other = subprocess.run(
        [sys.executable, "-c", "from kvforge.worker.drafts.history import MIX; print(MIX)"],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert (DRAWN % 2, int(other.stdout) % 2) == (1, 1)
    assert int(other.stdout) != DRAWN


def i4(tokens: list[int]) -> Int32Array:
    return np.array(tokens, np.int32)


def searched(history: list[int], most: int) -> list[int]:
    """Return what followed the last tokens, found by looking at every place of the history from its end."""
    for length in LENGTHS:
        run = history[-length:]
        for place in range(len(history) - 1, length - 1, -1):
            if len(run) == length and history[place - length : place] == run:
                extended = list(history)
                for index in range(most):
                    extended.append(extended[place + index])
                return extended[len(history) :]
    return []


def by_slot(proposals: Proposals) -> dict[int, list[int]]:
    assert {array.dtype for array in (proposals.slots, proposals.counts, proposals.tokens)} == {np.dtype(np.int32)}
    parts = np.split(proposals.tokens, np.cumsum(proposals.counts)[:-1]) if len(proposals.slots) else []
    return {slot: part.tolist() for slot, part in zip(proposals.slots.tolist(), parts, strict=True)}


def proposed(drafter: LookupDrafter, slot: int, most: int = MOST) -> list[int]:
    """Return the first `most` tokens that are proposed; fewer than MOST are never proposed."""
    found = by_slot(drafter.propose([slot])).get(slot, [])
    assert len(found) in (0, MOST)
    return found[:most]


@pytest.mark.parametrize("alphabet", [2, 5, 40, 100_000])
@pytest.mark.parametrize("begun", [0, 1, 2, 3, FIRST_TOKENS - 1, FIRST_TOKENS, FIRST_TOKENS + 1])
def test_proposals_equal_a_search_through_the_history(alphabet: int, begun: int) -> None:
    random, drafter = Random(alphabet * 1000 + begun), LookupDrafter(2)
    words = [[random.randrange(alphabet) for _ in range(random.randint(1, 6))] for _ in range(8)]
    history = [random.randrange(alphabet) for _ in range(begun)]
    drafter.begin(1, i4(history[: begun // 2]), i4(history[begun // 2 :]), MOST)
    found = 0
    for _ in range(150):
        more = random.choice(words) if random.random() < 0.8 else [random.randrange(alphabet)]
        drafter.append(1, more)
        history += more
        expected = searched(history, MOST)
        assert proposed(drafter, 1) == expected
        found += bool(expected)
    assert found > 20


@pytest.mark.parametrize("pieces", [1, 2, 20])
def test_the_first_tokens_of_an_empty_history_are_found(pieces: int) -> None:
    for tokens, following in (([5, 6, 7, 1, 5, 6], [7, 1]), ([5, 6, 7, 8, 6, 7, 9, 5, 6, 7], [8, 6])):
        drafter = LookupDrafter(1)
        drafter.begin(0, NO_INT32, NO_INT32, MOST)
        for first in range(0, len(tokens), pieces):
            drafter.append(0, tokens[first : first + pieces])
        assert proposed(drafter, 0, 2) == following


def test_the_longer_run_and_then_the_later_place_count() -> None:
    drafter = LookupDrafter(1)
    drafter.begin(0, i4([7, 8, 9, 1, 5, 8, 9, 2, 7, 8, 9]), NO_INT32, MOST)
    assert proposed(drafter, 0, 2) == [1, 5]  # three tokens, though two of them occur later
    drafter.begin(0, i4([7, 8, 9, 1, 7, 8, 9, 2, 7, 8, 9]), NO_INT32, MOST)
    assert proposed(drafter, 0, 2) == [2, 7]


def test_a_run_that_repeats_is_drafted_to_its_full_length() -> None:
    drafter = LookupDrafter(1)
    drafter.begin(0, i4([3, 4, 3, 4, 3, 4]), NO_INT32, MOST)
    assert proposed(drafter, 0, 5) == [3, 4, 3, 4, 3]


@pytest.mark.parametrize("waiting", [1, 5, 40, FIRST_TOKENS, 3 * HISTORY_MIN, 9 * HISTORY_MIN])
def test_tokens_that_came_without_proposals_are_found_later(waiting: int) -> None:
    random, drafter = Random(waiting), LookupDrafter(1, context_tokens_max=64 * HISTORY_MIN)
    history = [random.randrange(9) for _ in range(50)]
    drafter.begin(0, i4(history), NO_INT32, MOST)
    for _ in range(3):
        for _ in range(waiting):
            token = random.randrange(9)
            drafter.append(0, [token])
            history.append(token)
        assert drafter.remembered(0) == history
        for _ in range(waiting // lookup.INDEXED_MAX):
            assert proposed(drafter, 0) == [], "they are indexed by several proposals"
        assert proposed(drafter, 0) == searched(history, MOST)


@pytest.mark.parametrize("shared", [0, 9])
def test_a_full_history_without_new_tokens_stays_as_it_is(shared: int) -> None:
    drafter, tokens = LookupDrafter(1, context_tokens_max=HISTORY_MIN), [7, 8, 9, *range(10, FIRST_TOKENS - 3), 7, 8]
    drafter.begin(0, i4(tokens), NO_INT32, MOST, shared)
    drafter.append(0, [9])
    for _ in range(3):
        assert proposed(drafter, 0) == [10, 11, 12, 13, 14, 15]
        assert drafter.remembered(0) == [*tokens, 9]
        drafter.append(0, [])
    drafter.begin(0, i4([*range(HISTORY_MIN // 2 - 1)]), NO_INT32, MOST, shared)
    whole = [*range(HISTORY_MIN // 2 - 1)]
    for token in range(HISTORY_MIN // 2 + 1):
        drafter.append(0, [token])
        whole.append(token)
        proposed(drafter, 0)
    assert drafter.remembered(0) == whole, "as many as a slot remembers"


def test_tokens_that_wait_are_bounded_too() -> None:
    drafter = LookupDrafter(1, context_tokens_max=HISTORY_MIN)
    drafter.begin(0, NO_INT32, NO_INT32, MOST)
    for token in range(5 * HISTORY_MIN):
        drafter.append(0, [token])
        assert len(drafter.remembered(0)) <= 2 * HISTORY_MIN
        assert drafter.bytes <= drafter.costs.host_bytes_max - RECENT_BYTES_MAX
    drafter.append(0, [token - 4, token - 3, token - 2])
    assert proposed(drafter, 0, 2) == [token - 1, token]


def test_a_proposal_indexes_so_many_tokens_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "INDEXED_MAX", 900)
    drafter, slots = LookupDrafter(5), range(5)
    for slot in slots:
        drafter.begin(slot, i4([*range(400), 7, 8, 9]), NO_INT32, MOST)
    counts = [len(by_slot(drafter.propose(slots))) for _ in range(3)]
    assert counts == [2, 4, 5], "403 tokens each"
    assert by_slot(drafter.propose(slots)) == {slot: [10, 11, 12, 13, 14, 15] for slot in slots}


def test_tokens_are_indexed_in_pieces_until_it_is_late() -> None:
    """While a device computes, a drafter prepares, and the proposal behind the step finds all indexed."""
    tokens, looks = [*range(5 * lookup.PIECE), 7, 8, 9], iter([False, False, True, *[False] * 9])
    drafter = LookupDrafter(2, context_tokens_max=16 * HISTORY_MIN)
    for slot in (0, 1):
        drafter.begin(slot, i4(tokens), NO_INT32, MOST)

    def late() -> bool:
        return next(looks)

    def waiting() -> list[int]:
        return [history.waiting for _, history in drafter._of.values()]

    drafter.prepare([0], late)
    assert waiting() == [len(tokens) - 2 * lookup.PIECE, len(tokens)]
    drafter.prepare([0], late)
    assert waiting() == [0, len(tokens)]
    assert by_slot(drafter.propose([0, 1])) == {0: [10, 11, 12, 13, 14, 15]}
    drafter.prepare([0], late)  # nothing is left, and nothing is asked
    assert [*looks] == [False] * 5


def test_slots_are_apart_and_a_new_request_forgets_the_one_before() -> None:
    drafter = LookupDrafter(4)
    drafter.begin(0, i4([1, 2, 3, 1, 2]), NO_INT32, MOST)
    drafter.begin(3, i4([1, 2, 9, 1, 2]), NO_INT32, MOST)
    drafter.begin(2, i4([1, 2, 4, 5, 6]), NO_INT32, MOST)
    assert by_slot(drafter.propose([3, 2, 1, 0])) == {
        3: [9, 1, 2, 9, 1, 2],
        0: [3, 1, 2, 3, 1, 2],
    }  # slot 1 has never begun
    drafter.begin(0, i4([5]), i4([1, 2]), MOST)
    assert proposed(drafter, 0, 1) == []
    drafter.append(1, [1, 2, 1, 2])
    assert proposed(drafter, 1, 1) == []
    drafter.begin(3, i4([1, 2, 9, 1, 2]), NO_INT32, 0)
    assert proposed(drafter, 3) == []  # its request wants no drafts
    drafter.begin(3, i4([1, 2, 9, 1, 2]), NO_INT32, 2)
    assert by_slot(drafter.propose([3])) == {3: [9, 1]}
    drafter.forget()
    assert by_slot(drafter.propose([0, 2, 3])) == {}


def test_forks_go_on_by_themselves() -> None:
    drafter, prompt = LookupDrafter(2), i4([1, 2, 3, 4, 1, 2])
    drafter.begin(0, prompt, i4([8]), MOST)
    drafter.begin(1, prompt, i4([8]), MOST)
    drafter.append(0, [5, 1, 2])
    drafter.append(1, [6, 1, 2])
    assert (proposed(drafter, 0, 2), proposed(drafter, 1, 2)) == ([8, 5], [8, 6])


def test_memory_is_bounded_and_the_last_tokens_stay() -> None:
    random = Random(3)
    drafter = LookupDrafter(1, context_tokens_max=HISTORY_MIN)
    assert drafter.tokens_max == HISTORY_MIN
    history = [random.randrange(6) for _ in range(HISTORY_MIN // 2)]
    drafter.begin(0, i4(history), NO_INT32, MOST)
    for _ in range(4 * HISTORY_MIN):
        token = random.randrange(6)
        drafter.append(0, [token])
        history.append(token)
        assert drafter.bytes <= drafter.costs.host_bytes_max
    assert drafter.bytes == drafter.costs.host_bytes_max - RECENT_BYTES_MAX
    tail = history[-3:]
    places = [at for at in range(len(history) - HISTORY_MIN // 2, len(history)) if history[at - 3 : at] == tail]
    assert places
    assert proposed(drafter, 0, 1) == [history[places[-1]]]
    drafter.begin(0, i4([history[-3], *history]), NO_INT32, MOST)  # longer than a slot remembers
    assert drafter.bytes == drafter.costs.host_bytes_max - RECENT_BYTES_MAX
    assert proposed(drafter, 0, 3) == searched(history[-HISTORY_MIN // 2 :], 3) != []


@pytest.mark.parametrize("slots_max", [1, 8, 256, 4096])
def test_all_slots_together_stay_below_the_bound(slots_max: int) -> None:
    drafter = LookupDrafter(slots_max)
    assert drafter.tokens_max >= HISTORY_MIN
    assert drafter.costs.host_bytes_max <= HOST_BYTES_MAX + RECENT_BYTES_MAX
    assert (drafter.costs.device_bytes, drafter.costs.passes) == (0, 0)


def test_a_service_of_1024_sequences_remembers_what_it_is_sent_of_a_prompt() -> None:
    """Contexts of agents are longer than the 8,192 tokens that were left to a slot of 1,024."""
    assert LookupDrafter(1024, context_tokens_max=1 << 17).tokens_max >= DRAFT_HISTORY_TOKENS


def test_runs_of_one_bucket_are_told_apart_and_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MIX", 0)  # every run is in bucket 0
    drafter = LookupDrafter(1)
    drafter.begin(0, i4([1, 2, 3, 9, 9, 1, 2]), NO_INT32, MOST)
    assert proposed(drafter, 0, 1) == [3]
    drafter.append(0, [*range(50, 50 + histories.WALK_MAX), 1, 2])
    assert proposed(drafter, 0, 1) == []
    drafter.append(0, [3, 1, 2])
    assert proposed(drafter, 0, 1) == [3]


def test_requests_of_one_tenant_are_drafted_from_each_other() -> None:
    drafter = LookupDrafter(4)
    drafter.begin(0, i4([1, 2, 3, 4, 5, 6, 7, 8]), NO_INT32, MOST, shared=9)
    drafter.begin(1, i4([30, 1, 2, 3]), NO_INT32, MOST, shared=9)
    drafter.begin(2, i4([30, 1, 2, 3]), NO_INT32, MOST, shared=8)  # another tenant or salt
    drafter.begin(3, i4([30, 1, 2, 3]), NO_INT32, MOST)
    assert by_slot(drafter.propose([1, 2, 3])) == {1: [4, 5, 6, 7, 8]}
    drafter.append(1, [4])
    assert by_slot(drafter.propose([1])) == {1: [5, 6, 7, 8]}
    drafter.begin(0, i4([50]), NO_INT32, MOST, shared=9)  # the first request has ended
    drafter.append(1, [5])
    assert by_slot(drafter.propose([1])) == {1: [6, 7, 8]}
    drafter.append(1, [60, 61, 4, 5])
    assert by_slot(drafter.propose([1])) == {1: [60, 61, 4, 5, 60, 61]}, "two tokens count within a request alone"
    drafter.begin(1, i4([60, 1, 2, 3, 20, 1, 2, 3]), NO_INT32, MOST, shared=9)
    assert by_slot(drafter.propose([1])) == {1: [20, 1, 2, 3, 20, 1]}, "its own tokens come first"
    drafter.forget()
    drafter.begin(1, i4([30, 1, 2, 3]), NO_INT32, MOST, shared=9)
    assert by_slot(drafter.propose([1])) == {}


def test_a_request_that_never_proposed_is_searched_by_a_later_one() -> None:
    drafter = LookupDrafter(2)
    drafter.begin(0, i4([1, 2]), NO_INT32, MOST, shared=9)
    drafter.append(0, [3, 4, 5])
    drafter.begin(0, i4([50]), NO_INT32, MOST, shared=9)  # the first request has ended
    drafter.begin(1, i4([1, 2, 3]), NO_INT32, MOST, shared=9)
    assert by_slot(drafter.propose([1])) == {1: [4, 5]}


def test_the_newest_requests_are_searched_first_and_few() -> None:
    drafter = LookupDrafter(2)
    for number in range(SEARCHED_MAX):
        drafter.begin(0, i4([1, 2, 3, 40 + number]), NO_INT32, MOST, shared=5)
    drafter.begin(1, i4([1, 2, 3]), NO_INT32, MOST, shared=5)
    assert by_slot(drafter.propose([1])) == {1: [40 + SEARCHED_MAX - 1]}
    for _ in range(SEARCHED_MAX):
        drafter.begin(0, i4([7]), NO_INT32, MOST, shared=5)
    assert by_slot(drafter.propose([1])) == {}


def test_memory_of_ended_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = histories.History(i4([1, 2, 3, 0]), HISTORY_MIN, MOST).bytes
    monkeypatch.setattr(recent, "RECENT_BYTES_MAX", 3 * size)
    drafter = LookupDrafter(6)
    for number in range(20):
        drafter.begin(0, i4([1, 2, 3, number]), NO_INT32, MOST, shared=1 + number % 5)
        assert drafter.bytes <= 4 * size
    drafter.begin(0, NO_INT32, NO_INT32, 0)
    assert drafter.bytes == 3 * size
    for slot in range(1, 6):
        drafter.begin(slot, i4([1, 2, 3]), NO_INT32, MOST, shared=slot)
    assert by_slot(drafter.propose(range(1, 6))) == {3: [17], 4: [18], 5: [19]}
