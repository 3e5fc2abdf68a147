"""Windows under a ceiling: a request that was accepted has room for its window blocks once nothing else runs."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import QuotaExceeded
from tests.coordinator.driver import Driver, continuation
from tests.coordinator.test_windows import PROMPT, WindowWorker, windowed

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
