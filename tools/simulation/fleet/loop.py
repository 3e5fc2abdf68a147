"""An event loop whose time is the simulation's: it jumps to whatever is due next, and nothing else is waited for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

RESOLUTION_S = 1e-6


class _Jumps(selectors.SelectSelector):
    """Says at once that no file is ready, and how long would have been waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for somebody else: nothing will ever happen again"
        self.now_s += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in simulated seconds, from 0. Raises AssertionError where all wait and nothing is due."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        """Simulated seconds."""
        return self._jumps.now_s


def simulated(work: Coroutine[Any, Any, None]) -> None:
    """Runs it to its end. Whatever it leaves running is an error."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(work)
