"""An event loop in simulated time: it jumps to the next due timer and never waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

RESOLUTION_S = 1e-6


class _Jumps(selectors.SelectSelector):
    """A selector that reports no ready files and records the requested timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "deadlock: all tasks wait and no timer is due"
        self.now_s += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in simulated seconds from 0; raises AssertionError on a deadlock."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        """Return the simulated seconds."""
        return self._jumps.now_s


def simulated(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end; tasks that it leaves running are an error."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(work)
