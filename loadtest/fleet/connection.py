"""The connection of a simulated worker to its coordinator.

It waits with `select`, which has a resolution of microseconds; ZeroMQ's poll and epoll have milliseconds. A step can
therefore be answered exactly when it ends, without busy waiting.
"""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvforge.protocol import codec, trust
from kvforge.protocol.errors import CoordinatorUnavailable
from kvforge.protocol.messages import WORKER_REPLIES, Goodbye, Message
from kvforge.protocol.readiness import readable
from kvforge.protocol.transport import dealer

SEND_WAIT_MS = 1000
RETRY_S = 0.05
STEP_BYTES_MAX = 16 << 20


class WorkerConnection:
    """A DEALER socket with its monitor, recreated for each connection.

    Args:
        endpoint: The coordinator's; `connect` connects to it.
        wakeup_fd: A descriptor that ends a wait when it becomes readable.

    Attributes:
        connected: Whether the connection is up.
    """

    def __init__(self, endpoint: str, wakeup_fd: int) -> None:

        self._endpoint, self._wakeup_fd = endpoint, wakeup_fd
        trust.check_endpoint(endpoint, "runtime_dir")  # before any resource is open
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder = codec.Decoder(WORKER_REPLIES, body_bytes_max=STEP_BYTES_MAX)
        self.connected = False
        self._open()

    def connect(self, timeout_s: float) -> bool:
        """Wait for the coordinator. Return False if woken by the descriptor. Raises CoordinatorUnavailable."""
        deadline = time.monotonic() + timeout_s
        while not self.connected:
            if self._over:
                self._close()
                self._open()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise CoordinatorUnavailable(f"no coordinator answered at {self._endpoint} within {timeout_s:g} s")
            woken = self._wait(min(left_s, RETRY_S))
            self._look()
            if woken:
                return False
            if self._over:
                time.sleep(RETRY_S)
        return True

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None after a timeout, a wake-up or the end of the connection.

        Raises:
            ProtocolError: The bytes are not a message.
        """
        frames = self._frames()
        if frames is None and timeout_s > 0:
            self._wait(timeout_s)
            self._look()
            frames = self._frames()
        return None if frames is None else self._decoder.decode(frames)

    def send(self, message: Message) -> bool:
        """Send a message. Return False if the connection has ended."""
        self._look()
        if not self.connected:
            return False
        try:
            self._socket.send_multipart(codec.encode(message))
        except zmq.Again:
            return False
        return True

    def close(self, *, goodbye: bool) -> None:
        """Close the connection, with a goodbye message if requested."""
        if goodbye:
            self.send(Goodbye())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=200)

    def _open(self) -> None:
        self._over = False  # whether the connection failed or ended
        trust.check_endpoint(self._endpoint, "runtime_dir")
        self._socket = dealer(self._context, immediate=False)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_WAIT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._descriptors = [self._socket.FD, self._monitor.FD, self._wakeup_fd]
        self._socket.connect(self._endpoint)

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _wait(self, timeout_s: float) -> bool:
        """Wait for an event and return whether the wake-up descriptor was ready.

        ZeroMQ's descriptors are edge-triggered, so pending events are checked first.
        """
        if self._socket.poll(0) or self._monitor.poll(0):
            return False
        return self._wakeup_fd in readable(self._descriptors, timeout_s)

    def _frames(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _look(self) -> None:
        """Update the state of the connection. Messages that arrived before its end can still be received."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._over = not self.connected
