"""A process clock that a test sets forward, as it looks to a process that was stopped and goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvforge.protocol import steady_clock

HOUR_S = 3600.0


class Standstill:
    """Replaces the reading of the process's steady clock until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._offset_ns = 0
        monkeypatch.setattr(steady_clock._PROCESS, "_read_ns", self._now_ns)
        monkeypatch.setattr(steady_clock._PROCESS, "_state", (self._now_ns(), 0))

    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns

    def stand_still(self, for_s: float = HOUR_S) -> None:
        """The process was stopped for so long, right now."""
        self._offset_ns += int(for_s * 1e9)


def set_forward(monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop, by_s: float) -> None:
    """The clock of a loop was set forward, as it looks to a process that goes on."""
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + by_s)
