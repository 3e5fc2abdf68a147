"""The sockets of the event stream: PUB for subscribers, ROUTER for replay requests.

ZeroMQ drops messages when a queue is full; the subscriber detects the gap in the batch numbers.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import zmq

from kvforge.coordinator.transport.runtime_folder import OwnFiles, check_free
from kvforge.protocol.errors import CoordinatorInUse, InvalidConfiguration
from kvforge.protocol.network import is_network

from .settings import IPC, KvEventsSection
from .stream import ReplayRequest

REPLAY_QUEUE_MAX = 64  # batches queued for one replay
REQUEST_BYTES_MAX = 1024
REQUESTS_A_TURN = 64
log = logging.getLogger("coordinator")


class Sockets:
    """The PUB and ROUTER sockets."""

    def __init__(self, settings: KvEventsSection) -> None:
        """Bind the configured endpoints.

        Raises:
            InvalidConfiguration: An endpoint cannot be used.
        """
        self._topic = settings.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._own = OwnFiles()
        self._input_due = self._answered = False
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.sndhwm = settings.subscriber_batches_max
            self._bind(self._pub, settings.publish, "kv_events.publish")
            if settings.replay:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.sndhwm = REPLAY_QUEUE_MAX
                self._replay.maxmsgsize = REQUEST_BYTES_MAX
                self._replay.router_mandatory = True
                self._bind(self._replay, settings.replay, "kv_events.replay")
        except InvalidConfiguration:
            self.close()
            raise

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str, field: str) -> None:
        """Bind a socket. Its file is private to this user, because events contain the tokens of all prompts."""
        if not is_network(endpoint):
            try:
                check_free(endpoint.removeprefix(IPC))  # ZeroMQ would replace even a live socket
            except CoordinatorInUse as error:
                raise InvalidConfiguration(field, str(error)) from None
        socket.linger = 0
        socket.ipv6 = "[" in endpoint
        before = os.umask(0o177)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise InvalidConfiguration(field, f"{endpoint} cannot be used: {error}") from None
        finally:
            os.umask(before)
        if not is_network(endpoint):
            self._own.note(Path(endpoint.removeprefix(IPC)))
        log.info("publishing KV events at %s" if field.endswith("publish") else "replaying KV events at %s", endpoint)

    def request_descriptor(self) -> int | None:
        """Return the descriptor that signals replay requests, or None."""
        return None if self._replay is None else int(self._replay.fd)

    def note_input(self) -> None:
        """Record that the descriptor was signalled."""
        self._input_due = True

    @property
    def waiting(self) -> bool:
        """Whether a signal has not been handled yet."""
        return self._input_due

    def publish(self, number: bytes, payload: bytes) -> None:
        """Send a batch to every subscriber with room in its queue. PUB never blocks."""
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def pop_requests(self) -> list[ReplayRequest]:
        """Return new replay requests, at most `REQUESTS_A_TURN`. Malformed ones are logged and dropped."""
        found: list[ReplayRequest] = []
        if self._replay is None or not (self._input_due or self._answered):
            return found
        self._answered = False
        for _ in range(REQUESTS_A_TURN):
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._input_due = False
                break
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                found.append(ReplayRequest(frames[0], int.from_bytes(frames[2], "big")))
            else:
                log.warning("invalid replay request: expected a sequence number, got %d frames", len(frames))
        return found

    def answer(self, peer: bytes, number: bytes, payload: bytes) -> bool | None:
        """Send one batch of a replay. Return False if the peer's queue is full, None if the peer is gone."""
        assert self._replay is not None
        self._answered = True  # sending may consume the edge-triggered signal of new input
        try:
            self._replay.send_multipart((peer, b"", number, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True

    def close(self) -> None:
        """Close the sockets and remove their files. Idempotent."""
        self._context.destroy(linger=0)
        self._own.remove()
