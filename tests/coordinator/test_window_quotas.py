"""Windows under a ceiling: a request that was accepted has room for its window blocks once nothing else runs."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import QuotaExceeded
from tests.coordinator.driver import Driver, continuation
from tests.coordinator.test_windows import PROMPT, SIZE, WindowWorker, windowed

CEILING = 18


def limited(window: int, step_tokens: int, steps: int = 1) -> tuple[Driver, WindowWorker]:
    """A driver with windows and a tenant `t` with a ceiling."""
    quotas = {"t": Quota(ceiling=CEILING)}
    return windowed(window=window, step_tokens_max=step_tokens, steps_in_flight_max=steps, quotas=quotas)


@pytest.mark.parametrize(("window", "step_tokens", "longest"), [(1, 2, 56), (8, 4, 40), (13, 2, 32), (13, 5, 24)])
def test_each_prompt_with_the_longest_accepted_answer_runs(window: int, step_tokens: int, longest: int) -> None:
    for size in range(1, longest, 3):
        driver, _ = limited(window, step_tokens)
        prompt = [7 * i % 50 + 1 for i in range(size)]
        driver.refused(driver.submit_message(prompt, longest - size + 1, tenant="t"), QuotaExceeded)
        request = driver.submit(prompt, longest - size, tenant="t")
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(prompt, longest - size)


def cancelled_in_flight(driver: Driver, worker: WindowWorker, forks: bool) -> int:
    """A sequence, cancelled while steps without a result compute its prompt, or a fork made before that."""
    sequence = driver.create(PROMPT[:32], tenant="t")
    request = driver.submit(sequence_id=sequence, max_tokens=8)
    for _ in range(4):
        driver.turn()
    assert len(worker.inbox) == 4, "four steps are in flight"
    kept = driver.fork(sequence)[0] if forks else sequence
    driver.cancel(request)
    if forks:
        driver.remove(sequence)
    return kept


@pytest.mark.parametrize("forks", [False, True])
def test_window_blocks_of_steps_in_flight_do_not_keep_a_sequence_out(forks: bool) -> None:
    driver, worker = limited(window=8, step_tokens=4, steps=4)
    sequence = cancelled_in_flight(driver, worker, forks)
    request = driver.submit(sequence_id=sequence, max_tokens=8)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(PROMPT[:32], 8)


@pytest.mark.parametrize("forks", [False, True])
def test_an_idle_sequence_holds_window_blocks_up_to_its_next_token(forks: bool) -> None:
    driver, worker = limited(window=8, step_tokens=4, steps=4)
    sequence = cancelled_in_flight(driver, worker, forks)
    s = driver.machine.cache.sequences
    slot = s.slot_of[sequence]
    assert s.window_end[slot] == s.computed[slot] // SIZE + 1


def test_an_explanation_counts_the_window_blocks_that_a_request_lacks() -> None:
    driver, _ = limited(window=8, step_tokens=4)
    driver.submit(PROMPT[:4], 20, tenant="t")
    driver.step()
    waiting = driver.submit(PROMPT[5:21], 8, tenant="t")
    driver.step()
    recorded = driver.machine.requests.live[waiting].wait
    assert recorded is not None and recorded.limit == "tenant ceiling" and recorded.short > 0
    explained = driver.explain(request_id=waiting)
    assert explained.facts["blocks_short"] == recorded.short
    driver.run_until_idle()
