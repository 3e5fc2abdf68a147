"""Messages of `kvforge up` on standard error: its own and its children's, as text or as JSON lines."""

from __future__ import annotations

import sys
from contextlib import suppress

from kvforge.protocol.logs import json_line

UP = "up"


class ConsoleReporter:
    """Writes lines, and ignores errors of a reader that has left. log_format: as in `protocol.logs`."""

    def __init__(self, log_format: str = "text") -> None:
        self._json = log_format == "json"

    def print_line(self, line: str) -> None:
        """Write a line of the supervisor itself."""
        self._write(json_line(UP, "info", line) if self._json else line)

    def child(self, name: str, line: str) -> None:
        """Write a line of a child. Some lines are no log entries, such as a traceback of Python."""
        if not self._json:
            self._write(f"[{name}] {line}")
        elif line.startswith('{"time":'):
            self._write(line)
        else:
            self._write(json_line(name, "error", line))

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
