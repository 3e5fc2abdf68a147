"""Tells systemd how we are (sd_notify): one datagram, nothing where nobody asked."""

from __future__ import annotations

import os
import socket

SEND_S_MAX = 1.0
FEEDS = 4  # in the time after which systemd ends a process that fed nothing: three may be lost


def notify(*lines: str, wait_s: float = SEND_S_MAX) -> bool:
    """Sends lines such as "READY=1" or "STATUS=loading" to $NOTIFY_SOCKET. Returns whether anyone was told.

    wait_s: so long while systemd takes nothing.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(wait_s)
            channel.sendto("\n".join(lines).encode(), address)
    except OSError:
        return False
    return True


def working(status: str, for_s: float) -> bool:
    """Something long goes on before (or between) turns of the work loop: systemd waits so long for the next word.

    It holds for the time to start and for the watchdog. Whoever works says it again and again; whoever hangs does not.
    """
    return notify(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(for_s * 1e6)}")


class Watchdog:
    """Fed by the work loop itself: a process that hangs does not come by, and systemd ends it and starts the next."""

    def __init__(self) -> None:
        """Reads $WATCHDOG_USEC, which is meant for the process $WATCHDOG_PID. Without it `feed` does nothing."""
        microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
        asked = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        self.every_us = int(microseconds) // FEEDS if asked else 0
        self._due_us = 0

    def feed(self, now_us: int) -> None:
        """Called in every turn of the loop; now_us: monotonic, microseconds. Never waits."""
        if self.every_us and now_us >= self._due_us:
            self._due_us = now_us + self.every_us
            notify("WATCHDOG=1", wait_s=0)
