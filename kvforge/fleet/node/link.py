"""The link between a program and its keeper: a pair of sockets that keep the bounds of documents."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

import msgspec

from kvforge.protocol.errors import DeadlineExceeded

from ..told import DOCUMENT_BYTES_MAX, Begin, Order, Told, encode, order_of


def pair() -> tuple[socket.socket, socket.socket]:
    """The keeper's end, and the program's. Neither waits."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * DOCUMENT_BYTES_MAX)
    return ends


class Link:
    """The program's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._came: list[Order] = []  # with the first one

    def fileno(self) -> int:
        """Readable where an order has come."""
        return self._socket.fileno()

    def close(self) -> None:
        """Nobody is heard any more."""
        self._socket.close()

    def begin(self, wait_s: float) -> Begin:
        """What comes first. Raises DeadlineExceeded."""
        if select.select([self._socket], [], [], wait_s)[0]:
            came = self.orders()
            if came and isinstance(came[0], Begin):
                self._came = came[1:]
                return came[0]
        raise DeadlineExceeded(f"the keeper has said nothing within {wait_s:g} s")

    def orders(self) -> list[Order]:
        """Those that have come. What is none is passed over: a keeper of another version sent it."""
        came, self._came = self._came, []
        with suppress(BlockingIOError, ConnectionError):
            while said := self._socket.recv(DOCUMENT_BYTES_MAX):
                with suppress(msgspec.ValidationError, msgspec.DecodeError):
                    came.append(order_of(said))
        return came

    def tell(self, told: Told) -> None:
        """Says it, unless nobody has listened for long: what comes later is newer."""
        with suppress(BlockingIOError, ConnectionError):
            self._socket.send(encode(told))
