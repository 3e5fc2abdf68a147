"""The ZeroMQ sockets of a link, all of which can be closed whenever that is wanted.

ZeroMQ's context waits for each of them for ever when it is ended, and two things take one out of our hands. The handler
of a signal runs between any two steps of Python: Ctrl-C may break off what makes a socket before it has a name, or what
closes it, and who catches the exception holds that socket by its traceback. And who drops a client without closing it
leaves it to Python's collector, for which ZeroMQ's own list of sockets is empty already.
"""

from __future__ import annotations

import os
from typing import Any

import zmq

from kvforge.protocol import network, transport

HEARD_OF = (
    zmq.Event.CONNECTED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED | zmq.Event.HANDSHAKE_SUCCEEDED | network.REFUSED
)


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """made: its sockets that are not known to be closed, each from before anything of it is open."""

    made: list[zmq.Socket[bytes]]
    maker: int

    def __init__(self) -> None:
        self.made, self.maker = [], os.getpid()
        super().__init__()

    def socket(self, socket_type: int, *_: Any, **__: Any) -> zmq.Socket[bytes]:
        """Of that type, noted."""
        return super().socket(socket_type, self._make)

    def _make(self, context: zmq.Context[Any], socket_type: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = zmq.Socket.__new__(zmq.Socket)
        self.made.append(made)
        zmq.Socket.__init__(made, context, socket_type)
        return made

    def close_sockets(self) -> None:
        for socket in tuple(self.made):
            if not socket.closed:
                socket.disable_monitor()  # else it might wait for its monitor's reader, which is closed
                socket.close()
        self.made.clear()

    def __del__(self) -> None:
        if self.__dict__.get("maker") == os.getpid():  # a fork's sockets are its parent's
            self.close_sockets()
        super().__del__()


class Sockets:
    """Those of one connection at a time."""

    def __init__(self) -> None:
        self._context: _Context | None = None

    def dealer(self, proof: network.Proof | None) -> zmq.Socket[bytes]:
        """The first of a connection. What another connection has left behind is closed."""
        self.close()
        if self._context is None:
            self._context = _Context()
        return transport.dealer(self._context, proof, immediate=False)

    def monitor(self, dealer: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Says what becomes of its connection."""
        return dealer.get_monitor_socket(HEARD_OF)

    def close(self) -> None:
        """Closes all of them, those too whose making or closing was broken off."""
        if self._context is not None:
            self._context.close_sockets()

    def end(self) -> None:
        """Closes them, and waits until what they still have to send is sent or has taken too long."""
        self.close()
        if self._context is not None:
            self._context.term()
            self._context = None
