"""A socket for stand-ins of a coordinator: ZeroMQ's own, while the real coordinator implements ZMTP itself."""

from __future__ import annotations

import zmq

from kvforge.protocol import transport


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a ROUTER. Sends to a lost peer or a full queue raise instead of dropping."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, transport.SEND_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, transport.HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, transport.HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, transport.HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket
