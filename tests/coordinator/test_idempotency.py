"""Idempotency keys: repeating a command returns the same requests."""

from __future__ import annotations

from typing import Any

import pytest

from kvforge.protocol.errors import Draining, InvalidRequest, KeyReused, QueueFull
from kvforge.protocol.messages import Accepted, Drain, PurgeFinished, SamplingParams
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import GREEDY, Driver, continuation

PROMPT = [3, 1, 4]


def keyed(driver: Driver, client: int = 1, key: str = "k", **fields: Any) -> Accepted:
    """Submit under a key."""
    reply: Accepted = driver.ask(
        driver.submit_message(**{"prompt": PROMPT, "max_tokens": 6, "key": key, **fields}), client
    )
    return reply


def entries(driver: Driver) -> int:
    return len(driver.machine.requests.keys._entries)


@pytest.mark.parametrize("state", ["pending", "running", "preempted", "finished", "cancelled"])
def test_the_same_command_again_is_the_same_request_streamed_from_its_start(state: str) -> None:
    driver = Driver(steps_in_flight_max=1)
    sampling = SamplingParams(temperature=0.0)
    if state != "pending":
        worker = driver.add_worker(16)
    first = keyed(driver, sampling=sampling)
    assert (first.request_id, first.seed, first.count, first.repeated) == (1, 7, 1, False)
    for _ in range(0 if state == "pending" else 20 if state == "finished" else 3):
        driver.step()
    if state == "preempted":
        driver.lose(worker)
    elif state == "cancelled":
        driver.cancel(1)
    assert driver.request(1).state == state
    driver.turn()
    streamed = len(driver.streamed.get(1, []))
    assert streamed == {"pending": 0, "finished": 6}.get(state, 3)
    again = keyed(driver, client=2, sampling=sampling)
    assert (again.request_id, again.seed, again.count, again.repeated) == (1, 7, 1, True)
    if state in ("pending", "preempted"):
        driver.add_worker(16)
    driver.run_until_idle()
    count = 3 if state == "cancelled" else 6
    assert list(driver.tokens_read(2, 1).items()) == list(enumerate(continuation(PROMPT, count)))
    assert driver.ended[1].generated_tokens == count
    assert driver.notices == [(1, "taken", 1)]
    assert driver.stats().requests.accepted_total == 1
    assert entries(driver) == 1


def test_a_command_that_names_what_is_the_default_is_the_same_command() -> None:
    """Another client, or a replay, may write defaults that this one omits."""
    driver = Driver()
    first = keyed(driver, sampling=SamplingParams(seed=3))
    again = keyed(driver, sampling=SamplingParams(seed=3, top_p=float("1"), presence_penalty=float("0"), top_k=0))
    assert (again.request_id, again.repeated) == (first.request_id, True)
    driver.refused(driver.submit_message(PROMPT, 6, key="k", sampling=SamplingParams(seed=3, top_p=0.5)), KeyReused)


def test_the_same_command_on_the_same_connection_takes_nothing_from_anyone(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    keyed(driver)
    driver.step()
    driver.step()
    assert keyed(driver).repeated
    driver.run_until_idle()
    assert list(driver.tokens_read(1, 1).values()) == continuation(PROMPT, 6)
    assert driver.notices == []


def test_a_client_that_vanished_finds_its_request_by_its_key(make_pool: MakePool) -> None:
    driver, _ = make_pool(lease_us=1_000_000)
    keyed(driver, client=5)
    driver.step()
    driver.gone(5)
    assert keyed(driver, client=6).repeated
    driver.advance(1_000_000)
    driver.run_until_idle()
    assert list(driver.tokens_read(6, 1).values()) == continuation(PROMPT, 6)


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [3, 1, 5]},
        {"prompt": [3, 1]},
        {"max_tokens": 7},
        {"count": 2},
        {"sampling": SamplingParams(temperature=0.0, seed=2)},
        {"stream": False},
        {"salt": "x"},
        {"priority": 1},
        {"deadline_ms": 5},
        {"first_token_ms": 5},
        {"detached": True},
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_another_command_of_the_same_key_is_refused(make_pool: MakePool, other: dict[str, Any], ended: bool) -> None:
    driver, _ = make_pool()
    keyed(driver)
    if ended:
        driver.run_until_idle()
    message = driver.submit_message(**{"prompt": PROMPT, "max_tokens": 6, "key": "k", **other})
    error = driver.refused(message, KeyReused)
    assert (error.key, error.request_id) == ("k", 1)
    driver.run_until_idle()
    assert driver.answer_of(1) == continuation(PROMPT, 6)


def test_each_tenant_has_its_own_keys(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    assert [keyed(driver, tenant=tenant).request_id for tenant in ("a", "b", "default")] == [1, 2, 3]
    assert keyed(driver, tenant="b").request_id == 2
    assert entries(driver) == 3


def test_commands_without_a_key_are_never_the_same(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    assert [keyed(driver, key="").request_id for _ in range(3)] == [1, 2, 3]
    assert entries(driver) == 0


# behaviour 27
@pytest.mark.parametrize("key", ["x" * 129, "a\0", "a\n"])
def test_an_impossible_key_is_refused(make_pool: MakePool, key: str) -> None:
    driver, _ = make_pool()
    assert driver.refused(driver.submit_message(PROMPT, key=key), InvalidRequest).field == "key"
    keyed(driver, key="x" * 128)


def test_a_known_key_is_answered_while_draining_and_while_the_queue_is_full() -> None:
    driver = Driver(queue_max=1)
    keyed(driver)
    driver.refused(driver.submit_message(PROMPT, key="new"), QueueFull)
    assert keyed(driver).repeated
    driver.ask(Drain(rid=1))
    driver.refused(driver.submit_message(PROMPT, key="new"), Draining)
    assert keyed(driver).repeated
    driver.add_worker(16)
    driver.run_until_idle()
    assert keyed(driver, client=3).repeated
    driver.turn()
    assert list(driver.tokens_read(3, 1).values()) == continuation(PROMPT, 6)


def test_a_refused_command_leaves_its_key_free(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    driver.refused(driver.submit_message(PROMPT, 0, key="k"), InvalidRequest)
    assert not keyed(driver).repeated


def test_several_answers_under_one_key(make_pool: MakePool) -> None:
    driver, _ = make_pool(32)
    first = keyed(driver, count=3, sampling=SamplingParams(temperature=0.0))
    driver.step()
    driver.step()
    again = keyed(driver, client=2, count=3, sampling=SamplingParams(temperature=0.0))
    assert (again.request_id, again.seed, again.count, again.repeated) == (first.request_id, first.seed, 3, True)
    driver.run_until_idle()
    for request in range(1, 4):
        assert list(driver.tokens_read(2, request).values()) == continuation(PROMPT, 6)
    assert entries(driver) == 1
    assert driver.ask(PurgeFinished(rid=1)).count == 3
    assert entries(driver) == 0


def test_of_several_answers_those_that_are_forgotten_end_with_an_error(make_pool: MakePool) -> None:
    driver, _ = make_pool(32, finished_max=3)
    keyed(driver, count=3)
    driver.run_until_idle()
    other = driver.submit([9, 9], max_tokens=1)
    driver.run_until_idle()
    forgotten = [request for request in (1, 2, 3) if request not in driver.machine.requests.finished]
    assert len(forgotten) == 1
    again = keyed(driver, client=2, count=3)
    assert (again.request_id, again.seed, again.count, again.repeated) == (1, 1, 3, True)
    driver.turn()
    for request in (1, 2, 3):
        error = driver.ended[request].error
        assert (error.code if error else "") == ("request_not_found" if request in forgotten else "")
        expected = [] if request in forgotten else continuation(PROMPT, 6)
        assert list(driver.tokens_read(2, request).values()) == expected
    assert entries(driver) == 1
    driver.ask(PurgeFinished(rid=1))
    assert entries(driver) == 0
    assert other == 4


def test_an_answer_that_is_forgotten_between_two_commands_of_a_turn_ends_once(make_pool: MakePool) -> None:
    driver, _ = make_pool(32, finished_max=2)
    keyed(driver, count=2)
    driver.run_until_idle()
    assert keyed(driver, client=2, count=2).repeated
    driver.cancel(driver.submit([9, 9]))
    assert [request for request in (1, 2) if request not in driver.machine.requests.finished] == [1]
    assert keyed(driver, client=2, count=2).repeated
    driver.turn()
    assert [driver.ended[request].error is None for request in (1, 2)] == [False, True]
    assert [list(driver.tokens_read(2, request).values()) for request in (1, 2)] == [[], continuation(PROMPT, 6)]


def test_a_key_of_a_sequences_request(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([7, 8], tenant="a")
    first = driver.ask(driver.submit_message(PROMPT, 6, sequence_id=sequence, key="k"))
    again = driver.ask(driver.submit_message(PROMPT, 6, sequence_id=sequence, key="k"), 2)
    assert (again.request_id, again.repeated) == (first.request_id, True)
    driver.run_until_idle()
    assert driver.tokens(sequence) == [7, 8, *PROMPT, *continuation([7, 8, *PROMPT], 6)]


# behaviour 30
def test_a_key_is_forgotten_with_the_last_of_its_requests(make_pool: MakePool) -> None:
    driver, _ = make_pool(finished_ttl_us=1_000_000)
    keyed(driver)
    driver.run_until_idle()
    driver.advance(999_999)
    driver.turn()
    assert keyed(driver).repeated
    driver.advance(1)
    driver.turn()
    assert entries(driver) == 0
    fresh = keyed(driver)
    assert (fresh.request_id, fresh.repeated) == (2, False)


# behaviour 30
def test_as_many_keys_are_kept_as_requests_are_known() -> None:
    driver = Driver(finished_max=10, queue_max=5)
    driver.add_worker(16)
    for i in range(60):
        keyed(driver, key=f"k{i}", prompt=[i], max_tokens=1, sampling=GREEDY)
        assert entries(driver) <= 10 + 5
        if i % 5 == 4:
            driver.run_until_idle()
    assert entries(driver) == 10
    assert keyed(driver, key="k59", prompt=[59], max_tokens=1).repeated
    assert not keyed(driver, key="k49", prompt=[49], max_tokens=1).repeated
