"""Where the time of a worker's start goes: its phases in order, each with its seconds, for one line of the log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT_FIELDS_BEFORE_START = 19  # between the closing bracket of the name and the start time in /proc/self/stat
WORTH_NAMING_S = 0.05


class StartupTimeline:
    """Records when each phase of a start begins. A phase lasts until the next one; equal names add up."""

    def __init__(self, began: float | None = None) -> None:
        """Begin with the phase "process start".

        Args:
            began: Start of the process (`time.monotonic`), by default what the kernel recorded.
        """
        self._began = process_began() if began is None else began
        self._entered, self._phase = self._began, "process start"
        self._seconds: dict[str, float] = {}
        self._over = False
        self._at_end: list[Callable[[], None]] = []

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`. After `finish` nothing is recorded."""
        if self._over or phase == self._phase:
            return
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._entered
        self._entered, self._phase = now, phase

    def at_end(self, end: Callable[[], None]) -> None:
        """Call `end` in `finish`: it ends work that only a start needs."""
        self._at_end.append(end)

    def finish(self) -> str:
        """End the last phase.

        Returns:
            The line for the log; "" if the start was over before.
        """
        if self._over:
            return ""
        for end in self._at_end:
            end()
        self.enter("")
        self._over = True
        named = {phase: took for phase, took in self._seconds.items() if took >= WORTH_NAMING_S}
        parts = ", ".join(f"{phase} {took:.2f}" for phase, took in named.items())
        return f"started in {self._entered - self._began:.2f} s: {parts}"


def process_began() -> float:
    """Return when this process started, on the clock of `time.monotonic`; now if the system does not report it."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks = int(fields[STAT_FIELDS_BEFORE_START])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - max(age, 0.0)
