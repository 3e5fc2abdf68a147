"""Progress of downloads and loading on standard error: one updated line on a terminal, else a line per step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TextIO

from kvforge.protocol.messages import Health

STEP_PERCENT = 25
READY = "ready"
LINE_S = 2.0  # between two lines of one step, off a terminal


class Progress:
    """Shows named steps with their progress from 0 to 1."""

    def __init__(
        self,
        stream: TextIO | None = None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Create a display without steps.

        Args:
            stream: The output, by default standard error.
            say: Takes each line instead of the stream.
            clock: The time in seconds.
        """
        self._stream = stream if stream is not None else sys.stderr
        self._say = say
        self._terminal = say is None and self._stream.isatty()
        self._shown: dict[str, tuple[str, int]] = {}
        self._clock = clock
        self._written_s: dict[str, float] = {}
        self._width = 0

    def step(self, who: str, phase: str, fraction: float) -> None:
        """Show that `who` is in `phase`, with `fraction` (0 to 1) completed."""
        percent = int(100 * min(max(fraction, 0.0), 1.0))
        coarse = (phase, percent if self._terminal else percent - percent % STEP_PERCENT)
        if self._shown.get(who) == coarse:
            return
        if not self._terminal:
            now_s = self._clock()
            last_s = self._written_s.get(who, -LINE_S)
            if now_s - last_s < LINE_S and phase != READY:
                return  # no line for each of several quick steps
            self._shown[who], self._written_s[who] = coarse, now_s
            self._write(f"{who}: {_words(coarse)}\n")
            return
        self._shown[who] = coarse
        line = "   ".join(f"{name}: {_words(state)}" for name, state in self._shown.items())
        self._write(f"\r{line:<{self._width}}")
        self._width = len(line)

    def health(self, health: Health) -> None:
        """Show the loading of all workers."""
        for worker in health.workers:
            if worker.state == "ready":
                self.step(worker.title, READY, 0.0)
            else:
                self.step(worker.title, worker.phase or worker.state, worker.progress)

    def close(self) -> None:
        """End the updated line."""
        if self._terminal and self._width:
            self._write("\n")
        self._width = 0
        self._shown.clear()
        self._written_s.clear()

    def _write(self, text: str) -> None:
        if self._say is not None:
            self._say(text.rstrip("\n"))
            return
        with suppress(OSError, ValueError):  # the reader has left
            self._stream.write(text)
            self._stream.flush()


def _words(state: tuple[str, int]) -> str:
    phase, percent = state
    return f"{phase} {percent} %" if percent else phase
