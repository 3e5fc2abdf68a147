"""Reports the state of this process to systemd (sd_notify). Without $NOTIFY_SOCKET nothing is sent."""

from __future__ import annotations

import os
import socket

SEND_S_MAX = 1.0
FEEDS = 4  # per watchdog period: three in a row may be lost


def notify(*lines: str, wait_s: float = SEND_S_MAX) -> bool:
    """Send lines such as "READY=1" or "STATUS=loading" to $NOTIFY_SOCKET.

    Args:
        lines: The lines of one datagram.
        wait_s: How long to wait while systemd takes nothing, in seconds.

    Returns:
        Whether systemd took the datagram.
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
    """Report long work before or between turns of the work loop, and extend systemd's timeouts by `for_s`.

    The extension applies to the start and to the watchdog. A busy process repeats the call; one that hangs does not.

    Args:
        status: A short text for `systemctl status`.
        for_s: Seconds until the next report.
    """
    return notify(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(for_s * 1e6)}")


class Watchdog:
    """systemd's watchdog. The work loop feeds it; when the loop hangs, systemd restarts the process."""

    def __init__(self) -> None:
        """Read $WATCHDOG_USEC, which is meant for the process $WATCHDOG_PID. Without it `feed` does nothing."""
        microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
        asked = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        self.every_us = int(microseconds) // FEEDS if asked else 0
        self._due_us = 0

    def feed(self, now_us: int) -> None:
        """Feed the watchdog when it is due. Call it in every turn of the loop; it never waits.

        Args:
            now_us: The monotonic time in microseconds.
        """
        if self.every_us and now_us >= self._due_us:
            self._due_us = now_us + self.every_us
            notify("WATCHDOG=1", wait_s=0)
