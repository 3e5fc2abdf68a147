"""The progress of a run: a live line on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
from typing import TextIO

from .number_format import number

LIVE_S, LINES_S = 0.25, 10.0
CLEAR = "\r\x1b[K"


class Progress:
    """The progress display.

    Args:
        total: The number of planned requests; None if unknown.
        out: The output, standard error by default.
        quiet: Whether to show nothing.
    """

    def __init__(self, total: int | None, *, out: TextIO | None = None, quiet: bool = False) -> None:
        self._out = sys.stderr if out is None else out
        self._total, self._quiet, self._live = total, quiet, self._out.isatty()
        self._next_s, self._before_s, self._tokens = 0.0, 0.0, 0

    def show(self, at_s: float, *, sent: int, running: int, finished: int, bad: int, tokens: int) -> None:
        """Show the progress; most calls are skipped.

        Args:
            at_s: Seconds since the start of the run.
            sent: Requests sent so far.
            running: Requests in flight.
            finished: Requests finished so far.
            bad: Requests that were refused, failed or timed out so far.
            tokens: Tokens received so far.
        """
        if self._quiet or at_s < self._next_s:
            return
        self._next_s = at_s + (LIVE_S if self._live else LINES_S)
        passed_s = at_s - self._before_s
        rate = (tokens - self._tokens) / passed_s if passed_s > 0 else 0.0
        self._before_s, self._tokens = at_s, tokens
        planned = f"/{self._total}" if self._total is not None else ""
        wrong = f", unsuccessful {bad}" if bad else ""
        words = f"{at_s:6.1f} s  sent {sent}{planned}, running {running}, finished {finished}{wrong}, "
        self._write(f"{words}{number(rate)} tokens/s")

    def done(self) -> None:
        """Clear the live line."""
        if self._live and not self._quiet:
            self._out.write(CLEAR)
            self._out.flush()

    def _write(self, line: str) -> None:
        self._out.write(f"{CLEAR}{line}" if self._live else f"{line}\n")
        self._out.flush()
