"""SpecialContainer data is bounded, and dropped once no client needs it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import CapacityExceeded, NotFound, RequestNotFound
from kvforge.protocol.messages import SamplingParams
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation

LONG: dict[str, Any] = {"blocks_per_sequence_max": 4096, "blocks_max": 8192, "sequences_max": 4}
PROMPT = 16_000


def kept_bytes(driver: Driver) -> int:
    """Size of the finished requests and their keys in the core."""
    requests = driver.machine.requests
    return len(pickle.dumps((requests.finished, requests.keys), protocol=5))


# ----------------------------------------------------------------------------------------------------- ended requests


@pytest.mark.parametrize("fields", [{}, {"key": "k"}, {"count": 3}], ids=["plain", "keyed", "samples"])
def test_an_ended_request_keeps_what_may_be_asked_for_and_not_its_prompt(fields: dict[str, Any]) -> None:
    driver = Driver(**LONG)
    driver.add_worker(6000)
    bias = tuple((token, 1.0) for token in range(300))
    sampling = SamplingParams(temperature=0.0, seed=1, logit_bias=bias)
    request = driver.submit(range(900), 4, sampling=sampling, **fields)
    driver.run_until_idle()
    waiting = driver.submit([1] * PROMPT, 4)
    driver.cancel(waiting)
    driver.turn()
    assert kept_bytes(driver) < 4_000
    assert driver.request(request).prompt_tokens == 900
    assert driver.ended[request].prompt_tokens == 900
    assert driver.request(waiting).prompt_tokens == PROMPT
    driver.attach(request, 2, client=5)
    driver.turn()
    assert driver.tokens_read(5, request) == dict(enumerate(continuation(range(900), 4)[2:], 2))


def test_the_answers_that_are_kept_are_bounded_in_bytes(make_pool: MakePool) -> None:
    driver, _ = make_pool(finished_bytes_max=1000)  # 8 bytes per token
    made = []
    for first in range(12):
        made.append(driver.submit([first], 30))
        driver.run_until_idle()
    known = driver.machine.requests.finished
    assert list(known) == made[-4:]
    assert sum(request.kept_bytes for request in known.values()) == driver.machine.requests.kept_bytes == 4 * 240
    assert driver.answer_of(made[-1]) == continuation([11], 30)
    driver.refused(driver.attach_message(made[0]), RequestNotFound)


def test_an_answer_larger_than_the_bound_is_kept_until_the_next_one_ends(make_pool: MakePool) -> None:
    driver, _ = make_pool(finished_bytes_max=100)
    first = driver.submit([1], 30, sampling=SamplingParams(temperature=0.0, seed=1, logprobs=3))
    driver.run_until_idle()
    assert driver.answer_of(first) == continuation([1], 30)
    assert driver.machine.requests.kept_bytes > 30 * (8 + 3 * 8)
    second = driver.submit([2], 30)
    driver.run_until_idle()
    assert list(driver.machine.requests.finished) == [second]


# ------------------------------------------------------------------------------------------------------------ tenants


def test_a_tenant_that_nothing_is_left_of_makes_way_for_a_new_name(make_pool: MakePool) -> None:
    driver, _ = make_pool(32, tenants_max=4, quotas={"fixed": Quota(floor=2)})
    for i in range(20):
        request = driver.submit([i, 1, 2, 3, 4], 2, tenant=f"t{i}")
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation([i, 1, 2, 3, 4], 2)
    tenants = {tenant.tenant: tenant for tenant in driver.stats().tenants}
    assert set(tenants) == {"fixed", "t17", "t18", "t19"}
    assert tenants["t19"].blocks == 1, "its own cached block, and none of the number's previous tenant"
    assert tenants["t19"].prefix_queried_tokens_total == 5
    assert driver.request(1).tenant == "t0", "a finished request keeps its tenant's name"
    with pytest.raises(NotFound):
        driver.explain(tenant="t0")


@pytest.mark.parametrize("holds", ["request", "sequence", "pin"])
def test_a_tenant_that_has_something_keeps_its_name(make_pool: MakePool, holds: str) -> None:
    driver, _ = make_pool(tenants_max=2)
    driver.submit([9, 9], 1, tenant="b")
    driver.run_until_idle()
    made = driver.create([1, 2, 3], tenant="a")
    if holds == "request":
        driver.remove(made)
        made = driver.submit([1, 2, 3], 40, tenant="a")
        driver.step()
    elif holds == "pin":
        block = driver.blocks_of(made)[0]
        driver.ref(block, "h", tenant="a")
        driver.remove(made)
    held = driver.create([5], tenant="c")  # takes the place of b
    error = driver.refused(driver.create_message([6], tenant="d"), CapacityExceeded)
    assert error.resource == "tenants"
    assert driver.refused(driver.submit_message([6], tenant="d"), CapacityExceeded).resource == "tenants"
    if holds == "request":
        driver.cancel(made)
        driver.run_until_idle()
    elif holds == "pin":
        driver.unref(block, "h")
    else:
        driver.remove(made)
    assert driver.info(driver.create([6], tenant="d")).tenant == "d"
    assert driver.info(held).tenant == "c"


def test_hits_that_went_with_the_tenant_that_made_way_are_not_used(make_pool: MakePool) -> None:
    driver, _ = make_pool(tenants_max=1)
    driver.submit([*range(8), 9], 1, tenant="a", salt="shared")
    driver.run_until_idle()
    assert driver.stats().pools[0].cached == 2
    sequence = driver.create([*range(8), 9], tenant="b", salt="shared")
    assert driver.info(sequence).computed_tokens == 0
    request = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*range(8), 9], 3)
