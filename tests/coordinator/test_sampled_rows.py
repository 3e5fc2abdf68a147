"""What a group keeps about the rows of its last result: used while the rows repeat, and checked with the invariants."""

from __future__ import annotations

from typing import Any

import pytest

from kvforge.coordinator.core.cache.groups import Group, SampledRows
from kvforge.coordinator.core.scheduling.invariants import check_pending

from .conftest import MakePool
from .driver import PROMPT, Driver, continuation

OTHER = [8, 8]


def steady(driver: Driver) -> tuple[Group, SampledRows]:
    """Run until the group repeats its decode batch, and return what it keeps about the rows."""
    (group,) = driver.machine.cache.groups.values()
    for _ in range(4):
        driver.step()
    kept = group.sampled_rows
    assert kept is not None and group.steady is not None and kept.rows is group.steady.slots
    return group, kept


@pytest.mark.parametrize("in_flight", [1, 2])
def test_rows_that_repeat_give_the_same_tokens_as_rows_that_change(make_pool: MakePool, in_flight: int) -> None:
    driver, _ = make_pool(steps_in_flight_max=in_flight)
    requests = {driver.submit(prompt, max_tokens=20): prompt for prompt in (PROMPT, OTHER)}
    group, kept = steady(driver)
    for _ in range(4):
        driver.step()
    assert group.sampled_rows is kept
    driver.run_until_idle()
    assert {request: driver.streamed[request] for request in requests} == {
        request: continuation(prompt, 20) for request, prompt in requests.items()
    }


def test_a_row_that_another_client_takes_over_is_streamed_to_that_client(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    taken = driver.submit(PROMPT, max_tokens=20)
    driver.submit(OTHER, max_tokens=20)
    group, kept = steady(driver)
    read = len(driver.streamed[taken])
    driver.attach(taken, read, client=2)
    driver.step()
    driver.turn()
    assert group.sampled_rows is kept and kept.reader < 0, "the rows repeat, with two readers"
    assert driver.read[2, taken] and min(driver.read[2, taken]) == read
    driver.run_until_idle()
    assert driver.streamed[taken] == continuation(PROMPT, 20)


@pytest.mark.parametrize(
    ("name", "value"),
    [("left", 1), ("tops", True), ("reader", 7), ("length", 1), ("offsets", 1), ("requests", 1)],
)
def test_the_invariants_notice_a_value_that_is_not_kept_up_to_date(make_pool: MakePool, name: str, value: Any) -> None:
    driver, _ = make_pool()
    for prompt in (PROMPT, OTHER):
        driver.submit(prompt, max_tokens=20)
    _, kept = steady(driver)
    driver.machine.check_invariants()
    before = getattr(kept, name)
    setattr(kept, name, value if isinstance(before, int | bool) else before + value)
    with pytest.raises(AssertionError, match="the kept"):
        driver.machine.check_invariants()


@pytest.mark.parametrize("tokens", [-1, 1])
def test_the_invariants_notice_a_row_that_awaits_a_token_of_no_step(make_pool: MakePool, tokens: int) -> None:
    driver, _ = make_pool()
    driver.submit(PROMPT, max_tokens=20)
    group, kept = steady(driver)
    driver.turn()
    assert group.sent
    sequences = driver.machine.cache.sequences
    sequences.pending[kept.rows] += tokens
    with pytest.raises(AssertionError, match="awaits"):
        check_pending(group, sequences, driver.machine.admission.rows)
