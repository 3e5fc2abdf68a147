"""A process clock that a test sets forward, as after a suspension of the process."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvforge.protocol import steady_clock

HOUR_S = 3600.0


class Standstill:
    """Replaces the process's steady clock until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._offset_ns = 0
        monkeypatch.setattr(steady_clock._PROCESS, "_read_ns", self._now_ns)
        monkeypatch.setattr(steady_clock._PROCESS, "_state", (self._now_ns(), 0))

    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns

    def stand_still(self, for_s: float = HOUR_S) -> None:
        """Simulate a suspension of this length, right now."""
        self._offset_ns += int(for_s * 1e9)


def set_forward(monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop, by_s: float) -> None:
    """Set a loop's clock forward, as after a suspension of the process."""
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + by_s)
