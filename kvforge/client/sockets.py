"""The ZeroMQ sockets of a link, which can all be closed at any time.

When ZeroMQ's context is terminated, it waits for each open socket without a limit. Two cases leave a socket that no
variable names:

- A signal handler runs between any two steps of Python. Ctrl-C may interrupt the creation of a socket before it is
  assigned, or its closing; the traceback of the exception then keeps it alive.
- A client that is dropped without being closed is left to Python's garbage collector, which has already emptied
  ZeroMQ's own list of sockets.
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
    """A ZeroMQ context that records its sockets.

    Attributes:
        made: The sockets not known to be closed, each recorded before it is opened.
        maker: The process that created them.
    """

    made: list[zmq.Socket[bytes]]
    maker: int

    def __init__(self) -> None:
        self.made, self.maker = [], os.getpid()
        super().__init__()

    def socket(self, socket_type: int, *_: Any, **__: Any) -> zmq.Socket[bytes]:
        """Create and record a socket of a type."""
        return super().socket(socket_type, self._make)

    def _make(self, context: zmq.Context[Any], socket_type: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = zmq.Socket.__new__(zmq.Socket)
        self.made.append(made)
        zmq.Socket.__init__(made, context, socket_type)
        return made

    def close_sockets(self) -> None:
        for socket in tuple(self.made):
            if not socket.closed:
                socket.disable_monitor()  # closing could otherwise wait for the monitor's closed reader
                socket.close()
        self.made.clear()

    def __del__(self) -> None:
        if self.__dict__.get("maker") == os.getpid():  # after a fork, the sockets belong to the parent
            self.close_sockets()
        super().__del__()


class Sockets:
    """The sockets of one connection at a time."""

    def __init__(self) -> None:
        self._context: _Context | None = None

    def dealer(self, proof: network.CurveCredentials | None) -> zmq.Socket[bytes]:
        """Create the DEALER of a connection. Sockets of an earlier connection are closed."""
        self.close()
        if self._context is None:
            self._context = _Context()
        return transport.dealer(self._context, proof, immediate=False)

    def monitor(self, dealer: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Return the socket that reports the events of the DEALER's connection."""
        return dealer.get_monitor_socket(HEARD_OF)

    def close(self) -> None:
        """Close all sockets, including those with an interrupted creation or closing."""
        if self._context is not None:
            self._context.close_sockets()

    def end(self) -> None:
        """Close all sockets, and wait until their unsent messages are sent or their linger has passed."""
        self.close()
        if self._context is not None:
            self._context.term()
            self._context = None
