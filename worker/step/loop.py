"""The worker's life: connect, load, register the pool, run steps, leave.

One thread. While a model loads, ZeroMQ's own thread answers heartbeats. When the coordinator goes away the model
stays loaded and the worker registers again with the next one.

Two steps may be under way: the second is queued on the device before the first has ended, and results leave in the
order in which steps came. While a step runs, the loop looks for its end and for messages in turn (`Patience`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np

from kvforge.protocol.errors import GpuError, InternalError, KvforgeError, restore
from kvforge.protocol.messages import (
    ErrorInfo,
    Int32Array,
    Message,
    PoolRegistered,
    Refused,
    Step,
    StepResult,
    Stop,
    WorkerFailed,
    WorkerHello,
    WorkerLoading,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.notify import notify
from kvforge.protocol.tables import TablesReader
from worker.config import WorkerConfig
from worker.cores import Cores, Place

from .engine import Engine
from .link import Link
from .patience import Patience
from .runner import STEPS_UNDER_WAY_MAX, PendingStep, Runner

REPLY_WAIT_S = 10.0
IDLE_WAIT_MS = 1000
PROGRESS_EVERY_S = 0.2
REPORT_IDLE_NS = 900_000_000
REPORT_STEPS_MIN = 100  # shorter bursts are not worth a line in the log
log = logging.getLogger("worker")


class Worker:
    """One worker process."""

    def __init__(self, config: WorkerConfig, cores: Cores, place: Place) -> None:
        """Connects lazily. cores: its share when it started; place: among those with whom it shares.

        Raises InvalidConfiguration.
        """
        self.config, self._cores, self._place = config, cores, place
        self._stopping = False
        self._read_wakeup, self._write_wakeup = sockets.socketpair()
        self._catch_signals()
        self._link = Link(config.runtime_path, self._read_wakeup.fileno())
        self._rid = 0
        self._engine: Engine | None = None
        self._request_of: dict[int, int] = {}  # by slot; kept only where steps are logged
        self._under_way: deque[tuple[int, PendingStep]] = deque()
        self._patience = Patience()
        self._tables: TablesReader | None = None
        self._pool_at = PoolRegistered(rid=0, epoch=0, base_block=0)
        self._connection = 0
        self._progress_at = 0.0

    def run(self) -> None:
        """Serves until stopped. Raises typed errors where it cannot start."""
        try:
            while not self._stopping:
                welcome = self._greet()
                if welcome is None:
                    continue
                try:
                    self._prepare(welcome)
                except KvforgeError as error:
                    self._link.send(WorkerFailed(error=ErrorInfo.of(error)))
                    raise
                if self._register():
                    self._serve()
        finally:
            notify("STOPPING=1")
            self._link.close(goodbye=self._stopping)  # one that ends by a fault has died, and says nothing
            if self._engine is not None:
                self._engine.close()
            signal.set_wakeup_fd(-1)
            self._read_wakeup.close()
            self._write_wakeup.close()

    # ----------------------------------------------------------------------------------------------------- connecting

    def _greet(self) -> WorkerWelcome | None:
        """Says hello to whichever coordinator is there. None where a signal or a disconnection came first."""
        self._link.wait_connected(self.config.coordinator_wait_s)
        if not self._link.connected:
            return None
        self._connection = self._link.connections
        reply = self._ask(WorkerHello(rid=self._next_rid(), name=self.config.name, pid=os.getpid()))
        return reply if isinstance(reply, WorkerWelcome) else None

    def _ask(self, message: Message) -> Message | None:
        """Sends a command and waits for its reply. None where the connection ended or we are to stop."""
        if not self._link.send(message):
            return None
        deadline = time.monotonic() + REPLY_WAIT_S
        while time.monotonic() < deadline and self._same_connection():
            reply = self._link.receive(100)
            if isinstance(reply, Refused):
                raise restore(reply.error.code, reply.error.message, reply.error.fields)
            if isinstance(reply, Stop):
                self._stopping = True
            elif reply is not None:
                return reply
        return None

    def _same_connection(self) -> bool:
        return not self._stopping and self._link.connected and self._link.connections == self._connection

    def _next_rid(self) -> int:
        self._rid += 1
        return self._rid

    # -------------------------------------------------------------------------------------------------------- loading

    def _prepare(self, welcome: WorkerWelcome) -> None:
        """Loads the model once, makes the pool once, maps this coordinator's tables."""
        if self._engine is None:
            notify(f"STATUS=loading {self.config.model}")
            cores = replace(self._cores, others=self._place.others())  # others may have started meanwhile
            self._engine = Engine(self.config, welcome, self._report_progress, cores)
            if not self._engine.device.computes_on_cores:
                self._place.close()
        else:
            self._engine.adopt(welcome)
        self._tables = TablesReader(Path(welcome.tables_path), welcome.boot)

    def _report_progress(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_EVERY_S and fraction < 1:
            return
        self._progress_at = now
        self._link.receive(0)  # reads the monitor; nothing is sent to a worker that has no pool
        if self._link.connected:
            self._link.send(WorkerLoading(phase=phase, progress=fraction))

    def _register(self) -> bool:
        """Announces the pool. False where the coordinator went away meanwhile."""
        assert self._engine is not None
        model, pool = self._engine.model, self._engine.pool
        ready = WorkerReady(
            rid=self._next_rid(),
            model=model.info,
            blocks=pool.blocks,
            bytes_per_block=model.geometry.bytes_per_block,
            kv_dtype=model.geometry.kv_dtype,
            device=model.device.name,
            watches=self.config.watched_us > 0,
            device_bytes=self._engine.device_bytes().by_purpose(),
            kernels=self._engine.kernels(),
        )
        self._link.watch(None, 0)
        reply = self._ask(ready)
        if not isinstance(reply, PoolRegistered):
            return False
        if ready.watches:
            assert self._tables is not None
            self._link.watch(self._tables.watch(reply.pool, reply.epoch), self.config.watched_us)
        self._pool_at = reply
        notify("READY=1", f"STATUS=serving {model.info.name}, {pool.blocks} blocks")
        log.info("registered: blocks %d to %d", reply.base_block, reply.base_block + pool.blocks - 1)
        return True

    # -------------------------------------------------------------------------------------------------------- serving

    def _serve(self) -> None:
        """Runs steps in the order in which they come, until told to stop or the coordinator is gone."""
        try:
            while self._same_connection():
                message = self._link.receive(self._wait_ms())
                if isinstance(message, Step):
                    if len(self._under_way) == STEPS_UNDER_WAY_MAX:
                        self._answer()
                    self._launch(message)
                elif isinstance(message, Stop):
                    log.info("told to stop: %s", message.reason)
                    self._stopping = True
                elif isinstance(message, Refused):
                    raise restore(message.error.code, message.error.message, message.error.fields)
                while self._under_way and self._under_way[0][1].done():
                    self._answer()
            while self._stopping and self._link.connected and self._under_way:
                self._answer()  # it finishes what it was sent
        finally:
            self._under_way.clear()
        if not self._stopping:
            log.warning("the coordinator is gone; waiting for the next one")

    @property
    def _runner(self) -> Runner:
        assert self._engine is not None, "no step before the model is loaded"
        return self._engine.runner

    def _wait_ms(self) -> int:
        """How long to wait for a message now."""
        if self._under_way:
            return self._patience.wait_ms()
        meter = self._runner.meter
        if meter.steps and time.monotonic_ns() - meter.last_ns > REPORT_IDLE_NS:
            if meter.steps >= REPORT_STEPS_MIN:
                log.info("%s", meter.line())
            meter.reset()
        return IDLE_WAIT_MS

    def _launch(self, step: Step) -> None:
        """Queues a step on the device."""
        runner, base = self._runner, self._pool_at.base_block
        if step.copies.size:
            local = step.copies.reshape(-1, 3) - np.array([base, base, 0], np.int32)
            step = msgspec.structs.replace(step, copies=local.reshape(-1))
        started_ns = time.monotonic_ns()
        tables = self._tables_of(step)
        if base:
            tables = tables - base
        runner.meter.read_ns += time.monotonic_ns() - started_ns
        self._under_way.append((step.step_id, runner.launch(step, tables)))
        self._patience.begin(len(self._under_way))
        if log.isEnabledFor(logging.DEBUG):
            self._tell_step(step)

    def _tell_step(self, step: Step) -> None:
        """A step's line in the log: which requests it serves, and how many of their tokens it computes."""
        self._request_of.update((start.slot, start.request_id) for start in step.begins)
        rows = zip(step.slots.tolist(), step.counts.tolist(), strict=True)
        told = ", ".join(f"request {self._request_of.get(slot, 0)}: {count}" for slot, count in rows)
        log.debug("step %d: %d rows, %d tokens (%s)", step.step_id, step.slots.size, step.tokens.size, told)

    def _answer(self) -> None:
        """Waits for the oldest step under way and sends its result. Raises GpuError where the device is lost."""
        step_id, pending = self._under_way.popleft()
        outcome = pending.finish()
        self._patience.end(len(self._under_way))
        started_ns = time.monotonic_ns()
        result = StepResult(
            step_id=step_id,
            epoch=self._pool_at.epoch,
            errors=outcome.errors,
            duration_us=outcome.duration_us,
            slots=outcome.slots,
            tokens=outcome.tokens,
            logprobs=outcome.logprobs,
            top_counts=outcome.top_counts,
            top_tokens=outcome.top_tokens,
            top_logprobs=outcome.top_logprobs,
        )
        self._link.send(result)
        self._runner.meter.send_ns += time.monotonic_ns() - started_ns
        lost = [error for error in outcome.errors if error.error.code == GpuError.code]
        device = self._runner.model.device
        if lost and not device.survives():
            error = GpuError(f"{device.name} is lost: {lost[0].error.message}")
            self._link.send(WorkerFailed(error=ErrorInfo.of(error)))
            raise error

    def _tables_of(self, step: Step) -> Int32Array:
        """The block tables of the step's rows, global ids, from shared memory."""
        assert self._tables is not None
        if not step.slots.size:
            return np.zeros((0, 1), np.int32)
        block_size = self._runner.pool.block_size
        width = int(-(-int((step.starts + step.counts).max()) // block_size))
        return self._tables.rows(step.slots, width)[0]

    # -------------------------------------------------------------------------------------------------------- signals

    def _catch_signals(self) -> None:
        self._write_wakeup.setblocking(False)
        signal.set_wakeup_fd(self._write_wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopping:
            raise InternalError("stopped by a second signal")
        self._stopping = True
