"""The worker's life: connect, load, register the pool, run steps, leave.

One thread. While a model loads, ZeroMQ's own thread answers heartbeats. When the coordinator goes away the model
stays loaded and the worker registers again with the next one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets
import time
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from protocol.errors import InternalError, KvforgeError, ModelNotFound, ProtocolError, restore
from protocol.messages import (
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
from protocol.notify import notify
from protocol.tables import TablesReader

from .config import CPU_KV_BYTES, GPU_FREE_SHARE, WorkerConfig
from .device import Device, open_device
from .link import Link
from .model import LoadedModel, load_model
from .pool import KvPool
from .runner import Runner

REPLY_WAIT_S = 10.0
IDLE_WAIT_MS = 1000
PROGRESS_EVERY_S = 0.2
log = logging.getLogger("worker")


class Worker:
    """One worker process."""

    def __init__(self, config: WorkerConfig) -> None:
        """Connects lazily. Raises InvalidConfiguration."""
        self.config = config
        self._stopping = False
        self._read_wakeup, self._write_wakeup = sockets.socketpair()
        self._catch_signals()
        self._link = Link(config.runtime_path, self._read_wakeup.fileno())
        self._rid = 0
        self._model: LoadedModel | None = None
        self._pool: KvPool | None = None
        self._runner: Runner | None = None
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
            if self._pool is not None:
                self._pool.close()
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
        if self._model is None:
            self._load(welcome.block_size)
        assert self._model is not None and self._pool is not None
        if self._model.geometry.block_size != welcome.block_size:
            raise ProtocolError(
                f"the coordinator's block size is now {welcome.block_size}, this worker's pool was made for "
                f"{self._model.geometry.block_size}: restart the worker"
            )
        self._runner = Runner(
            self._model,
            self._pool,
            slots_max=welcome.slots_max,
            step_tokens_max=welcome.step_tokens_max,
            step_rows_max=welcome.step_rows_max,
        )
        self._tables = TablesReader(Path(welcome.tables_path), welcome.boot)

    def _load(self, block_size: int) -> None:
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        device = open_device(config.device, config.device_index)
        notify(f"STATUS=loading {config.model} on {device.name}")
        self._model = load_model(
            self._find_model(),
            load_format=config.load_format,
            dtype=config.dtype,
            device=device,
            block_size=block_size,
            kv_dtype=config.kv_dtype,
            progress=self._report_progress,
            seed=config.seed,
        )
        blocks = self._blocks(device, self._model)
        self._pool = KvPool(self._model.geometry, blocks, device)
        log.info("%s on %s: %d blocks, %d bytes of KV", self._model.info.name, device.name, blocks, self._pool.bytes)

    def _find_model(self) -> str:
        """A path, or a name that `kvforge pull` has fetched before. Raises ModelNotFound."""
        if Path(self.config.model).exists():
            return self.config.model
        try:
            from kvforge.models import find
        except ImportError:
            raise ModelNotFound(self.config.model, "there is no such file or folder") from None
        return str(find(self.config.model))

    def _blocks(self, device: Device, model: LoadedModel) -> int:
        if self.config.blocks:
            return self.config.blocks
        default = int(device.free_bytes() * GPU_FREE_SHARE) if device.is_gpu else CPU_KV_BYTES
        return model.geometry.blocks_for(self.config.kv_bytes or default)

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
        assert self._model is not None and self._pool is not None
        ready = WorkerReady(
            rid=self._next_rid(),
            model=self._model.info,
            blocks=self._pool.blocks,
            bytes_per_block=self._model.geometry.bytes_per_block,
            kv_dtype=self._model.geometry.kv_dtype,
            device=self._model.device.name,
        )
        reply = self._ask(ready)
        if not isinstance(reply, PoolRegistered):
            return False
        self._pool_at = reply
        notify("READY=1", f"STATUS=serving {self._model.info.name}, {self._pool.blocks} blocks")
        log.info("registered: blocks %d to %d", reply.base_block, reply.base_block + self._pool.blocks - 1)
        return True

    # -------------------------------------------------------------------------------------------------------- serving

    def _serve(self) -> None:
        """Runs steps in the order in which they come, until told to stop or the coordinator is gone."""
        while self._same_connection():
            message = self._link.receive(IDLE_WAIT_MS)
            if isinstance(message, Step):
                self._link.send(self._step(message))
            elif isinstance(message, Stop):
                log.info("told to stop: %s", message.reason)
                self._stopping = True
            elif isinstance(message, Refused):
                raise restore(message.error.code, message.error.message, message.error.fields)
        if not self._stopping:
            log.warning("the coordinator is gone; waiting for the next one")

    def _step(self, step: Step) -> StepResult:
        assert self._runner is not None
        base = self._pool_at.base_block
        local = step.copies.reshape(-1, 3) - np.array([base, base, 0], np.int32) if step.copies.size else step.copies
        outcome = self._runner.run(_with_copies(step, local.reshape(-1)), self._tables_of(step) - base)
        return StepResult(
            step_id=step.step_id,
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

    def _tables_of(self, step: Step) -> Int32Array:
        """The block tables of the step's rows, global ids: from the message, else from shared memory."""
        assert self._tables is not None and self._model is not None
        if step.table_width:
            return step.tables.reshape(-1, step.table_width)
        if not step.slots.size:
            return np.zeros((0, 1), np.int32)
        block_size = self._model.geometry.block_size
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


def _with_copies(step: Step, copies: Int32Array) -> Step:
    """The step with its copies in pool-local ids."""
    if not copies.size:
        return step
    return Step(
        step_id=step.step_id,
        begins=step.begins,
        slots=step.slots,
        starts=step.starts,
        counts=step.counts,
        samples=step.samples,
        tokens=step.tokens,
        copies=copies,
        history=step.history,
    )
