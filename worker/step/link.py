"""The worker's connection to its coordinator: messages in, messages out, and noticing that it is gone.

Where cores are free, a worker that has just had something to do looks for its next step in shared memory for a while
before it sleeps on its socket (`protocol.handover`): waking takes longer than a small step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvforge.protocol import codec, network, trust
from kvforge.protocol.errors import CoordinatorUnavailable
from kvforge.protocol.handover import StepWatch
from kvforge.protocol.messages import WORKER_REPLIES, Goodbye, Message
from kvforge.protocol.steady_clock import WAIT_S_MAX, monotonic
from kvforge.protocol.transport import dealer

SEND_WAIT_MS = 1000
# Between two attempts at a connection; each pause is a tenth longer than the one before, so that one who is there again
# after t seconds is noticed a fraction of t later.
RETRY_S, RETRY_GROWTH, RETRY_S_MAX = 0.05, 1.1, 2.0
LOOKS = 64  # at the word in memory for each one at the socket, which takes as long as several of them
STEP_BYTES_MAX = 16 << 20  # each row that starts may bring LOGIT_BIAS_MAX biases of 15 bytes


class Link:
    """A DEALER socket with its monitor for each connection, one after the other, and a wake-up descriptor for signals.

    connected: whether there is a connection now. connections: how many there were.
    """

    def __init__(self, endpoint: str, wakeup_fd: int, proof: network.Proof | None = None) -> None:
        """Begins to connect. Raises InvalidConfiguration where the endpoint's path is of a user who is not trusted.

        `wait_connected` waits for the connection. proof: of who we are, for a coordinator that is reached over a
        network."""
        self.endpoint, self._proof = endpoint, proof
        trust.check_endpoint(endpoint, "runtime_dir")  # before there is anything to close
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder = codec.Decoder(WORKER_REPLIES, body_bytes_max=STEP_BYTES_MAX)
        self._wakeup_fd = wakeup_fd
        self._watch: StepWatch | None = None
        self._watch_ns = self._active_ns = 0
        self._steps = 0  # that came over the socket since `watch`
        self.connected = False
        self.connections = 0
        self._open()

    def _open(self) -> None:
        """Begins an attempt at a connection."""
        self._over = False  # it came to nothing, or has ended
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
        self._socket.connect(self.endpoint)

    def _close(self) -> None:
        """What it had not handed out yet is lost, as it was meant for a connection that is no more."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def send(self, message: Message) -> bool:
        """Sends on this connection; False where it has ended."""
        self.look()
        if not self.connected:
            return False
        try:
            self._socket.send_multipart(codec.encode(message))
        except zmq.Again:
            return False
        return True

    def discard(self) -> None:
        """Throws away what has come. Nobody has said anything to a worker that has not said hello: it is left from an
        earlier connection."""
        while self._socket.poll(0):
            self._socket.recv_multipart(zmq.NOBLOCK)

    def watch(self, steps: StepWatch | None, watch_us: int) -> None:
        """From now on steps are looked for in shared memory too: for so long after each message. None: no more."""
        self._watch, self._watch_ns, self._steps = steps, watch_us * 1000, 0

    def receive(self, timeout_ms: int) -> Message | None:
        """The next message; None where the time is over, a signal came, or the connection changed.

        Raises ProtocolError for bytes that are no message, NotAllowed where the coordinator does not know our key.
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
        """What is there now. Of a step that was taken from shared memory the message is thrown away."""
        if self._watch is None:
            return self._socket.recv_multipart(zmq.NOBLOCK) if self._socket.poll(0) else None
        if (frames := self._watch.take()) is not None:
            return frames
        while self._socket.poll(0):
            message = self._socket.recv_multipart(zmq.NOBLOCK)
            if not codec.is_step(message):
                return message
            self._steps += 1
            if self._steps > self._watch.taken:
                self._watch.taken = self._steps
                return message
        return None

    def _look_for_steps(self, steps: StepWatch, timeout_ms: int) -> Sequence[bytes] | None:
        """Looks without sleeping, until something is there or it has been quiet for long enough."""
        until_ns = min(self._active_ns + self._watch_ns, time.monotonic_ns() + timeout_ms * 1_000_000)
        while time.monotonic_ns() < until_ns:
            for _ in range(LOOKS):
                if (frames := steps.take()) is not None:
                    return frames
            if self._socket.poll(0):
                return self._next_frames()
        return None

    def wait_connected(self, timeout_s: float) -> None:
        """Waits for the coordinator, where there is no connection to it. Raises CoordinatorUnavailable, NotAllowed;
        returns early on a signal."""
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
        """Says goodbye where that makes sense, and closes."""
        if goodbye and self.connected:
            self.send(Goodbye())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=200)
