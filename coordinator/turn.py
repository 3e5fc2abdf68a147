"""One turn of the coordinator, without its sockets: messages in, core, tables, messages out.

Always in this order: drain what has arrived (a bounded number of messages from each side), apply every event to the
core, apply Turn, publish the tables, send. The server runs it over ZeroMQ, the simulator over a simulated network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from protocol import codec
from protocol.errors import CapacityExceeded, KvforgeError, ProtocolError, VersionMismatch
from protocol.messages import (
    CLIENT_MESSAGES,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    WORKER_MESSAGES,
    ErrorInfo,
    Goodbye,
    Hello,
    Message,
    Refused,
    Welcome,
    WorkerHello,
    WorkerWelcome,
)
from protocol.tables import TablesWriter

from .core.events import (
    ClientGone,
    DropWorker,
    Effect,
    FromClient,
    FromWorker,
    Log,
    ToClient,
    ToWorker,
    Turn,
    WorkerGone,
)
from .core.machine import Machine
from .publish import publish

Frames = Sequence[bytes | memoryview]
log = logging.getLogger("coordinator")


class Transport(Protocol):
    """The connections of one side, clients or workers: what `coordinator.peers.Peers` is over ZeroMQ."""

    def __len__(self) -> int: ...

    def receive(self) -> tuple[bytes, int, list[bytes]] | None:
        """The next message: (identity, descriptor, frames); None where none is waiting."""

    def number(self, identity: bytes) -> int | None:
        """The number of an admitted connection."""

    def admit(self, identity: bytes, descriptor: int) -> int | None:
        """Gives a connection its number; None where it has ended already."""

    def note_ends(self) -> None:
        """Looks for connections that ended."""

    def take_gone(self) -> list[int]:
        """Numbers of the connections that ended since the last call."""

    def forget(self, number: int) -> None:
        """The connection is no longer ours to talk to. Idempotent."""

    def send(self, number: int, frames: Frames) -> bool:
        """Sends without waiting; False where the peer is gone."""

    def send_to(self, identity: bytes, frames: Frames) -> bool:
        """Sends to a connection that has no number (yet)."""


class TurnLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one turn, and of the connections it admits."""

    messages_per_turn_max: int = 1024
    clients_max: int = 256


class TurnLoop:
    """What happens in one turn. Time and entropy (64 bit, for seeds) come from the caller."""

    def __init__(
        self,
        machine: Machine,
        tables: TablesWriter,
        clients: Transport,
        workers: Transport,
        entropy: Callable[[], int],
        limits: TurnLimits,
    ) -> None:
        self.machine, self.tables = machine, tables
        self.clients, self.workers = clients, workers
        self._entropy, self._limits = entropy, limits
        self._client_decoder = codec.Decoder(CLIENT_MESSAGES)
        self._worker_decoder = codec.Decoder(WORKER_MESSAGES)

    def turn(self, now_us: int) -> None:
        """One turn at `now_us` (microseconds, monotonic); does not wait."""
        effects: list[Effect] = []
        for _ in range(self._limits.messages_per_turn_max):
            if not self._take_worker(effects, now_us):
                break
        for _ in range(self._limits.messages_per_turn_max):
            if not self._take_client(effects, now_us):
                break
        self._note_ends(effects, now_us)
        effects += self.machine.apply(Turn(), now_us)
        publish(self.machine, self.tables, now_us)
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToClient):
                self.clients.send(effect.client, codec.encode(effect.message))
            elif isinstance(effect, ToWorker):
                self.workers.send(effect.worker, codec.encode(effect.message))
            elif isinstance(effect, DropWorker):
                log.warning("worker connection %d dropped: %s", effect.worker, effect.reason)
                self.workers.forget(effect.worker)
            elif isinstance(effect, Log):
                log.log(logging.getLevelNamesMapping()[effect.level.upper()], "%s", effect.text)

    def _note_ends(self, effects: list[Effect], now_us: int) -> None:
        self.clients.note_ends()
        self.workers.note_ends()
        for number in self.clients.take_gone():
            effects += self.machine.apply(ClientGone(number), now_us)
        for number in self.workers.take_gone():
            effects += self.machine.apply(WorkerGone(number), now_us)

    # -------------------------------------------------------------------------------------------------------- clients

    def _take_client(self, effects: list[Effect], now_us: int) -> bool:
        received = self.clients.receive()
        if received is None:
            return False
        identity, descriptor, frames = received
        message: Message | None = None
        try:
            message = self._client_decoder.decode(frames)
            number = self.clients.number(identity)
            if isinstance(message, Hello):
                self._greet_client(identity, descriptor, number, message)
            elif isinstance(message, Goodbye) and number is None:
                return True  # the end of its connection was noticed first
            elif number is None:
                raise ProtocolError("a client's first message is hello")
            elif isinstance(message, Goodbye):
                self.clients.forget(number)
                effects += self.machine.apply(ClientGone(number), now_us)
            else:
                effects += self.machine.apply(FromClient(number, message, self._entropy()), now_us)
        except KvforgeError as error:
            self._refuse(self.clients, identity, error, message)
        return True

    def _greet_client(self, identity: bytes, descriptor: int, number: int | None, message: Hello) -> None:
        version = negotiate(message.version_min, message.version_max)
        if number is None:
            if len(self.clients) >= self._limits.clients_max:
                raise CapacityExceeded("clients", 1, 0, "raise limits.clients_max")
            number = self.clients.admit(identity, descriptor)
            if number is None:
                return
        welcome = Welcome(
            rid=message.rid,
            version=version,
            boot=self.machine.boot,
            tables_path=str(self.tables.path),
            block_size=self.machine.limits.block_size,
        )
        self.clients.send(number, codec.encode(welcome))

    # -------------------------------------------------------------------------------------------------------- workers

    def _take_worker(self, effects: list[Effect], now_us: int) -> bool:
        received = self.workers.receive()
        if received is None:
            return False
        identity, descriptor, frames = received
        message: Message | None = None
        try:
            message = self._worker_decoder.decode(frames)
            number = self.workers.number(identity)
            if isinstance(message, WorkerHello) and number is None:
                version = negotiate(message.version_min, message.version_max)
                self._note_ends(effects, now_us)  # a successor of the same name may be faster than its end
                number = self.workers.admit(identity, descriptor)
                if number is None:
                    return True
                answers = self.machine.apply(FromWorker(number, message), now_us)
                if number in self.machine.workers:
                    self.workers.send(number, codec.encode(self._worker_welcome(message.rid, version)))
                effects += answers
            elif number is None:
                raise ProtocolError("a worker's first message is worker_hello")
            elif isinstance(message, Goodbye):
                self.workers.forget(number)
                effects += self.machine.apply(WorkerGone(number), now_us)
            else:
                effects += self.machine.apply(FromWorker(number, message), now_us)
        except KvforgeError as error:
            self._refuse(self.workers, identity, error, message)
        return True

    def _worker_welcome(self, rid: int, version: int) -> Message:
        limits = self.machine.limits
        return WorkerWelcome(
            rid=rid,
            version=version,
            boot=self.machine.boot,
            tables_path=str(self.tables.path),
            block_size=limits.block_size,
            slots_max=limits.sequences_max,
            blocks_per_sequence_max=limits.blocks_per_sequence_max,
            step_tokens_max=limits.step_tokens_max,
            step_rows_max=limits.step_rows_max,
        )

    def _refuse(self, peers: Transport, identity: bytes, error: KvforgeError, message: Message | None) -> None:
        rid = error.rid if isinstance(error, codec.InvalidMessage) else getattr(message, "rid", 0)
        log.warning("refused a message: %s", error)
        peers.send_to(identity, codec.encode(Refused(rid=rid, error=ErrorInfo.of(error))))


def negotiate(version_min: int, version_max: int) -> int:
    """The highest protocol version that both sides speak. Raises VersionMismatch naming both ranges."""
    version = min(version_max, PROTOCOL_VERSION)
    if version < max(version_min, PROTOCOL_VERSION_MIN):
        raise VersionMismatch(
            f"the peer speaks protocol {version_min} to {version_max}, "
            f"this coordinator {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}",
            peer_min=version_min,
            peer_max=version_max,
            own_min=PROTOCOL_VERSION_MIN,
            own_max=PROTOCOL_VERSION,
        )
    return version
