"""A request pins the beginning of its prompt for later ones: for a time, and within its tenant's share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.cache.blocks import NO_BLOCKS
from kvforge.coordinator.core.cache.supply import NO_SPARE
from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Explain, GetSequence, RemoveSequences, Rewind
from tests.coordinator.driver import Driver, FakeWorker, continuation

BEGINNING = list(range(10, 22))  # three blocks of four
PROMPT = [*BEGINNING, 30, 31]
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS


def pool(blocks: int = 32, **limits: Any) -> tuple[Driver, FakeWorker]:
    driver = Driver(**{"pinned_percent_max": 50, **limits})
    return driver, driver.add_worker(blocks)


def pin(driver: Driver, *pins: tuple[int, int], prompt: list[int] = PROMPT, **fields: Any) -> tuple[int, ...]:
    """Run a request with pins, and return what is pinned."""
    request = driver.submit(prompt, 2, pins=pins, **fields)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(prompt, 2)
    return driver.ended[request].pinned


def pinned(driver: Driver) -> list[int]:
    """Return the lengths of all pins."""
    s = driver.machine.cache.sequences
    return sorted(s.length[s.pinned].tolist())


def fill(driver: Driver, blocks: int, first: int = 100) -> None:
    """Run a request that takes so many blocks."""
    text = list(range(first, first + 4 * blocks - 2))
    request = driver.submit(text, 1)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(text, 1)


def hits(driver: Driver, prompt: list[int], **fields: Any) -> int:
    request = driver.submit(prompt, 1, **fields)
    driver.run_until_idle()
    return driver.request(request).cached_tokens


def test_the_full_blocks_of_the_beginning_outlive_others() -> None:
    driver, _ = pool(blocks=12)
    assert pin(driver, (len(BEGINNING) + 1, MINUTE_MS)) == (12,)
    for first in (100, 200):
        fill(driver, 9, first)  # evicts everything that is cached
    assert hits(driver, [*BEGINNING, 40, 41]) == 12


def test_without_a_pin_they_are_evicted() -> None:
    driver, _ = pool(blocks=12)
    assert pin(driver) == ()
    for first in (100, 200):
        fill(driver, 9, first)
    assert hits(driver, [*BEGINNING, 40, 41]) < 12


def test_it_ends_with_its_time_and_leaves_nothing() -> None:
    driver, _ = pool()
    pin(driver, (12, MINUTE_MS))
    driver.advance(MINUTE_MS * 1000 - 1)
    driver.turn()
    assert pinned(driver) == [12]
    driver.advance(1)
    driver.turn()
    assert pinned(driver) == [] and not driver.machine.cache.sequences.slot_of
    assert driver.free_or_cached() == 32


def test_each_use_prolongs_it_and_makes_no_second() -> None:
    driver, _ = pool()
    for _ in range(3):
        driver.advance(MINUTE_MS * 900)
        assert pin(driver, (12, MINUTE_MS)) == (12,)
        assert pinned(driver) == [12]


def test_a_longer_one_replaces_a_shorter_that_ends_earlier() -> None:
    driver, _ = pool()
    pin(driver, (8, MINUTE_MS))
    pin(driver, (12, MINUTE_MS))
    assert pinned(driver) == [12]


def test_a_shorter_one_that_lasts_longer_stays_beside_it() -> None:
    driver, _ = pool()
    assert pin(driver, (12, MINUTE_MS), (8, HOUR_MS)) == (12, 8)
    assert pinned(driver) == [8, 12]
    assert driver.machine.cache.sequences.used.sum() == 5
    driver.advance(MINUTE_MS * 1000)
    driver.turn()
    assert pinned(driver) == [8]
    assert pin(driver, (4, MINUTE_MS)) == (4,), "the longer pin has it"
    assert pinned(driver) == [8]


def test_what_exceeds_the_share_of_a_pool_is_shortened_or_refused() -> None:
    driver, _ = pool(blocks=8)  # four may be pinned
    assert pin(driver, (20, MINUTE_MS), prompt=list(range(100, 122))) == (16,)
    assert pin(driver, (12, MINUTE_MS)) == (0,)
    assert pinned(driver) == [16]


def test_the_share_is_that_of_the_tenants_ceiling() -> None:
    driver, _ = pool(blocks=32, quotas={"a": Quota(ceiling=4)})
    assert pin(driver, (12, MINUTE_MS), tenant="a") == (8,)
    assert pin(driver, (12, MINUTE_MS), tenant="b", salt="other") == (12,)


def test_the_number_of_pins_is_bounded() -> None:
    driver, _ = pool(sequences_max=4)  # two may be pins
    found = [pin(driver, (4, MINUTE_MS), prompt=[first, 1, 2, 3, 4]) for first in (50, 51, 52)]
    assert found == [(4,), (4,), (0,)]


def test_none_may_be_pinned_with_a_share_of_zero() -> None:
    driver, _ = pool(pinned_percent_max=0)
    assert pin(driver, (12, MINUTE_MS)) == (0,)


def test_less_than_a_block_is_not_pinned() -> None:
    driver, _ = pool()
    assert pin(driver, (3, MINUTE_MS)) == (0,)


def test_a_request_that_needs_the_whole_pool_takes_its_blocks() -> None:
    driver, _ = pool(blocks=8)
    pin(driver, (12, MINUTE_MS))
    fill(driver, 8)
    assert not driver.machine.cache.sequences.used.any()


def test_a_row_that_grows_waits_for_others_before_it_takes_them() -> None:
    driver, _ = pool(blocks=10)
    pin(driver, (12, MINUTE_MS))
    first, second = driver.submit([1, 2, 3], 12), driver.submit([4, 5, 6], 12)
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation([1, 2, 3], 12)
    assert driver.answer_of(second) == continuation([4, 5, 6], 12)
    assert hits(driver, [*BEGINNING, 40]) == 12


def test_blocks_that_come_back_with_the_next_result_are_waited_for() -> None:
    driver, worker = pool(blocks=8)
    pin(driver, (12, MINUTE_MS))
    request = driver.submit(list(range(100, 110)), 4)
    driver.turn()
    assert worker.inbox
    driver.cancel(request)
    cache = driver.machine.cache
    (group,) = cache.groups.values()

    def victims() -> list[int]:
        found, _ = cache.eviction.victims(group, 1, 8, NO_BLOCKS, NO_BLOCKS, NO_SPARE)
        return found.tolist()

    assert group.pool.quarantined and not victims()
    driver.run_until_idle()
    assert victims() == np.flatnonzero(cache.sequences.pinned).tolist()


def test_a_tenant_at_its_ceiling_takes_its_own_although_others_run() -> None:
    driver, _ = pool(blocks=32, quotas={"a": Quota(ceiling=6)})
    assert pin(driver, (12, MINUTE_MS), tenant="a") == (12,)
    driver.submit([1, 2, 3], 40, tenant="b")
    driver.step()
    request = driver.submit(list(range(200, 220)), 2, tenant="a")
    for _ in range(6):
        driver.step()
    assert driver.answer_of(request) == continuation(list(range(200, 220)), 2)
    driver.run_until_idle()


def test_a_worker_that_dies_takes_it_along_and_the_next_use_pins_anew() -> None:
    driver, worker = pool()
    pin(driver, (12, MINUTE_MS))
    driver.lose(worker)
    driver.add_worker(32)
    assert pin(driver, (12, MINUTE_MS)) == (12,)
    assert pinned(driver) == [12]
    assert hits(driver, [*BEGINNING, 40]) == 12


def test_other_tenants_and_salts_have_their_own() -> None:
    driver, _ = pool()
    for fields in ({"tenant": "a"}, {"tenant": "b", "salt": "x"}, {"tenant": "a", "salt": "y"}):
        assert pin(driver, (12, MINUTE_MS), **fields) == (12,)
    assert pinned(driver) == [12, 12, 12]


def test_it_is_explained_and_removed_like_any_sequence() -> None:
    driver, _ = pool()
    pin(driver, (12, MINUTE_MS))
    s = driver.machine.cache.sequences
    (sequence,) = s.id[s.pinned].tolist()
    assert driver.ask(GetSequence(rid=driver.rid(), sequence_id=sequence)).pinned
    found = driver.ask(Explain(rid=driver.rid(), sequence_id=sequence))
    assert any("pinned" in sentence for sentence in found.sentences) and found.facts["pinned"]
    driver.ask(RemoveSequences(rid=driver.rid(), sequence_ids=np.array([sequence], np.int64)))
    assert driver.free_or_cached() == 32


@pytest.mark.parametrize("change", ["append", "append two", "rewind", "submit"])
def test_a_client_that_changes_it_makes_it_an_ordinary_sequence(change: str) -> None:
    driver, _ = pool()
    pin(driver, (12, MINUTE_MS))
    s = driver.machine.cache.sequences
    (sequence,) = s.id[s.pinned].tolist()
    if change.startswith("append"):
        driver.append((sequence, [1] if change == "append" else [1, 2]))
    elif change == "rewind":
        driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=6))
    else:
        driver.submit(sequence_id=sequence, max_tokens=2)
        driver.run_until_idle()
    assert pinned(driver) == [] and sequence in s.slot_of


@pytest.mark.parametrize("pins", [((4, 0),), ((0, 5),), ((4, 1 << 40),), ((4, 5),) * 5])
def test_a_wrong_pin_is_refused(pins: tuple[tuple[int, int], ...]) -> None:
    driver, _ = pool()
    assert driver.refused(driver.submit_message(PROMPT, pins=pins), InvalidRequest).field == "pins"


def test_a_repeated_key_may_pin_otherwise() -> None:
    driver, _ = pool()
    request = driver.submit(PROMPT, 2, key="k", pins=((8, MINUTE_MS),))
    assert driver.submit(PROMPT, 2, key="k") == request
    driver.run_until_idle()
