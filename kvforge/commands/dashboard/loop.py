"""The loop of the full screen: reads the tables, draws, handles keys, and follows a coordinator that restarts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvforge.client.aio import AsyncClient
from kvforge.client.tables import BlockColumns, Tables
from kvforge.protocol.errors import CoordinatorUnavailable, DeadlineExceeded

from .asking import Asking, Told
from .terminal import Terminal
from .view import Seen, View, listed

Rates = Callable[[Mapping[str, int] | None, Mapping[str, int]], Mapping[str, float | None]]


class Loop:
    """Runs until a key ends it.

    Args:
        folder: The runtime folder.
        every_s: The time between refreshes, in seconds.
        rates: Computes rates, as for the printed lines.
        clock: Formats the uptime, as for the printed lines.
    """

    def __init__(self, folder: Path, every_s: float, rates: Rates, clock: Callable[[int], str]) -> None:
        self._folder, self._every_s = folder, every_s
        self._rates, self._clock = rates, clock
        self._tables = Tables(folder)  # raises before the full screen starts if there is no coordinator
        self._before: dict[str, int] | None = None
        self._selected = 0
        self._paused = self._help = False

    def run(self, connection: Mapping[str, Any]) -> None:
        """Run the full screen. The terminal is restored in any case.

        Args:
            connection: The arguments of the client.

        Raises:
            KvforgeError: An error of the client.
            OSError: An error of the terminal.
        """
        asyncio.run(self._run(connection))

    async def _run(self, connection: Mapping[str, Any]) -> None:
        async with AsyncClient(**connection) as kv:
            asking = Asking(kv)
            with Terminal() as terminal:
                rounds = asyncio.ensure_future(asking.run())
                try:
                    await self._watch(asking, terminal, rounds)
                finally:
                    rounds.cancel()

    async def _watch(self, asking: Asking, terminal: Terminal, rounds: asyncio.Future[None]) -> None:
        view = View(plain="utf" not in (sys.stdout.encoding or "").lower())
        seen = self._look(asking.told)
        due = time.monotonic() + self._every_s
        while True:
            terminal.show(view.lines(seen, *terminal.size()))
            keys = await terminal.keys(min(1.0, max(0.0, due - time.monotonic())))
            if self._press(keys, seen.told):
                return
            if rounds.done():
                rounds.result()  # raises the error that ended the rounds
            asking.selected, asking.paused = self._selected, self._paused
            if time.monotonic() >= due:
                due = time.monotonic() + self._every_s
                seen = seen if self._paused else self._look(asking.told)
            seen = replace(seen, selected=self._selected, paused=self._paused, help=self._help)

    def _press(self, keys: list[str], told: Told) -> bool:
        """Handle keys; return whether one of these ends the loop."""
        for key in keys:
            if key in ("q", "Q"):
                return True
            if key in ("p", " "):
                self._paused = not self._paused
            elif key in ("h", "?"):
                self._help = not self._help
            elif key in ("up", "down"):
                self._select(-1 if key == "up" else 1, told)
        return False

    def _select(self, step: int, told: Told) -> None:
        ids = [row.request_id for row in listed(told)]
        if self._selected not in ids:
            self._selected = ids[0] if ids else 0
        else:
            self._selected = ids[max(0, min(len(ids) - 1, ids.index(self._selected) + step))]

    def _look(self, told: Told) -> Seen:
        """Return the current state of the tables, or the last state and a notice if the coordinator is away."""
        problem = ""
        if self._tables.ended():
            problem = f"the coordinator is gone (process {self._tables.pid}); waiting for it"
            with suppress(CoordinatorUnavailable):
                found = Tables(self._folder)
                if found.alive:
                    self._tables, self._before, problem = found, None, ""
        before = self._before
        with suppress(DeadlineExceeded):  # the coordinator was killed during a write
            self._before = self._tables.gauges()
        now = self._before or dict.fromkeys(("requests_running", "requests_pending", "sequences", "uptime_us"), 0)
        ends = [pool.base + pool.blocks for pool in told.stats.pools] if told.stats is not None else []
        blocks: BlockColumns = self._tables.blocks(max(ends, default=0))
        rates = self._rates(before, now)
        return Seen(now, rates, blocks, told, self._clock(now["uptime_us"]), problem=problem)
