"""The link between a program and its keeper: a pair of sockets that preserve message boundaries."""

from __future__ import annotations

import socket
from contextlib import suppress

import msgspec

from kvforge.fleet.messages import DOCUMENT_BYTES_MAX, BeginOrder, NodeStatus, Order, encode, order_of
from kvforge.protocol.errors import DeadlineExceeded
from kvforge.protocol.readiness import readable


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the keeper's end and the program's. Neither blocks."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * DOCUMENT_BYTES_MAX)
    return ends


class KeeperLink:
    """The program's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._came: list[Order] = []  # orders received with the first one

    def fileno(self) -> int:
        """Return the descriptor, readable when an order has arrived."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the link."""
        self._socket.close()

    def begin(self, wait_s: float) -> BeginOrder:
        """Wait for the first message.

        Raises:
            DeadlineExceeded: The keeper sent nothing in time.
        """
        if readable([self._socket], wait_s):
            came = self.orders()
            if came and isinstance(came[0], BeginOrder):
                self._came = came[1:]
                return came[0]
        raise DeadlineExceeded(f"the keeper sent nothing within {wait_s:g} s")

    def orders(self) -> list[Order]:
        """Return the orders that have arrived. Unknown ones, of a keeper of another version, are ignored."""
        came, self._came = self._came, []
        with suppress(BlockingIOError, ConnectionError):
            while data := self._socket.recv(DOCUMENT_BYTES_MAX):
                with suppress(msgspec.ValidationError, msgspec.DecodeError):
                    came.append(order_of(data))
        return came

    def send_status(self, status: NodeStatus) -> None:
        """Send a status. If the keeper has not read for long, it is dropped: a later one is newer."""
        with suppress(BlockingIOError, ConnectionError):
            self._socket.send(encode(status))
