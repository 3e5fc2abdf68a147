"""A stand-in for systemd at the other end of $NOTIFY_SOCKET."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import pytest


class Ear:
    """Receives this process's messages to systemd."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.delenv("WATCHDOG_PID", raising=False)

    def watch(self, microseconds: int) -> None:
        """Set the watchdog as with WatchdogSec=."""
        self._monkeypatch.setenv("WATCHDOG_USEC", str(microseconds))

    def heard(self) -> list[str]:
        """Return all messages since the last call."""
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(65536).decode())
        return found

    def close(self) -> None:
        self._socket.close()
