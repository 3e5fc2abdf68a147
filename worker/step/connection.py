"""The worker's connection to its coordinator: sending, receiving, and detecting its loss.

If cores are free, a worker that was just active polls shared memory for its next step before it sleeps on its socket
(see `protocol.handover`): waking up takes longer than a small step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvforge.protocol import codec, network, trust
from kvforge.protocol.errors import CoordinatorUnavailable
from kvforge.protocol.handover import StepRingReader
from kvforge.protocol.messages import WORKER_REPLIES, Goodbye, Message
from kvforge.protocol.steady_clock import WAIT_S_MAX, monotonic
from kvforge.protocol.transport import dealer

SEND_WAIT_MS = 1000
# Pause between two connection attempts. Each is a tenth longer than the last, so a coordinator that returns after t
# seconds is noticed a fraction of t later.
RETRY_S, RETRY_GROWTH, RETRY_S_MAX = 0.05, 1.1, 2.0
LOOKS = 64  # polls of shared memory per poll of the socket, which is several times slower
STEP_BYTES_MAX = 16 << 20  # each row that starts may bring LOGIT_BIAS_MAX biases of 15 bytes


class CoordinatorConnection:
    """A DEALER socket with its monitor, replaced for each connection, and a wake-up descriptor for signals.

    Attributes:
        connected: Whether there is a connection now.
        connections: Number of connections so far.
    """

    def __init__(self, endpoint: str, wakeup_fd: int, proof: network.CurveCredentials | None = None) -> None:
        """Start to connect; `wait_connected` waits for the connection.

        Args:
            endpoint: The coordinator's endpoint.
            wakeup_fd: Descriptor that becomes readable on a signal.
            proof: Key pair to present to a coordinator behind a network.

        Raises:
            InvalidConfiguration: An untrusted user owns the endpoint's path.
        """
        self.endpoint, self._proof = endpoint, proof
        trust.check_endpoint(endpoint, "runtime_dir")  # before there is anything to close
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder = codec.Decoder(WORKER_REPLIES, body_bytes_max=STEP_BYTES_MAX)
        self._wakeup_fd, self._other_fd = wakeup_fd, -1
        self._watch: StepRingReader | None = None
        self._watch_ns = self._active_ns = 0
        self._steps = 0  # that came over the socket since `watch`
        self.connected = False
        self.connections = 0
        self._open()

    def _open(self) -> None:
        """Start a connection attempt."""
        self._over = False  # the attempt failed, or the connection ended
        self._trusted = trust.check_endpoint(self.endpoint, "runtime_dir")
        self._socket = dealer(self._context, self._proof, immediate=False)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_WAIT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | network.REFUSED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wakeup_fd, zmq.POLLIN)
        if self._other_fd >= 0:
            self._poller.register(self._other_fd, zmq.POLLIN)
        self._socket.connect(self.endpoint)

    def _close(self) -> None:
        """Close the socket. Undelivered messages are dropped: they belong to a connection that has ended."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def send(self, message: Message) -> bool:
        """Send a message on this connection; return False if the connection has ended."""
        self.look()
        if not self.connected:
            return False
        try:
            self._socket.send_multipart(codec.encode(message))
        except zmq.Again:
            return False
        return True

    def discard(self) -> None:
        """Drop received messages. They belong to an earlier connection: the coordinator waits for the hello."""
        while self._socket.poll(0):
            self._socket.recv_multipart(zmq.NOBLOCK)

    def watch(self, steps: StepRingReader | None, watch_us: int) -> None:
        """Poll shared memory for steps too, for `watch_us` after each message. With None, stop polling."""
        self._watch, self._watch_ns, self._steps = steps, watch_us * 1000, 0

    def also_wake(self, fd: int) -> None:
        """End the wait of `receive` also when another descriptor is readable; -1: none."""
        if fd == self._other_fd:
            return
        if self._other_fd >= 0:
            self._poller.unregister(self._other_fd)
        if fd >= 0:
            self._poller.register(fd, zmq.POLLIN)
        self._other_fd = fd

    def receive(self, timeout_ms: int) -> Message | None:
        """Return the next message; None after the timeout, on a signal, or if the connection changed.

        Args:
            timeout_ms: Longest wait in milliseconds.

        Raises:
            ProtocolError: The bytes received are not a valid message.
            NotAllowed: The coordinator does not know this worker's key.
        """
        frames = self._next_frames()
        if frames is None and self._watch is not None and timeout_ms > 0:
            frames = self._look_for_steps(self._watch, timeout_ms)
        if frames is None:
            self._poller.poll(timeout_ms)
            self.look()
            frames = self._next_frames()
        if frames is None:
            return None
        self._active_ns = time.monotonic_ns()
        return self._decoder.decode(frames)

    def _next_frames(self) -> Sequence[bytes] | None:
        """Return the frames available now. Drop the message of a step that was already read from shared memory."""
        if self._watch is None:
            return self._socket.recv_multipart(zmq.NOBLOCK) if self._socket.poll(0) else None
        if (frames := self._watch.read_step()) is not None:
            return frames
        while self._socket.poll(0):
            message = self._socket.recv_multipart(zmq.NOBLOCK)
            if not codec.is_step(message):
                return message
            self._steps += 1
            if self._steps > self._watch.last_step:
                self._watch.last_step = self._steps
                return message
        return None

    def _look_for_steps(self, steps: StepRingReader, timeout_ms: int) -> Sequence[bytes] | None:
        """Poll without sleeping until frames arrive or the quiet period is over."""
        until_ns = min(self._active_ns + self._watch_ns, time.monotonic_ns() + timeout_ms * 1_000_000)
        while time.monotonic_ns() < until_ns:
            for _ in range(LOOKS):
                if (frames := steps.read_step()) is not None:
                    return frames
            if self._socket.poll(0):
                return self._next_frames()
        return None

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the coordinator is connected, or a signal arrives.

        Args:
            timeout_s: Longest wait in seconds.

        Raises:
            CoordinatorUnavailable: No coordinator answered in time.
            NotAllowed: The coordinator does not know this worker's key.
        """
        now = monotonic()
        deadline, retry_s, retry_at = now + timeout_s, RETRY_S, now
        while not self.connected:
            now = monotonic()
            if now >= deadline:
                raise CoordinatorUnavailable(
                    f"no coordinator answered at {self.endpoint} within {timeout_s:g} s: is it running there?"
                )
            if self._over and now >= retry_at:
                self._close()
                self._open()
                retry_at, retry_s = now + retry_s, min(RETRY_GROWTH * retry_s, RETRY_S_MAX)
            wait_s = min(deadline - now, WAIT_S_MAX, retry_at - now if self._over else WAIT_S_MAX)
            if any(descriptor == self._wakeup_fd for descriptor, _ in self._poller.poll(max(1, int(wait_s * 1000)))):
                return
            self.look()

    def look(self) -> None:
        """Check the state of the connection. Messages from before its end can still be received.

        Raises:
            NotAllowed: The coordinator does not know this worker's key.
            InvalidConfiguration: The process at the other end is of a user who is not trusted.
        """
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                if self._trusted is not None:
                    trust.check_peer(event["value"], self._trusted, self.endpoint, "runtime_dir")
                continue
            if event["event"] == network.REFUSED and self._proof is not None:
                raise network.refusal(self.endpoint, self._proof)
            self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._over = not self.connected
            self.connections += self.connected

    def close(self, goodbye: bool) -> None:
        """Close the connection, with a goodbye message if `goodbye` and if still connected."""
        if goodbye and self.connected:
            self.send(Goodbye())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=200)
