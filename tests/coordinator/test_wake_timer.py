"""The timer that ends waits to the microsecond."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from kvforge.coordinator.host.wake_timer import WakeTimer

LONG_MS = 60_000


@pytest.fixture
def timer() -> Iterator[WakeTimer]:
    made = WakeTimer()
    assert made.descriptor >= 0
    yield made
    made.close()
    made.close()


def test_it_ends_a_wait_once(timer: WakeTimer) -> None:
    poll = select.poll()
    poll.register(timer.descriptor, select.POLLIN)
    assert not poll.poll(0)
    for after_us in (1500, 1, 0, -5):
        timer.arm(after_us)
        assert poll.poll(LONG_MS)
        timer.ended()
        assert not poll.poll(0)


def test_armed_anew_it_forgets_an_end_that_was_not_read(timer: WakeTimer) -> None:
    poll = select.poll()
    poll.register(timer.descriptor, select.POLLIN)
    timer.arm(1)
    assert poll.poll(LONG_MS)
    timer.arm(1_000_000 * LONG_MS)
    assert not poll.poll(0)
    timer.ended()


def test_without_such_timers_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    made = WakeTimer()
    made.arm(1)
    assert made.descriptor == -1
    made.close()
