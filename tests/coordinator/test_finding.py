"""FindPrefix predicts what the next Submit finds, and has no side effects."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge.coordinator.core.rights import READ, SUBMIT, Access
from kvforge.protocol.errors import InvalidRequest, NotAllowed
from kvforge.protocol.messages import FindPrefix, PrefixFound
from tests.amount import examples
from tests.coordinator.driver import PROMPT, Driver, waiting_driver

LONG = list(range(20, 52))
ALICE, READER = 11, 12


def find(driver: Driver, prompt: Any, client: int = 1, **fields: Any) -> PrefixFound:
    found: PrefixFound = driver.ask(FindPrefix(rid=driver.rid(), prompt=np.array(prompt, np.int32), **fields), client)
    return found


def state(driver: Driver) -> dict[str, Any]:
    return {**msgspec.structs.asdict(driver.stats()), "rid": 0}


def served(**limits: Any) -> Driver:
    driver = Driver(**limits)
    driver.add_worker(32)
    return driver


def test_without_a_worker_nothing_is_ready() -> None:
    driver = Driver()
    found = find(driver, PROMPT)
    assert not found.ready and not found.draining


def test_what_is_cached_is_what_the_next_request_finds() -> None:
    driver = served()
    assert find(driver, LONG).cached_tokens == 0
    driver.submit(LONG, 4)
    driver.run_until_idle()
    found = find(driver, LONG)
    assert found.ready and found.queued_tokens == found.running == found.pending == 0
    request = driver.submit(LONG, 4)
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == found.cached_tokens > 0


@settings(max_examples=examples(30), deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=8),
    seen=st.integers(1, 4),
)
def test_it_is_never_a_guess(prompts: list[tuple[int, int, int]], seen: int) -> None:
    driver = served(sequences_max=8)
    for start, length, salt in prompts:
        prompt, fields = [100 * start + i for i in range(length)], {"salt": "s" * salt}
        before = state(driver)
        found = find(driver, prompt, **fields)
        assert find(driver, prompt, **fields).cached_tokens == found.cached_tokens
        assert state(driver) == before
        request = driver.submit(prompt, seen, **fields)
        driver.run_until_idle()
        assert driver.request(request).cached_tokens == found.cached_tokens


def test_a_prompt_is_found_by_its_own_tenant_and_salt_alone() -> None:
    driver = served()
    driver.submit(LONG, 1, tenant="a")
    driver.submit(LONG, 1, salt="x")
    driver.run_until_idle()
    assert find(driver, LONG, tenant="a").cached_tokens > 0
    assert find(driver, LONG, tenant="b").cached_tokens == 0
    assert find(driver, LONG, tenant="b", salt="x").cached_tokens > 0
    assert find(driver, LONG, tenant="a", salt="y").cached_tokens == 0


def test_a_client_of_one_tenant_finds_its_own_alone_and_needs_the_right() -> None:
    driver = served()
    driver.come(ALICE, Access("alice", "a", (SUBMIT,)))
    driver.come(READER, Access("reader", "a", (READ,)))
    driver.submit(LONG, 1, tenant="a")
    driver.submit(LONG, 1, salt="x")
    driver.run_until_idle()
    assert find(driver, LONG, ALICE).cached_tokens > 0
    assert find(driver, LONG, ALICE, salt="x").cached_tokens == 0, "a hit would reveal that another tenant had the text"
    asked = FindPrefix(rid=1, tenant="b", prompt=np.array(LONG, np.int32))
    driver.refused(asked, NotAllowed, ALICE)
    driver.refused(FindPrefix(rid=2, prompt=np.array(LONG, np.int32)), NotAllowed, READER)


def test_what_waits_and_what_runs_is_counted() -> None:
    driver = served(step_rows_max=2, step_tokens_max=8)
    for at in range(4):
        driver.submit([10 * at + i for i in range(10)], 4)
    driver.turn()
    found = find(driver, PROMPT)
    assert (found.running, found.pending, found.rows_free) == (2, 2, 0)
    assert 20 < found.queued_tokens <= 40
    driver.run_until_idle()
    found = find(driver, PROMPT)
    assert (found.running, found.pending, found.rows_free, found.queued_tokens) == (0, 0, 2, 0)
    assert found.room_tokens == 32 * 4


def test_a_key_is_known_where_its_requests_are() -> None:
    driver = served()
    assert not find(driver, PROMPT, key="k").known
    driver.submit(PROMPT, 2, key="k", tenant="a")
    driver.run_until_idle()
    assert find(driver, PROMPT, key="k", tenant="a").known
    assert not find(driver, PROMPT, key="k", tenant="b").known
    assert not find(driver, PROMPT, tenant="a").known


def test_one_that_drains_says_so() -> None:
    driver = served()
    driver.machine._request_commands.begin_drain(0)
    found = find(driver, PROMPT)
    assert found.draining and not found.ready


def test_what_is_impossible_is_refused_and_too_much_is_not() -> None:
    driver = served()
    driver.refused(FindPrefix(rid=1, prompt=np.array([-1], np.int32)), InvalidRequest)
    driver.refused(FindPrefix(rid=2, tenant="", prompt=np.array([1], np.int32)), InvalidRequest)
    driver.refused(FindPrefix(rid=3, salt="s" * 300, prompt=np.array([1], np.int32)), InvalidRequest)
    assert find(driver, []).ready
    assert find(driver, [1] * 500).cached_tokens == 0


def test_no_turn_follows_from_it() -> None:
    driver = waiting_driver()
    before = driver.wake_us()
    find(driver, PROMPT)
    assert driver.wake_us() == before


@pytest.mark.parametrize("prompt", [[1], LONG])
def test_the_least_is_left_to_compute(prompt: list[int]) -> None:
    driver = served()
    driver.submit(prompt, 1)
    driver.run_until_idle()
    assert find(driver, prompt).cached_tokens < len(prompt)
