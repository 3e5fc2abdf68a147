"""The worker's connection to its coordinator: messages in, messages out, and noticing that it is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol import codec
from protocol.errors import CoordinatorUnavailable
from protocol.messages import WORKER_REPLIES, Goodbye, Message
from protocol.transport import dealer, worker_endpoint

SEND_WAIT_MS = 1000
STEP_BYTES_MAX = 16 << 20  # each row that starts may bring LOGIT_BIAS_MAX biases of 15 bytes


class Link:
    """One DEALER socket with its monitor and a wake-up descriptor for signals."""

    def __init__(self, runtime: Path, wakeup_fd: int) -> None:
        """Connects. Raises InvalidConfiguration where the path cannot be a socket's."""
        self.endpoint = worker_endpoint(runtime)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_WAIT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._decoder = codec.Decoder(WORKER_REPLIES, body_bytes_max=STEP_BYTES_MAX)
        self._wakeup_fd = wakeup_fd
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(wakeup_fd, zmq.POLLIN)
        self.connected = False
        self.connections = 0
        self._socket.connect(self.endpoint)

    def send(self, message: Message) -> bool:
        """Sends; False where there is no coordinator to take it."""
        try:
            self._socket.send_multipart(codec.encode(message))
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: int) -> Message | None:
        """The next message; None where the time is over, a signal came, or the connection changed.

        Raises ProtocolError for bytes that are no message.
        """
        if not self._socket.poll(0):
            self._poller.poll(timeout_ms)
            self._note_changes()
        try:
            frames: list[Any] = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decoder.decode(frames)

    def wait_connected(self, timeout_s: float) -> None:
        """Waits for the coordinator. Raises CoordinatorUnavailable; returns early on a signal."""
        deadline = time.monotonic() + timeout_s
        while not self.connected:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                raise CoordinatorUnavailable(
                    f"no coordinator answered at {self.endpoint} within {timeout_s:g} s: is it running there?"
                )
            if any(descriptor == self._wakeup_fd for descriptor, _ in self._poller.poll(min(left_ms, 1000))):
                return
            self._note_changes()

    def _note_changes(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.connections += self.connected

    def close(self, goodbye: bool) -> None:
        """Says goodbye where that makes sense, and closes."""
        if goodbye and self.connected:
            self.send(Goodbye())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=200)
