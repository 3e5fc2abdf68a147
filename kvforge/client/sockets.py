"""The ZeroMQ sockets of a link, all of which can be closed whenever that is wanted.

The handler of a signal runs between any two steps of Python: Ctrl-C may break off what makes a socket before it has a
name anywhere, or what closes it. Who catches the exception holds that socket by its traceback, and ZeroMQ's context
waits for it for ever when it is ended.
"""

from __future__ import annotations

from typing import Any, Self
from weakref import ref

import zmq

from kvforge.protocol import network, transport

HEARD_OF = zmq.Event.DISCONNECTED | zmq.Event.CLOSED | zmq.Event.HANDSHAKE_SUCCEEDED | network.REFUSED


class _Socket(zmq.Socket[bytes]):
    """Its owner knows it before anything is open."""

    def __new__(cls, context: _Context, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        owner = context.owner()
        assert owner is not None, "who makes a socket is there"
        owner.made.append(made)
        return made


class _Context(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = _Socket
    owner: ref[Sockets]

    def __new__(cls, owner: Sockets) -> Self:
        context = super().__new__(cls)
        context.__dict__["owner"] = ref(owner)  # set as an attribute it would be taken for an option of ZeroMQ's
        return context

    def __init__(self, _: Sockets) -> None:
        super().__init__()


class Sockets:
    """Those of one connection at a time. made: all that are not known to be closed."""

    def __init__(self) -> None:
        self.made: list[zmq.Socket[bytes]] = []
        self._context: _Context | None = None

    def dealer(self, proof: network.Proof | None) -> zmq.Socket[bytes]:
        """The first of a connection. What another connection has left behind is closed."""
        self.close()
        if self._context is None:
            self._context = _Context(self)
        return transport.dealer(self._context, proof, immediate=False)

    def monitor(self, dealer: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Says what becomes of its connection."""
        return dealer.get_monitor_socket(HEARD_OF)

    def close(self) -> None:
        """Closes all of them, those too whose making or closing was broken off."""
        for socket in tuple(self.made):
            if not socket.closed:
                socket.disable_monitor()  # else it might wait for its monitor's reader, which is closed
                socket.close()
        self.made.clear()

    def end(self) -> None:
        """Closes them, and waits until what they still have to send is sent or has taken too long."""
        self.close()
        if self._context is not None:
            self._context.term()
            self._context = None
