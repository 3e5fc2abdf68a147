"""Simulated clients: they send what the actions say, and keep what the replies told them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from protocol import codec
from protocol.messages import (
    Accepted,
    Cancel,
    CreateSequence,
    Forked,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Goodbye,
    Hello,
    ListRequests,
    Message,
    SequenceInfo,
    Stream,
)
from tests.simulation.network import Connection, SimulatedPeers
from tests.simulation.workers import Violation

# Saying these twice must do no harm.
REPEATABLE = (Hello, Cancel, GetRequest, ListRequests, GetStats, GetHealth, GetSequence, GetTokens)


class SimulatedClient:
    """One client process. `ids`: what its labels turned out to be."""

    def __init__(self, name: str, peers: SimulatedPeers, seed: str, delivered: Callable[[], None]) -> None:
        self.name, self._peers, self._seed, self._delivered = name, peers, seed, delivered
        self.connection: Connection | None = None
        self.connections = 0
        self.duplicate_share = 0.0
        self.ids: dict[str, int] = {}
        self.unanswered: set[int] = set()
        self._rids = 0

    def connect(self) -> None:
        """A fresh connection, greeted."""
        if self.connection is None:
            self.connections += 1
            self._random = Random(f"{self._seed}/{self.name}/{self.connections}")
            self.connection = self._peers.connect(self._random, self._receive)
            self.unanswered = set()
            self.send(Hello, name=self.name)

    def disconnect(self) -> None:
        """The process dies."""
        if self.connection is not None:
            self.connection.cut()
            self.connection = None

    def goodbye(self) -> None:
        """It leaves politely."""
        if self.connection is not None:
            self.connection.send(codec.encode(Goodbye()))
            self.disconnect()

    def send(self, cls: type[Message], labels: tuple[str, ...] = (), **fields: Any) -> None:
        """Sends a command; `labels` name what it creates."""
        if self.connection is None:
            return
        self._rids += 1
        message = cls(rid=self._rids, **fields)
        self.connection.commands[self._rids] = (message, labels)
        self.unanswered.add(self._rids)
        frames = codec.encode(message)
        self.connection.send(frames)
        if isinstance(message, REPEATABLE) and self._random.random() < self.duplicate_share:
            self.connection.send(frames)

    def send_raw(self, frames: list[bytes]) -> None:
        """Sends bytes that are no message."""
        if self.connection is not None:
            self.connection.send(frames)

    def _receive(self, message: Any) -> None:
        self._delivered()
        if isinstance(message, Stream) or self.connection is None:
            return
        found = self.connection.commands.get(message.rid)
        if found is None and message.rid:
            raise Violation(f"{self.name} got an answer to a question it never asked: {message}")
        self.unanswered.discard(message.rid)
        if found is None:
            return
        command, labels = found
        if isinstance(message, Accepted):
            self.ids[labels[0]] = message.request_id
        elif isinstance(message, SequenceInfo) and isinstance(command, CreateSequence):
            self.ids[labels[0]] = message.sequence_id
        elif isinstance(message, Forked):
            self.ids.update(zip(labels, message.sequence_ids.tolist(), strict=True))
