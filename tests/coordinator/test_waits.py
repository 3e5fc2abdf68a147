"""Waiting requests continue as soon as what they wait for is available."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.blocks import Blocks
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.scheduling.admission import Admission
from kvforge.coordinator.core.scheduling.choice import Choice
from kvforge.coordinator.core.waits import Event, Waits, blocks_of
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation
from tools.simulation.limits import make_limits


def test_a_request_starts_when_the_step_is_over_that_kept_an_idle_sequence_from_being_evicted(
    make_pool: MakePool,
) -> None:
    driver, worker = make_pool(8, steps_in_flight_max=1)
    sequence = driver.create(range(1, 8))
    other = driver.submit([1], max_tokens=20)
    cancelled = driver.submit(sequence_id=sequence, max_tokens=10)
    driver.turn()
    assert len(worker.inbox) == 1
    driver.cancel(cancelled)  # its token would go into a block that it still holds
    waiting = driver.submit(range(100, 117), max_tokens=1)
    driver.turn()
    assert driver.request(waiting).state == "pending", "a step still reads the sequence that must be evicted"
    free = driver.free()
    driver.answer(worker)
    assert driver.free() == free
    driver.turn()
    assert (driver.request(waiting).state, driver.request(other).state) == ("running", "running")


# ---------------------------------------------------------------------------------------------- minimal wake-ups


def test_others_start_as_soon_as_the_one_that_runs_alone_is_past_its_crash_point(make_pool: MakePool) -> None:
    driver, worker = make_pool(40, crashes_max=5, blocks_max=128)
    suspect = driver.submit([1, 2, 3], 40)
    for _ in range(2):
        driver.turn()
        driver.lose(worker)
        worker = driver.add_worker(40)
    driver.turn()
    others = [driver.submit([9, i], 2) for i in range(2)]
    driver.turn()
    assert [driver.request(other).state for other in others] == ["pending", "pending"]
    told = driver.explain(request_id=others[0])
    assert (told.facts["limit"], told.facts["other"]) == ("alone", suspect)
    driver.answer(worker)
    driver.turn()
    assert [driver.request(other).state for other in others] == ["running", "running"]
    assert driver.request(suspect).state == "running"


def test_who_waits_for_one_step_is_not_put_off_by_who_waits_for_a_later_one() -> None:
    tenants = Tenants(make_limits())
    told: list[int] = []

    class Told(Waits):
        def wake(self, event: Event) -> list[int]:
            assert event == blocks_of(3)
            told.append(pool.done_step)
            return []

    pool = BlockPool(Clock(), Blocks(4, 4), tenants, Told(), None, 3, 0, 4)
    for step in (2, 1, 4):
        pool.await_step(step)
    for step in range(1, 6):
        pool.await_step(step + 4)
        pool.step_done(step)
    assert told == [1, 2, 4, 5]


def test_a_request_that_waits_is_tried_when_what_it_would_share_is_there(make_pool: MakePool) -> None:
    driver, worker = make_pool(12, steps_in_flight_max=1, step_tokens_max=8)
    text = list(range(100, 124))
    first = driver.submit(text, 8)
    driver.step()
    second = driver.submit([*text, 7], 1)
    driver.turn()
    assert driver.request(second).state == "pending"
    assert driver.explain(request_id=second).facts["limit"] == "blocks"
    while driver.request(second).state == "pending":
        assert driver.request(first).state == "running", "from the second step on, enough blocks are free"
        driver.answer(worker)
        driver.turn()
    assert driver.request(second).cached_tokens >= 16
    driver.run_until_idle()
    assert driver.answer_of(second) == continuation([*text, 7], 1)


def test_siblings_that_wait_cost_a_turn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(queue_max=600, samples_max=256, blocks_per_sequence_max=64, blocks_max=1024)
    worker = driver.add_worker(1024)
    driver.submit([5], 30)
    driver.turn()
    first = driver.submit(range(200), 2, count=256)
    driver.turn()
    looked: list[int] = []
    real = Admission.waits_for_sibling
    monkeypatch.setattr(Admission, "waits_for_sibling", lambda self, r: looked.append(r.id) or real(self, r))
    iterated: list[int] = []
    tried = Choice.choose
    monkeypatch.setattr(Choice, "choose", lambda self, r, kept: iterated.append(r.id) or tried(self, r, kept))
    monkeypatch.setattr(driver.machine, "check_invariants", lambda: None)  # it inspects all requests
    for _ in range(3):
        driver.answer(worker)
        driver.turn()
    assert driver.request(first).state == "running"
    assert (looked, iterated) == ([], [])


# ----------------------------------------------------------------------------------- rows that can never continue


def test_a_row_that_pinned_blocks_stop_fails_and_says_who_pins_them(make_pool: MakePool) -> None:
    driver, _ = make_pool(10)
    sequence = driver.create(range(1, 13))
    driver.submit(sequence_id=sequence, max_tokens=1)
    driver.run_until_idle()
    for block in driver.blocks_of(sequence)[:3]:
        driver.ref(block, "pin", client=2)
    driver.remove(sequence)
    stopped = driver.submit([50, 51, 52, 53], 32)
    for _ in range(20):
        driver.step()
    other = driver.submit([60, 61], 2)
    driver.run_until_idle()
    ended = driver.request(stopped)
    assert (ended.state, ended.error.code) == ("failed", "capacity_exceeded")
    assert "'pin' holds 3 blocks by name" in ended.error.message
    assert ended.error.fields["resource"] == "blocks"
    assert driver.answer_of(stopped) == continuation([50, 51, 52, 53], 32)[:24]
    assert driver.answer_of(other) == continuation([60, 61], 2)
    assert driver.streamed[stopped] == driver.answer_of(stopped)


def test_a_row_that_its_own_ceiling_stops_fails_while_others_run_and_takes_nothing_from_them() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=5)}, policy="none")
    driver.add_worker(30)
    sequence = driver.create(range(8), tenant="a")
    stopped = driver.submit([50, 51, 52], 15, tenant="a")
    other = driver.submit([60, 61], 60, tenant="b")
    driver.step()
    driver.append((sequence, range(4)))
    for _ in range(10):
        driver.step()
    ended = driver.request(stopped)
    assert (ended.state, ended.error.code) == ("failed", "quota_exceeded")
    assert f"sequence {sequence} is idle and holds 3 blocks" in ended.error.message
    assert (ended.error.fields["tenant"], ended.error.fields["ceiling"]) == ("a", 5)
    assert (driver.request(other).state, driver.request(other).preemptions) == ("running", 0)
    driver.run_until_idle()
    assert driver.answer_of(other) == continuation([60, 61], 60)


def test_a_row_at_its_ceiling_waits_for_what_ends_by_itself_and_explain_says_so() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=4)}, partial_tokens_min=100)
    driver.add_worker(30)
    prompt = list(range(8))
    driver.submit([*prompt, 1], 1, tenant="a", salt="s")
    driver.run_until_idle()
    holder = driver.submit([*prompt, 2], 50, tenant="b", salt="s")  # two blocks that are charged to a
    driver.step()
    waits = driver.submit([50, 51, 52], 10, tenant="a")
    for _ in range(8):
        driver.step()
    assert (driver.request(waits).state, driver.request(holder).state) == ("running", "running")
    told = driver.explain(request_id=waits)
    assert told.facts["limit"] == "tenant ceiling"
    assert any("it is stalled" in sentence for sentence in told.sentences)
    driver.run_until_idle()
    assert driver.answer_of(waits) == continuation([50, 51, 52], 10)
    assert driver.answer_of(holder) == continuation([*prompt, 2], 50)


def test_no_room_is_kept_for_a_request_that_only_a_client_could_make_room_for(make_pool: MakePool) -> None:
    driver, _ = make_pool(10, passes_max=1, policy="none")
    held = driver.create(range(16))
    large = driver.submit(range(100, 128), 2)
    for i in range(6):
        small = driver.submit([i], 2)
        driver.step()
        driver.step()
        driver.step()
        assert driver.request(small).state == "finished", "the pool must not idle for a request that cannot start"
    assert driver.request(large).state == "pending"
    driver.remove(held)
    driver.run_until_idle()
    assert driver.answer_of(large) == continuation(range(100, 128), 2)
