"""Watchdogs for the children of `kvforge up`, which report as they do to systemd: see `protocol/notify.py`."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from kvforge.protocol.steady_clock import monotonic

REPORT_BYTES_MAX = 4096
log = logging.getLogger(__name__)
READ_MAX = 64  # reports read in one call


class ChildWatchdog:
    """Receives the reports of one child, and knows when the child hangs.

    The watch begins with the child's READY=1. From then on a report is due every `period_s`, without the time in which
    this process itself stood still. EXTEND_TIMEOUT_USEC postpones the next one.

    Args:
        path: A name for the socket. Without room for it, on the disk or in an address, there is no watch.
        period_s: Seconds without a report after which the child hangs.
    """

    def __init__(self, path: Path, period_s: float) -> None:
        self._path = path
        self.period_s = period_s
        self._socket: socket.socket | None = None
        self._due: float | None = None

    def begin(self) -> dict[str, str]:
        """Create the socket for a new process, and forget the reports of the one before.

        Returns:
            Environment variables for the process; NOTIFY_SOCKET is empty if the socket cannot be created.
        """
        self.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(os.fspath(self._path))
        except OSError as error:
            log.warning("no watchdog at %s: %s", self._path, error.strerror or error)
            self.close()
            return {"NOTIFY_SOCKET": "", "WATCHDOG_USEC": ""}
        return {"NOTIFY_SOCKET": os.fspath(self._path), "WATCHDOG_USEC": str(int(self.period_s * 1e6))}

    def hangs(self) -> bool:
        """Read the reports and return whether one is overdue. Call it at least every `steady_clock.WAIT_S_MAX`."""
        now = monotonic()
        for _ in range(READ_MAX):
            if self._socket is None:
                return False
            try:
                lines = self._socket.recv(REPORT_BYTES_MAX).decode(errors="replace").split("\n")
            except OSError:
                break
            self._apply(lines, now)
        return self._due is not None and now > self._due

    def close(self) -> None:
        """End the watch and remove the socket. Idempotent."""
        self._due = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _apply(self, lines: list[str], now: float) -> None:
        begun = self._due is not None or "READY=1" in lines
        if begun and ("READY=1" in lines or "WATCHDOG=1" in lines):
            self._due = max(self._due or 0.0, now + self.period_s)
        for line in lines:
            name, _, value = line.partition("=")
            if begun and name == "EXTEND_TIMEOUT_USEC" and value.isdecimal():
                self._due = max(self._due or 0.0, now + int(value) / 1e6)
