"""How a run goes, while it goes: one line that is written anew at a terminal, a line from time to time elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from .words import number

LIVE_S, LINES_S = 0.25, 10.0
CLEAR = "\r\x1b[K"


class Progress:
    """For whoever drives: `show` as often as he likes, with what he has counted; `done` at the end.

    out: standard error; quiet: says nothing. total: how many requests are planned, None: not known.
    """

    def __init__(self, total: int | None, *, out: TextIO | None = None, quiet: bool = False) -> None:
        self._out = sys.stderr if out is None else out
        self._total, self._quiet, self._live = total, quiet, self._out.isatty()
        self._next_s, self._before_s, self._tokens = 0.0, 0.0, 0

    def show(self, at_s: float, *, sent: int, running: int, finished: int, bad: int, tokens: int) -> None:
        """at_s: since the start of the run; the others are totals but for `running`."""
        if self._quiet or at_s < self._next_s:
            return
        self._next_s = at_s + (LIVE_S if self._live else LINES_S)
        passed_s = at_s - self._before_s
        rate = (tokens - self._tokens) / passed_s if passed_s > 0 else 0.0
        self._before_s, self._tokens = at_s, tokens
        planned = f"/{self._total}" if self._total is not None else ""
        wrong = f", {bad} not" if bad else ""
        words = f"{at_s:6.1f} s  sent {sent}{planned}, running {running}, finished {finished}{wrong}, "
        self._write(f"{words}{number(rate)} tokens/s")

    def done(self) -> None:
        """Takes the live line away."""
        if self._live and not self._quiet:
            self._out.write(CLEAR)
            self._out.flush()

    def _write(self, line: str) -> None:
        self._out.write(f"{CLEAR}{line}" if self._live else f"{line}\n")
        self._out.flush()
