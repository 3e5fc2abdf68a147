"""Coarse timeouts for very many requests, nearly all ending before their timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil
from time import monotonic

# The resolution. One timer per request would leave hundreds of thousands of cancelled timers in a long run.
GRAIN_S = 0.05


class Deadlines:
    """The timeouts. All times are time.monotonic's. Close it after use."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._grains: dict[int, dict[int, Callable[[], None]]] = {}
        self._handle: asyncio.TimerHandle | None = None
        self._count = 0

    def add(self, until: float, over: Callable[[], None]) -> tuple[int, int]:
        """Call `over` after `until`, unless the returned entry is removed before."""
        grain = max(ceil(until / GRAIN_S), ceil(monotonic() / GRAIN_S))
        self._count += 1
        self._grains.setdefault(grain, {})[self._count] = over
        if self._handle is None:
            self._handle = self._loop.call_later(GRAIN_S, self._look)
        return grain, self._count

    def remove(self, entry: tuple[int, int]) -> None:
        """Remove an entry; one that was called already is ignored."""
        grain, number = entry
        if (of_grain := self._grains.get(grain)) is not None:
            of_grain.pop(number, None)

    def close(self) -> None:
        """Cancel all timeouts."""
        self._grains.clear()
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        self._handle = None
        now = monotonic() / GRAIN_S
        for grain in [grain for grain in self._grains if grain <= now]:
            for over in self._grains.pop(grain).values():
                over()
        if self._grains:
            self._handle = self._loop.call_later(GRAIN_S, self._look)
