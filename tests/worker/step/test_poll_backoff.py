"""When the loop sleeps while a step runs, and when it looks without sleeping."""

from __future__ import annotations

import pytest

from kvforge.worker.step import poll_backoff
from kvforge.worker.step.poll_backoff import SLEEP_MS, PollBackoff

MS = 1_000_000


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 5 * MS
        monkeypatch.setattr(poll_backoff.time, "monotonic_ns", lambda: self.now_ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def settled(clock: Clock, step_ms: float) -> PollBackoff:
    """Return the state after many steps of that length with two in flight, just after the start of one."""
    found = PollBackoff()
    found.begin(1)
    for _ in range(50):
        found.begin(2)
        clock.now_ns += int(step_ms * MS)
        found.end(1)
    return found


def test_long_steps_are_slept_through_until_shortly_before_their_end(clock: Clock) -> None:
    found = settled(clock, 10.0)
    waits = []
    for _ in range(12):
        waits.append(found.wait_ms())
        clock.now_ns += MS
    assert waits == [SLEEP_MS] * 8 + [0] * 4


def test_short_steps_are_not_slept_through(clock: Clock) -> None:
    found = settled(clock, 1.0)
    assert found.wait_ms() == 0


def test_a_step_that_does_not_end_is_slept_through_again(clock: Clock) -> None:
    found = settled(clock, 5.0)
    clock.now_ns += 24 * MS
    assert found.wait_ms() == 0
    clock.now_ns += 2 * MS
    assert found.wait_ms() == SLEEP_MS


def test_a_decode_after_a_long_prompt_counts_at_once(clock: Clock) -> None:
    found = settled(clock, 300.0)
    clock.now_ns += 4 * MS
    found.end(1)
    clock.now_ns += 3 * MS
    assert found.wait_ms() == 0
