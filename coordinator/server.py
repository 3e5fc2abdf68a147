"""The only loop: sockets in, core, tables, sockets out.

One turn, always in this order: drain the sockets (a bounded number of messages from each), apply every event to the
core, apply Turn, publish the tables, send. A plain ZeroMQ poll; one thread; nothing here waits for a peer.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import socket as sockets
import time
from pathlib import Path
from types import FrameType

import zmq

from protocol import codec
from protocol.errors import (
    CapacityExceeded,
    CoordinatorInUse,
    InvalidConfiguration,
    KvforgeError,
    ProtocolError,
    VersionMismatch,
)
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
    Stop,
    Welcome,
    WorkerHello,
    WorkerWelcome,
)
from protocol.notify import notify
from protocol.tables import TablesWriter
from protocol.transport import (
    CLIENT_SOCKET,
    TABLES_FILE,
    WORKER_SOCKET,
    client_endpoint,
    prepare_runtime_dir,
    worker_endpoint,
)

from .config import CoordinatorConfig
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
from .peers import Peers
from .publish import publish

LOCK_FILE = "coordinator.lock"
IDLE_WAIT_MS = 1000
log = logging.getLogger("coordinator")


class Server:
    """Owns the sockets, the shared tables and the machine. `run` serves until told to stop."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Binds and creates the tables. Raises InvalidConfiguration, or Unavailable where the folder is in use."""
        self.config = config
        self.runtime = config.runtime_path
        limits, geometry = config.core_limits(), config.geometry()
        client_address, worker_address = client_endpoint(self.runtime), worker_endpoint(self.runtime)
        prepare_runtime_dir(self.runtime)
        self._lock = RuntimeLock(self.runtime)
        self.boot = secrets.token_hex(16)
        self.machine = Machine(limits, self.boot, secrets.token_bytes(32), self._now_us())
        self._numbers = 0
        self._stopping = 0
        self._stop_deadline = 0.0
        self._read_wakeup, self._write_wakeup = sockets.socketpair()
        try:
            self.tables = TablesWriter(self.runtime / TABLES_FILE, geometry, self.boot)
            self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self.clients = Peers(self.context, client_address, self._next_number)
            self.workers = Peers(self.context, worker_address, self._next_number)
        except (OSError, zmq.ZMQError) as error:
            self._lock.release()
            raise InvalidConfiguration("runtime_dir", f"{self.runtime} cannot be used: {error}") from None
        self._client_decoder = codec.Decoder(CLIENT_MESSAGES)
        self._worker_decoder = codec.Decoder(WORKER_MESSAGES)

    @staticmethod
    def _now_us() -> int:
        return time.monotonic_ns() // 1000

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ----------------------------------------------------------------------------------------------------------- loop

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains: what runs ends (bounded by `drain_s`), workers are stopped."""
        self._catch_signals()
        poller = zmq.Poller()
        for socket in (self.clients.socket, self.clients.monitor, self.workers.socket, self.workers.monitor):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._read_wakeup, zmq.POLLIN)
        notify("READY=1", "STATUS=accepting clients and workers")
        log.info("serving at %s (boot %s)", client_endpoint(self.runtime), self.boot[:8])
        while not self._finished():
            poller.poll(self._wait_ms())
            self.turn()
        self._stop_workers()

    def turn(self) -> None:
        """One turn of the loop; does not wait."""
        effects: list[Effect] = []
        now_us = self._now_us()
        for _ in range(self.config.limits.messages_per_turn_max):
            if not self._take_worker(effects, now_us):
                break
        for _ in range(self.config.limits.messages_per_turn_max):
            if not self._take_client(effects, now_us):
                break
        self._note_ends(effects, now_us)
        effects += self.machine.apply(Turn(), now_us)
        publish(self.machine, self.tables, now_us)
        self._carry_out(effects)

    def _wait_ms(self) -> int:
        if not self._stopping:
            return IDLE_WAIT_MS
        return max(0, min(IDLE_WAIT_MS, int((self._stop_deadline - time.monotonic()) * 1000)))

    def _finished(self) -> bool:
        if not self._stopping:
            return False
        return self._stopping > 1 or not self.machine.requests.live or time.monotonic() >= self._stop_deadline

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
        try:
            message = self._client_decoder.decode(frames)
            number = self.clients.number(identity)
            if isinstance(message, Hello):
                self._greet_client(identity, descriptor, number, message)
            elif number is None:
                raise ProtocolError("a client's first message is hello")
            elif isinstance(message, Goodbye):
                self.clients.forget(number)
                effects += self.machine.apply(ClientGone(number), now_us)
            else:
                effects += self.machine.apply(FromClient(number, message, secrets.randbits(64)), now_us)
        except KvforgeError as error:
            self._refuse(self.clients, identity, error)
        return True

    def _greet_client(self, identity: bytes, descriptor: int, number: int | None, message: Hello) -> None:
        version = negotiate(message.version_min, message.version_max)
        if number is None:
            if len(self.clients) >= self.config.limits.clients_max:
                raise CapacityExceeded("clients", 1, 0, "raise limits.clients_max")
            self.clients.admit(identity, descriptor)
        welcome = Welcome(
            rid=message.rid,
            version=version,
            boot=self.boot,
            tables_path=str(self.tables.path),
            block_size=self.machine.limits.block_size,
        )
        self.clients.send_to(identity, codec.encode(welcome))

    # -------------------------------------------------------------------------------------------------------- workers

    def _take_worker(self, effects: list[Effect], now_us: int) -> bool:
        received = self.workers.receive()
        if received is None:
            return False
        identity, descriptor, frames = received
        try:
            message = self._worker_decoder.decode(frames)
            number = self.workers.number(identity)
            if isinstance(message, WorkerHello) and number is None:
                version = negotiate(message.version_min, message.version_max)
                self._note_ends(effects, now_us)  # a successor of the same name may be faster than its end
                number = self.workers.admit(identity, descriptor)
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
            self._refuse(self.workers, identity, error)
        return True

    def _worker_welcome(self, rid: int, version: int) -> Message:
        limits = self.machine.limits
        return WorkerWelcome(
            rid=rid,
            version=version,
            boot=self.boot,
            tables_path=str(self.tables.path),
            block_size=limits.block_size,
            slots_max=limits.sequences_max,
            blocks_per_sequence_max=limits.blocks_per_sequence_max,
            step_tokens_max=limits.step_tokens_max,
            step_rows_max=limits.step_rows_max,
        )

    def _refuse(self, peers: Peers, identity: bytes, error: KvforgeError) -> None:
        rid = error.rid if isinstance(error, codec.InvalidMessage) else 0
        log.warning("refused a message: %s", error)
        peers.send_to(identity, codec.encode(Refused(rid=rid, error=ErrorInfo.of(error))))

    # ------------------------------------------------------------------------------------------------------- the ends

    def _catch_signals(self) -> None:
        self._write_wakeup.setblocking(False)
        self._read_wakeup.setblocking(False)
        signal.set_wakeup_fd(self._write_wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping += 1
        if self._stopping == 1:
            self._stop_deadline = time.monotonic() + self.config.drain_s
            self.machine.draining = True
            notify("STOPPING=1", "STATUS=draining")

    def _stop_workers(self) -> None:
        for number in list(self.machine.workers):
            self.workers.send(number, codec.encode(Stop(reason="the coordinator is stopping")))
        log.info("stopped; %d requests were left unfinished", len(self.machine.requests.live))

    def close(self) -> None:
        """Leaves nothing behind: sockets, tables and lock are removed. Idempotent."""
        signal.set_wakeup_fd(-1)
        self.clients.close()
        self.workers.close()
        # A linger for the last Stop; a worker that does not read in that time sees the connection end instead.
        self.context.destroy(linger=200)
        self.tables.close()
        for name in (CLIENT_SOCKET, WORKER_SOCKET):
            (self.runtime / name).unlink(missing_ok=True)
        self._read_wakeup.close()
        self._write_wakeup.close()
        self._lock.release()


class RuntimeLock:
    """One coordinator per runtime folder. Raises CoordinatorInUse where another one is alive."""

    def __init__(self, runtime: Path) -> None:
        self._path = runtime / LOCK_FILE
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise CoordinatorInUse(
                f"another coordinator is serving in {runtime}: stop it, or choose another --runtime-dir"
            ) from None

    def release(self) -> None:
        """Removes the lock file and lets go."""
        if self._handle >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1


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
