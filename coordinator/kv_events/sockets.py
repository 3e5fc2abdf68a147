"""The sockets of the event stream: PUB for subscribers, ROUTER for those who missed something.

What ZeroMQ has no room for it drops, and says so to nobody but the subscriber, which sees the gap in the numbers.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import zmq

from kvforge.protocol.errors import CoordinatorInUse, InvalidConfiguration
from kvforge.protocol.network import is_network

from ..runtime_folder import OwnFiles, check_free
from .settings import IPC, KvEventsSection
from .stream import Asked

REPLAY_QUEUE_MAX = 64  # batches on their way to one who asked
REQUEST_BYTES_MAX = 1024
REQUESTS_A_TURN = 64
log = logging.getLogger("coordinator")


class Sockets:
    """Binds where the settings say."""

    def __init__(self, settings: KvEventsSection) -> None:
        """Raises InvalidConfiguration."""
        self._topic = settings.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._own = OwnFiles()
        self._stirred = self._answered = False
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
        """A socket's file is for this user alone: whoever may open it reads everybody's tokens."""
        if not is_network(endpoint):
            try:
                check_free(endpoint.removeprefix(IPC))  # ZeroMQ removes what is there, alive or not
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
        log.info("telling KV events at %s" if field.endswith("publish") else "telling them again at %s", endpoint)

    def watched(self) -> int | None:
        """The descriptor that says when somebody asks for something; None: nobody can."""
        return None if self._replay is None else int(self._replay.fd)

    def stir(self) -> None:
        """It said so."""
        self._stirred = True

    @property
    def waiting(self) -> bool:
        """Whether that was not looked at yet."""
        return self._stirred

    def publish(self, number: bytes, payload: bytes) -> None:
        """To every subscriber that has room for it: PUB never waits."""
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def asked(self) -> list[Asked]:
        """What came in since: not more than a turn has room for. What is no question is passed over."""
        found: list[Asked] = []
        if self._replay is None or not (self._stirred or self._answered):
            return found
        self._answered = False
        for _ in range(REQUESTS_A_TURN):
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._stirred = False
                break
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                found.append(Asked(frames[0], int.from_bytes(frames[2], "big")))
            else:
                log.warning("what somebody asked for KV events is no number of a batch: %d frames", len(frames))
        return found

    def answer(self, who: bytes, number: bytes, payload: bytes) -> bool | None:
        """One batch for one that asked. False: it has no room for now; None: it is gone."""
        assert self._replay is not None
        self._answered = True  # to send may take the sign that something came
        try:
            self._replay.send_multipart((who, b"", number, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True

    def close(self) -> None:
        """Leaves nothing behind. Idempotent."""
        self._context.destroy(linger=0)
        self._own.remove()
