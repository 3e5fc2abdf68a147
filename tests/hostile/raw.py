"""A raw ZMTP peer that can send arbitrary bytes and never blocks on an unread send."""

from __future__ import annotations

import select
import socket as sockets
from time import monotonic

from kvforge.coordinator.transport import zmtp
from kvforge.protocol import codec
from kvforge.protocol.messages import Message

WAIT_S = 30.0
READY = zmtp.ready().replace(b"ROUTER", b"DEALER")


def frames(message: Message) -> bytes:
    """Encode a message as ZMTP frames."""
    return b"".join(zmtp.message(codec.encode(message)))


def part(body: bytes, more: bool = True) -> bytes:
    """Encode one part of a message as a ZMTP frame."""
    return b"".join(zmtp.message([body, b""] if more else [body]))[: -2 if more else None]


class RawPeer:
    """A connection of a hostile peer."""

    def __init__(self, path: str, shake: bool = True) -> None:
        """Connect; with `shake`, send a valid greeting."""
        self.socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self.socket.connect(path)  # blocks while the listen backlog is full
        self.socket.setblocking(False)
        self._left = b""
        if shake:
            self.send(zmtp.GREETING + READY)

    def send(self, data: bytes) -> int:
        """Send unsent and new bytes without blocking; return the count sent, or -1 if the connection was closed."""
        self._left += data
        sent = 0
        try:
            while self._left:
                count = self.socket.send(self._left)
                self._left, sent = self._left[count:], sent + count
        except BlockingIOError:
            return sent
        except OSError:
            self._left = b""
            return -1
        return sent

    @property
    def waits(self) -> bool:
        """Return whether unsent bytes are left."""
        return bool(self._left)

    def ended(self) -> bool:
        """Read all available bytes; return whether the connection was closed."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def wait_ended(self) -> None:
        """Wait until the connection is closed."""
        deadline = monotonic() + WAIT_S
        while not self.ended():
            assert monotonic() < deadline, f"the connection is still open after {WAIT_S} s"
            self.send(b"")
            select.select([self.socket], [], [], 0.05)

    def close(self) -> None:
        self.socket.close()
