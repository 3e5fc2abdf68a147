"""A peer that speaks ZMTP by hand: whatever bytes a hostile one may send. It never waits to be read."""

from __future__ import annotations

import select
import socket as sockets
from time import monotonic

from coordinator import zmtp
from kvforge.protocol import codec
from kvforge.protocol.messages import Message

WAIT_S = 30.0
READY = zmtp.ready().replace(b"ROUTER", b"DEALER")


def frames(message: Message) -> bytes:
    """The bytes of a message."""
    return b"".join(zmtp.message(codec.encode(message)))


def part(body: bytes, more: bool = True) -> bytes:
    """The bytes of one part."""
    return b"".join(zmtp.message([body, b""] if more else [body]))[: -2 if more else None]


class RawPeer:
    """One connection of a hostile peer."""

    def __init__(self, path: str, shake: bool = True) -> None:
        """Connects; shake: greets as it should."""
        self.socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self.socket.connect(path)  # waits where others are waiting to be accepted
        self.socket.setblocking(False)
        self._left = b""
        if shake:
            self.send(zmtp.GREETING + READY)

    def send(self, data: bytes) -> int:
        """Sends what is taken now, behind what was left over. Returns how much; -1: the connection was ended."""
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
        """Whether something was not taken yet."""
        return bool(self._left)

    def ended(self) -> bool:
        """Reads all that is there. Returns whether the connection was ended."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def wait_ended(self) -> None:
        """Waits until the connection was ended."""
        deadline = monotonic() + WAIT_S
        while not self.ended():
            assert monotonic() < deadline, f"the connection was not ended within {WAIT_S} s"
            self.send(b"")
            select.select([self.socket], [], [], 0.05)

    def close(self) -> None:
        self.socket.close()
