"""What `kvforge up` says on standard error: its own words and its children's, as text or as JSON lines."""

from __future__ import annotations

import sys
from contextlib import suppress

from kvforge.protocol.logs import json_line

UP = "up"


class Voice:
    """Says lines. Nobody there to read them is no reason to fail. log_format: as in `protocol.logs`."""

    def __init__(self, log_format: str = "text") -> None:
        self._json = log_format == "json"

    def say(self, line: str) -> None:
        """A line of our own."""
        self._write(json_line(UP, "info", line) if self._json else line)

    def child(self, name: str, line: str) -> None:
        """A line that a child wrote. Not all of them are entries of its log: Python's own last words are none."""
        if not self._json:
            self._write(f"[{name}] {line}")
        elif line.startswith('{"time":'):
            self._write(line)
        else:
            self._write(json_line(name, "error", line))

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
