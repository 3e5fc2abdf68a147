"""A timeout that does not count the suspension of its own process."""

from __future__ import annotations

import asyncio

import pytest

from kvforge.protocol.steady_clock import WAIT_S_MAX
from kvforge.protocol.steady_timeout import steady_timeout
from tests.standstill import HOUR_S, Standstill, set_forward

DEADLINE_S = 60.0


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_what_does_not_end_in_time_is_cancelled(seconds: float) -> None:
    async def check() -> None:
        async with steady_timeout(seconds):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(check())


def test_an_answer_that_comes_after_a_standstill_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Standstill(monkeypatch)

    async def check() -> int:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        async with steady_timeout(DEADLINE_S):
            clock.stand_still()
            set_forward(monkeypatch, loop, HOUR_S)
            loop.call_later(0.01, answer.set_result, 7)
            return int(await answer)

    assert asyncio.run(check()) == 7


def test_time_after_a_standstill_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Standstill(monkeypatch)

    async def check() -> None:
        async with steady_timeout(WAIT_S_MAX / 10):
            clock.stand_still()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(check())


def test_what_ends_in_time_leaves_no_timer() -> None:
    async def check() -> list[asyncio.TimerHandle]:
        loop = asyncio.get_running_loop()
        async with steady_timeout(DEADLINE_S):
            assert len(loop._scheduled) == 1  # type: ignore[attr-defined]
        return [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    assert asyncio.run(check()) == []
