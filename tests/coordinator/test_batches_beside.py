"""Requests of batches, which have the lowest priority, beside others: they leave rows, and stretch steps by little."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.protocol.messages import StepResult
from tests.coordinator.driver import Driver, FakeWorker, continuation

BATCH = -100
LONG = list(range(100, 228))  # 128 tokens
TOKEN_US, FIXED_US = 100, 30_000  # of a step: 100 prompt tokens take a third of what decodes take


class TimedWorker(FakeWorker):
    """A worker with steps of a fixed time and a time for each prompt token, and for each decode if that is set."""

    decode_us = 0

    def execute(self, step: Any) -> StepResult:
        """Execute a step, and report what it takes. States have no contents here: their copies are left out."""
        triples = step.copies.reshape(-1, 3)
        of_kv = np.array([(source, 0) in self.kv for source in triples[:, 0].tolist()], bool)
        result = super().execute(msgspec.structs.replace(step, copies=triples[of_kv].reshape(-1)))
        prefill = sum(count for count in step.counts.tolist() if count > 1)
        decodes = sum(count == 1 for count in step.counts.tolist())
        fields = {name: getattr(result, name) for name in result.__struct_fields__ if name != "duration_us"}
        return StepResult(**fields, duration_us=FIXED_US + TOKEN_US * prefill + self.decode_us * decodes)


class TimedDriver(Driver):
    """A driver with such workers; each step moves its clock."""

    worker_type = TimedWorker

    def report(self, worker: FakeWorker, result: Any) -> Any:
        """Deliver a result after its time."""
        self.advance(getattr(result, "duration_us", 0))
        return super().report(worker, result)


def service(state_blocks: int = 0, **limits: Any) -> tuple[Driver, FakeWorker]:
    """Return a driver and its worker. `state_blocks`: those of the recurrent state of a sequence."""
    given = {"step_tokens_max": 512, "step_rows_max": 16, "blocks_per_sequence_max": 128, "blocks_max": 1024, **limits}
    driver = TimedDriver(**{"sequences_max": 64, "state_blocks_max": max(1, state_blocks), **given})
    driver.wants_kinds, driver.state_blocks = bool(state_blocks), state_blocks
    driver.prompt_chunk = 16 if state_blocks else 1
    return driver, driver.add_worker(1024)


def learn(driver: Driver, **fields: Any) -> None:
    """Run three requests, after which the costs of steps are known."""
    for first, count in ((400, 128), (600, 64), (800, 96)):
        driver.submit(list(range(first, first + count)), 20, **fields)
        driver.run_until_idle()


def tokens_by_request(driver: Driver, worker: FakeWorker) -> dict[int, int]:
    """Run one step; return its tokens by request."""
    s = driver.machine.cache.sequences
    driver.turn()
    step = worker.inbox[0]
    found = {int(s.request[slot]): count for slot, count in zip(step.slots, step.counts.tolist(), strict=True)}
    driver.answer(worker)
    return found


def chunks(driver: Driver, worker: FakeWorker, request: int, steps: int) -> list[int]:
    """Run so many steps; return the tokens of the request in each."""
    return [tokens_by_request(driver, worker).get(request, 0) for _ in range(steps)]


@pytest.mark.parametrize("state_blocks", [0, 2])
def test_beside_decodes_of_others_batches_wait(state_blocks: int) -> None:
    driver, worker = service(steps_in_flight_max=1, state_blocks=state_blocks)
    learn(driver)
    old = driver.submit([5, 6, 7], 40, priority=BATCH)
    driver.step()
    chat = driver.submit([1, 2, 3, 4], 30)
    driver.step()
    batch = driver.submit(LONG * 3, 2, priority=BATCH)
    for _ in range(29):
        assert tokens_by_request(driver, worker) == {chat: 1}
    assert driver.answer_of(chat) == continuation([1, 2, 3, 4], 30)
    assert tokens_by_request(driver, worker)[batch] > 16
    driver.run_until_idle()
    assert driver.answer_of(old) == continuation([5, 6, 7], 40)
    assert driver.answer_of(batch) == continuation(LONG * 3, 2)


@pytest.mark.parametrize("prompts", [0, 1])
def test_after_a_thousand_such_steps_decodes_of_batches_make_them_15_percent_longer(prompts: int) -> None:
    """A step takes 30 ms and 1.5 for each row: 15 % of 31.5 ms are three rows of batches."""
    driver, worker = service(steps_in_flight_max=1)
    worker.decode_us = 1500
    lines = [driver.submit([at, 2, 3], 60, priority=BATCH) for at in range(1, 9)]
    for _ in range(3):
        driver.step()
    chat = driver.submit([20, 21], 30)
    driver.step()
    more = [driver.submit([at, *LONG * 3], 2, priority=BATCH) for at in range(prompts)]
    (group,) = driver.machine.cache.groups.values()
    group.batch_step = group.next_step - 1024
    for _ in range(4):
        tokens_by_request(driver, worker)  # steps of two sizes are measured
    for _ in range(15):
        stretched = prompts and group.next_step % 3 == 0
        found = tokens_by_request(driver, worker)
        assert found.pop(chat) == 1
        assert found.keys() == ({*more} if stretched else {*lines[:3]}), "the oldest three"
    driver.run_until_idle()
    for at, line in enumerate(lines, 1):
        assert driver.answer_of(line) == continuation([at, 2, 3], 60)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_of_decodes_alone_are_steps_without_others(steps_in_flight: int) -> None:
    """Whether planned or repeated: a batch with long answers waits too, once a request comes."""
    driver, worker = service(steps_in_flight_max=steps_in_flight)
    line = driver.submit([5, 6, 7], 200, priority=BATCH)
    (group,) = driver.machine.cache.groups.values()
    for _ in range(3):
        driver.step()
    group.batch_step = group.next_step - 1024
    driver.step()
    assert group.steady is not None
    chat = driver.submit([20, 21], 30)
    while not driver.answer_of(chat):
        driver.step()
    for _ in range(20):
        assert tokens_by_request(driver, worker) == {chat: 1}
    driver.run_until_idle()
    assert driver.answer_of(line) == continuation([5, 6, 7], 200)


@pytest.mark.parametrize("state_blocks", [0, 2])
def test_after_a_thousand_such_steps_every_third_takes_a_third_longer(state_blocks: int) -> None:
    driver, worker = service(steps_in_flight_max=1, state_blocks=state_blocks)
    learn(driver)
    old = driver.submit([5, 6, 7], 40, priority=BATCH)
    driver.step()
    chat = driver.submit([1, 2, 3, 4], 30)
    driver.step()
    driver.step()
    prompt = LONG * 3
    batch = driver.submit(prompt, 2, priority=BATCH)
    (group,) = driver.machine.cache.groups.values()
    group.batch_step = group.next_step - 1024
    for _ in range(15):
        stretched = group.next_step % 3 == 0
        found = tokens_by_request(driver, worker)
        assert found.pop(chat) == 1
        assert found == ({batch: 64} if stretched else {old: 1}), "64: the power of two below 100"
    driver.run_until_idle()
    assert driver.answer_of(chat) == continuation([1, 2, 3, 4], 30)
    assert driver.answer_of(old) == continuation([5, 6, 7], 40)
    assert driver.answer_of(batch) == continuation(prompt, 2)


@pytest.mark.parametrize(
    ("state_blocks", "prompt", "first"), [(0, 100, 100), (2, 112, 96)], ids=["no state", "cut for a checkpoint"]
)
def test_prompts_of_others_have_their_steps_alone(state_blocks: int, prompt: int, first: int) -> None:
    """Decodes may be a thirty-second of the tokens, 3 of 100: two of eight of the batch beside one of others."""
    driver, worker = service(steps_in_flight_max=1, state_blocks=state_blocks)
    learn(driver)
    lines = [driver.submit([at, 2, 3], 40, priority=BATCH) for at in range(1, 9)]
    for _ in range(3):
        driver.step()
    other = driver.submit([20, 21], 8)
    driver.step()
    driver.submit(LONG * 3, 2, priority=BATCH)
    (group,) = driver.machine.cache.groups.values()
    assert group.next_step % 16, "every sixteenth step has prompt tokens of batches too"
    chat = driver.submit(list(range(300, 300 + prompt)), 3)
    found = tokens_by_request(driver, worker)
    assert found == {chat: first, other: 1, **dict.fromkeys(lines[:2], 1)}, "the oldest two"
    driver.run_until_idle()
    for at, line in enumerate(lines, 1):
        assert driver.answer_of(line) == continuation([at, 2, 3], 40)


def test_beside_steps_full_of_prompts_batches_go_on() -> None:
    driver, worker = service(steps_in_flight_max=1, step_tokens_max=64, blocks_per_sequence_max=512)
    driver.submit(LONG * 8, 1)
    batch = driver.submit([9, *LONG], 1, priority=BATCH)
    (group,) = driver.machine.cache.groups.values()
    for _ in range(16):
        kept = 4 if group.next_step % 16 == 0 else 0
        assert tokens_by_request(driver, worker).get(batch, 0) == kept
    driver.run_until_idle()
    assert driver.answer_of(batch) == continuation([9, *LONG], 1)


def test_a_prompt_without_room_does_not_hold_batches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker = service(steps_in_flight_max=1, step_tokens_max=64)
    chat = driver.submit(LONG * 2, 1)
    batch = driver.submit([9, *LONG], 2, priority=BATCH)
    driver.step()
    scheduler, stuck = driver.machine.scheduler, driver.machine.requests.live[chat].slot
    make_way = scheduler._make_way
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "_writable", lambda shares: [False] * len(shares))
        patched.setattr(scheduler, "_make_way", lambda group, slot, n: slot != stuck and make_way(group, slot, n))
        found = chunks(driver, worker, batch, 4)
    assert sum(found) == 130
    driver.run_until_idle()
    assert driver.answer_of(batch) == continuation([9, *LONG], 2)
    assert driver.answer_of(chat) == continuation(LONG * 2, 1)


def test_another_prompt_beside_a_decode_is_not_bounded_so() -> None:
    driver, worker = service(steps_in_flight_max=1)
    learn(driver)
    driver.submit([1, 2, 3, 4], 30)
    driver.step()
    driver.step()
    other = driver.submit(LONG, 2, priority=-99)
    assert chunks(driver, worker, other, 1) == [128]
    driver.run_until_idle()


def test_a_batch_alone_has_whole_steps() -> None:
    driver, worker = service(steps_in_flight_max=1)
    learn(driver, priority=BATCH)
    batch = driver.submit([7, *LONG], 2, priority=BATCH)
    assert chunks(driver, worker, batch, 1) == [129]
    driver.run_until_idle()


def test_soon_after_another_request_its_steps_are_short_and_one_at_a_time() -> None:
    driver, worker = service(steps_in_flight_max=2)
    learn(driver)
    batch = driver.submit([7, *LONG], 8, priority=BATCH)
    driver.turn()
    assert len(worker.inbox) == 1
    assert worker.inbox[0].counts.sum() == 64, "a third longer than a step without prompt tokens: at most 100"
    driver.run_until_idle()
    assert driver.answer_of(batch) == continuation([7, *LONG], 8)


@pytest.mark.parametrize("state_blocks", [0, 2])
def test_after_others_prompts_of_batches_have_seven_of_eight_steps_and_decodes_one(state_blocks: int) -> None:
    driver, worker = service(steps_in_flight_max=1, state_blocks=state_blocks, blocks_per_sequence_max=512)
    learn(driver)
    old = driver.submit([5, 6, 7], 40, priority=BATCH)
    driver.step()
    driver.step()
    prompt = LONG * 8
    batch = driver.submit(prompt, 2, priority=BATCH)
    (group,) = driver.machine.cache.groups.values()
    for _ in range(15):
        decodes = group.next_step % 8 == 0
        assert tokens_by_request(driver, worker) == ({old: 1} if decodes else {batch: 64})
    driver.run_until_idle()
    assert driver.answer_of(old) == continuation([5, 6, 7], 40)
    assert driver.answer_of(batch) == continuation(prompt, 2)


def test_decodes_of_batches_go_on_while_their_prompts_lack_room(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker = service(steps_in_flight_max=1)
    learn(driver)
    old = driver.submit([5, 6, 7], 40, priority=BATCH)
    driver.step()
    batch = driver.submit(LONG * 3, 2, priority=BATCH)
    driver.step()
    scheduler, stuck = driver.machine.scheduler, driver.machine.requests.live[batch].slot
    make_way = scheduler._make_way
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "_writable", lambda shares: [False] * len(shares))
        patched.setattr(scheduler, "_make_way", lambda group, slot, n: slot != stuck and make_way(group, slot, n))
        for _ in range(9):
            assert tokens_by_request(driver, worker) == {old: 1}
    driver.run_until_idle()
    assert driver.answer_of(old) == continuation([5, 6, 7], 40)
    assert driver.answer_of(batch) == continuation(LONG * 3, 2)


def test_where_others_have_no_room_batches_decode_and_no_row_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker = service(steps_in_flight_max=1)
    old = driver.submit([5, 6, 7], 40, priority=BATCH)
    driver.step()
    chat = driver.submit([20, 21], 30)
    driver.step()
    scheduler, tried = driver.machine.scheduler, list[list[int]]()
    slot_of = {request: driver.machine.requests.live[request].slot for request in (old, chat)}

    def without_chat(group: Any, slots: np.ndarray, prefilling: bool) -> np.ndarray:
        tried.append(slots.tolist())
        return slots[slots != slot_of[chat]]

    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "_decodes", without_chat)
        assert tokens_by_request(driver, worker) == {old: 1}
    assert tried[:2] == [[slot_of[chat]], [slot_of[old]]]
    driver.run_until_idle()
    assert driver.answer_of(old) == continuation([5, 6, 7], 40)
    assert driver.answer_of(chat) == continuation([20, 21], 30)


def test_a_while_after_it_they_are_long_again() -> None:
    driver, worker = service(steps_in_flight_max=2)
    learn(driver)
    driver.advance(30_000_000)
    batch = driver.submit([7, *LONG, *LONG], 8, priority=BATCH)
    driver.turn()
    assert worker.inbox[0].counts.sum() == 257 and len(worker.inbox) == 2
    driver.run_until_idle()
    assert driver.answer_of(batch) == continuation([7, *LONG, *LONG], 8)


@pytest.mark.parametrize(("priority", "running"), [(BATCH, 15), (-99, 16), (0, 16)])
def test_batches_leave_a_sixteenth_of_the_rows(priority: int, running: int) -> None:
    driver, _ = service()
    requests = [driver.submit([at, 2, 3], 6, priority=priority) for at in range(1, 21)]
    driver.turn()
    (group,) = driver.machine.cache.groups.values()
    assert group.running == running
    chat = driver.submit([50, 51], 3)
    driver.turn()
    assert (driver.request(chat).state == "running") == (running == 15)
    driver.run_until_idle()
    for at, request in enumerate(requests, 1):
        assert driver.answer_of(request) == continuation([at, 2, 3], 6)


@pytest.mark.parametrize(("rows", "running"), [(4, 3), (3, 3), (1, 1)])
def test_few_rows_leave_one_and_fewer_none(rows: int, running: int) -> None:
    driver, _ = service(step_rows_max=rows)
    for at in range(6):
        driver.submit([at, 2, 3], 6, priority=BATCH)
    driver.turn()
    (group,) = driver.machine.cache.groups.values()
    assert group.running == running
    driver.run_until_idle()


def test_where_batches_alone_wait_for_rows_none_is_tried_until_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try takes time that a step would wait for."""
    driver, _ = service()
    requests = [driver.submit([at, 2, 3], 2 + at % 5, priority=BATCH) for at in range(1, 31)]
    driver.turn()
    tried, choose = list[int](), driver.machine.admission.choice.choose
    monkeypatch.setattr(
        driver.machine.admission.choice,
        "choose",
        lambda request, kept: (tried.append(request.id), choose(request, kept))[1],
    )
    more = driver.submit([90, 2], 2, priority=BATCH)
    for request in (requests[-1], more):
        told = driver.explain(request_id=request)
        assert told.facts["limit"] == "step_rows_max"
        assert any("every worker runs its limit of 15 requests" in sentence for sentence in told.sentences)
    driver.step()
    assert not tried
    driver.run_until_idle()
    assert sorted(set(tried)) == sorted(tried) == [*requests[15:], more], "each once, when it started"
    chat, full = driver.submit([50, 51], 3), [driver.submit([at, 2, 3], 3) for at in range(1, 16)]
    waits = driver.submit([91, 2], 2, priority=BATCH)
    late = driver.submit([92, 2], 2)
    driver.run_until_idle()
    for request in (chat, *full, waits, late):
        assert driver.answer_of(request)
