"""Tells systemd how we are (sd_notify): one datagram, nothing where nobody asked."""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> bool:
    """Sends lines such as "READY=1" or "STATUS=loading" to $NOTIFY_SOCKET. Returns whether anyone was told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(1.0)
            channel.sendto("\n".join(lines).encode(), address)
    except OSError:
        return False
    return True
