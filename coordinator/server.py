"""The only loop: sockets in, core, tables, sockets out.

A plain ZeroMQ poll; one thread; nothing here waits for a peer. What one turn does is in `turn.py`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import socket as sockets
import time
from functools import partial
from pathlib import Path
from types import FrameType

import zmq

from protocol import codec
from protocol.errors import CoordinatorInUse, InvalidConfiguration
from protocol.messages import Stop
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
from .core.machine import Machine
from .peers import Peers
from .turn import TurnLimits, TurnLoop

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
        bounds = TurnLimits(
            messages_per_turn_max=config.limits.messages_per_turn_max, clients_max=config.limits.clients_max
        )
        entropy = partial(secrets.randbits, 64)
        self._turns = TurnLoop(self.machine, self.tables, self.clients, self.workers, entropy, bounds)

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
        self._turns.turn(self._now_us())

    def _wait_ms(self) -> int:
        if not self._stopping:
            return IDLE_WAIT_MS
        return max(0, min(IDLE_WAIT_MS, int((self._stop_deadline - time.monotonic()) * 1000)))

    def _finished(self) -> bool:
        if not self._stopping:
            return False
        return self._stopping > 1 or not self.machine.requests.live or time.monotonic() >= self._stop_deadline

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
        self.context.term()
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
