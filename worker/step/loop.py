"""The worker's main loop: connect, load, register the pool, run steps, leave.

The worker has one thread. While a model loads, ZeroMQ's own thread answers heartbeats. If the coordinator goes away,
the model stays loaded, steps in flight run to their end, and their results are kept. A recovered coordinator that knows
the pool continues with it; for any other the worker registers again.

Two steps may be in flight: the second is queued on the device before the first has ended, and results leave in the
order of the steps. While a step runs, the loop polls its end and the messages in turn (see `PollBackoff`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import numpy.ma  # np.unique imports it at its first call, for 50 ms in the middle of a step

from kvforge.protocol import token
from kvforge.protocol.errors import (
    DeadlineExceeded,
    GpuError,
    InternalError,
    KvforgeError,
    ProtocolError,
    Unavailable,
    WorkerError,
    restore,
)
from kvforge.protocol.messages import (
    DiskOrders,
    DiskScan,
    ErrorInfo,
    Int32Array,
    Message,
    PoolRegistered,
    Refused,
    Rendezvous,
    Step,
    StepResult,
    Stop,
    WorkerFailed,
    WorkerHello,
    WorkerLoading,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.notify import Watchdog, notify, working
from kvforge.protocol.steady_clock import monotonic
from kvforge.protocol.tables import TablesReader
from kvforge.worker.attention.windows import WindowTables, ring_columns
from kvforge.worker.config import WorkerConfig
from kvforge.worker.cores import Cores, CoreShare
from kvforge.worker.disk.copier import DiskCopier
from kvforge.worker.startup import StartupTimeline

from .connection import CoordinatorConnection
from .engine import Engine
from .host_transfers import COPY_NUMBERS
from .poll_backoff import PollBackoff
from .runner import STEPS_UNDER_WAY_MAX, ModelRunner, PendingStep
from .step_failures import FatalStepError

REPLY_WAIT_S = 10.0
TABLES_GONE_S = 1.0  # grace for the disconnect to be noticed after the coordinator's tables are gone
IDLE_WAIT_MS = 1000
BEFORE_IDLE_WORK_MS = 250  # since the last step or result: the coordinator has no step to send
ANSWERS_KEPT = 16  # results that may not have reached the coordinator: at least the steps in flight
NO_POOL = PoolRegistered(rid=0, epoch=0, base_block=0)
PROGRESS_EVERY_S = 0.2
# Longest silence of a loading model: compiling kernels reports no progress and takes minutes on a slow machine.
LOADING_S_MAX = 900.0
IDLE_NS = 900_000_000
REPORT_STEPS_MIN = 100  # shorter bursts are not worth a line in the log
log = logging.getLogger("worker")


class Worker:
    """One worker process."""

    def __init__(
        self, config: WorkerConfig, cores: Cores, place: CoreShare, timeline: StartupTimeline | None = None
    ) -> None:
        """Prepare the connection; `run` connects.

        Args:
            config: The worker's configuration.
            cores: This worker's share of the cores at start.
            place: Its registration among the workers that share the cores.
            timeline: The phases of the start so far.

        Raises:
            InvalidConfiguration: The endpoint or a key is invalid.
        """
        self.config, self._cores, self._place = config, cores, place
        self._timeline = timeline if timeline is not None else StartupTimeline()
        endpoint, proof = config.coordinator()
        self._stopping = False
        self._read_wakeup, self._write_wakeup = sockets.socketpair()
        self._catch_signals()
        self._connection = CoordinatorConnection(endpoint, self._read_wakeup.fileno(), proof)
        self._rid = 0
        self._engine: Engine | None = None
        self._request_of: dict[int, int] = {}  # by slot; filled only if steps are logged
        self._under_way: deque[tuple[int, PendingStep]] = deque()
        self._answered: deque[StepResult] = deque(maxlen=ANSWERS_KEPT)  # in this registration
        self._last_step = 0  # last step launched in this registration
        self._backoff = PollBackoff()
        self._watchdog = Watchdog()
        self._tables: TablesReader | None = None
        self._pool_at, self._boot = NO_POOL, ""
        self._connected_as = 0
        self._progress_at = 0.0
        self._idle_work = True  # whether there may be any
        self._active_ns = time.monotonic_ns()  # when a step came or ended last

    def run(self) -> None:
        """Serve until stopped.

        Raises:
            KvforgeError: The worker cannot start, or failed.
        """
        try:
            while not self._stopping:
                welcome = self._shake_hands()
                if welcome is None:
                    continue
                try:
                    if welcome.epoch:
                        registered = self._resume(welcome)
                    else:
                        registered = self._prepare(welcome) and self._register()
                except KvforgeError as error:
                    self._connection.send(WorkerFailed(error=ErrorInfo.of(error)))
                    raise
                if registered:
                    self._serve()
        finally:
            notify("STOPPING=1")
            self._connection.close(goodbye=self._stopping)  # a worker that fails sends no goodbye
            if self._engine is not None:
                self._engine.close()
            signal.set_wakeup_fd(-1)
            self._read_wakeup.close()
            self._write_wakeup.close()

    # ----------------------------------------------------------------------------------------------------- connecting

    def _shake_hands(self) -> WorkerWelcome | None:
        """Exchange the handshake. Return None if a signal or a disconnection came first."""
        self._timeline.enter("connecting")
        working("waiting for a coordinator", self.config.coordinator_wait_s + REPLY_WAIT_S)
        self._connection.wait_connected(self.config.coordinator_wait_s)
        if not self._connection.connected:
            return None
        self._connected_as = self._connection.connections
        self._connection.discard()
        hello = WorkerHello(
            rid=self._next_rid(),
            name=self.config.name,
            pid=os.getpid(),
            boot=self._boot,
            epoch=self._pool_at.epoch,
            watches=self._watches,
            token=token.read(self.config.runtime_path),  # it changes with each start of the coordinator
            rank=self.config.rank,
            ranks=self.config.ranks,
        )
        reply = self._ask(hello)
        return reply if isinstance(reply, WorkerWelcome) else None

    def _ask(self, message: Message) -> Message | None:
        """Send a command and return its reply; None if the connection ended or the worker is stopping."""
        return self._next_reply() if self._connection.send(message) else None

    def _next_reply(self) -> Message | None:
        deadline = monotonic() + REPLY_WAIT_S
        while monotonic() < deadline and self._same_connection():
            self._feed()
            reply = self._connection.receive(100)
            if isinstance(reply, Refused):
                raise restore(reply.error.code, reply.error.message, reply.error.fields)
            if isinstance(reply, Stop):
                self._stopping = True
            elif reply is not None:
                return reply
        return None

    def _same_connection(self) -> bool:
        return not self._stopping and self._still_connected()

    def _still_connected(self) -> bool:
        return self._connection.connected and self._connection.connections == self._connected_as

    def _next_rid(self) -> int:
        self._rid += 1
        return self._rid

    # -------------------------------------------------------------------------------------------------------- loading

    def _prepare(self, welcome: WorkerWelcome) -> bool:
        """Make the engine if needed, and map the coordinator's tables. Return False if the coordinator left."""
        self._under_way.clear()
        self._answered.clear()
        self._last_step, self._pool_at = 0, NO_POOL
        if self._engine is None:
            meeting = self._wait_for_ranks() if self.config.ranks > 1 else ""
            if meeting is None:
                return False
            working(f"loading {self.config.model}", LOADING_S_MAX)
            cores = replace(self._cores, others=self._place.others())  # others may have started since
            with _signals_end_process() if meeting else nullcontext():
                self._engine = Engine(self.config, welcome, self._report_progress, cores, meeting)
            if not self._engine.device.computes_on_cores:
                self._place.close()
        elif self.config.ranks > 1:
            # Another rank may be in the middle of a step that this one will never receive.
            raise WorkerError(
                f"rank {self.config.rank} of {self.config.ranks}: the coordinator does not know this worker's pool,"
                " and ranks must restart together"
            )
        else:
            self._engine.adopt(welcome)
            if self._engine.disk is not None:  # its orders are those of another coordinator
                self._engine.disk.restart()
            self._idle_work = True
        return self._map_tables(welcome)

    def _wait_for_ranks(self) -> str | None:
        """Return the name of the ranks' rendezvous once all have arrived, without a time limit.

        Returns None if the connection ended or the worker is stopping.
        """
        log.info("rank %d of %d: waiting for the others", self.config.rank, self.config.ranks)
        while self._same_connection():
            working("waiting for the other ranks", LOADING_S_MAX)
            message = self._connection.receive(IDLE_WAIT_MS)
            if isinstance(message, Rendezvous):
                return message.name
            if isinstance(message, Refused):
                raise restore(message.error.code, message.error.message, message.error.fields)
            self._stopping |= isinstance(message, Stop)
        return None

    def _map_tables(self, welcome: WorkerWelcome) -> bool:
        """Map the coordinator's tables; return False if the coordinator went away and its tables with it.

        Raises:
            Unavailable: The coordinator is there but its tables cannot be read.
            ProtocolError: The tables belong to another coordinator.
        """
        try:
            self._tables, self._boot = TablesReader(Path(welcome.tables_path), welcome.boot), welcome.boot
        except (OSError, ProtocolError) as error:
            deadline = monotonic() + TABLES_GONE_S
            while self._same_connection() and monotonic() < deadline:
                self._connection.receive(100)
            if not self._same_connection():
                return False
            if isinstance(error, ProtocolError):
                raise
            raise Unavailable(f"the tables {welcome.tables_path} cannot be read here: {error.strerror}") from None
        return True

    @property
    def _watches(self) -> bool:
        return self.config.watched_us > 0 and self.config.ranks == 1

    def _resume(self, welcome: WorkerWelcome) -> bool:
        """Resume with a recovered coordinator that knows the pool: its contents stay valid and steps in flight go on.

        Returns False if the connection ended.
        """
        if not self._map_tables(welcome):
            return False
        self._connection.watch(None, 0)
        reply = self._next_reply()
        if not isinstance(reply, PoolRegistered):
            return False
        self._watch_pool(reply)
        self._resend_results(reply.done)
        log.info("the coordinator is back: resuming after step %d", self._last_step)
        return True

    def _report_progress(self, phase: str, fraction: float) -> None:
        self._timeline.enter(phase)
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_EVERY_S and fraction < 1:
            return
        self._progress_at = now
        working(f"{phase} {100 * fraction:.0f} %", LOADING_S_MAX)
        self._connection.receive(0)  # reads the monitor; a worker without a pool receives no message
        if self._connection.connected:
            self._connection.send(WorkerLoading(phase=phase, progress=fraction))

    def _register(self) -> bool:
        """Register the pool. Return False if the coordinator went away."""
        assert self._engine is not None
        self._timeline.enter("registering")
        model, pool, host, disk = self._engine.model, self._engine.pool, self._engine.host, self._engine.disk
        ready = WorkerReady(
            rid=self._next_rid(),
            model=model.info,
            blocks=pool.blocks,
            bytes_per_block=model.geometry.bytes_per_block,
            kv_dtype=model.geometry.kv_dtype,
            device=model.device.name,
            watches=self._watches,
            device_bytes=self._engine.device_bytes().by_purpose(),
            kernels=self._engine.kernels(),
            zeroes=True,
            wants_kinds=model.wants_kinds,
            state_blocks=model.geometry.state_blocks,
            prompt_chunk=model.prompt_chunk,
            window=model.geometry.window,
            window_pages=model.geometry.window_pages,
            window_blocks=self._engine.ring_blocks,
            drafts=self._engine.runner.limits.drafts_max,
            draft_states=pool.geometry.draft_states,
            model_drafts=self._engine.runner.model_drafts,
            host_blocks=host.file.blocks if host is not None else 0,
            host_identity=host.file.identity if host is not None else "",
            host_new=host is not None and not host.file.found,
            disk_blocks=disk.blocks if disk is not None else 0,
        )
        self._connection.watch(None, 0)
        reply = self._ask(ready)
        if not isinstance(reply, PoolRegistered):
            return False
        self._watch_pool(reply)
        notify("READY=1", f"STATUS=serving {model.info.name}, {pool.blocks} blocks")
        phases = self._timeline.finish()
        took = f"; {phases}" if phases else ""
        log.info("registered: blocks %d to %d%s", reply.base_block, reply.base_block + pool.blocks - 1, took)
        return True

    def _watch_pool(self, place: PoolRegistered) -> None:
        if self._watches:
            assert self._tables is not None
            self._connection.watch(self._tables.watch(place.pool, place.epoch), self.config.watched_us)
        self._pool_at = place

    # -------------------------------------------------------------------------------------------------------- serving

    def _serve(self) -> None:
        """Run steps in the order of their arrival until stopped or disconnected."""
        assert self._engine is not None, "nothing to serve before the model is loaded"
        disk = self._engine.disk
        while self._same_connection():
            self._feed()
            if disk is not None:
                self._answer_disk(disk)
            message = self._connection.receive(self._wait_ms())
            if isinstance(message, Step):
                self._run_new_step(message)
            elif isinstance(message, DiskScan | DiskOrders):
                self._use_disk(message)
            elif isinstance(message, Stop):
                log.info("stopping: %s", message.reason)
                self._stopping = True
            elif isinstance(message, Refused):
                raise restore(message.error.code, message.error.message, message.error.fields)
            elif message is None and self._idle_work and self._is_idle():
                assert self._engine is not None, "no idle time before the model is loaded"
                self._idle_work = self._engine.use_idle_time()
            while self._under_way and self._under_way[0][1].done():
                self._answer()
        if disk is not None:
            self._connection.also_wake(-1)
        while self._stopping and self._connection.connected and self._under_way:
            self._answer()  # finish the steps already received
        if not self._stopping:
            log.warning("the coordinator is gone; waiting for another")

    def _use_disk(self, message: DiskScan | DiskOrders) -> None:
        """Take orders for the disk tier, or announce what was found there."""
        disk = self._engine.disk if self._engine is not None else None
        if disk is None or message.epoch != self._pool_at.epoch:
            return
        if isinstance(message, DiskScan):
            self._connection.send(disk.scan(message))
        else:
            disk.take(message)

    def _answer_disk(self, disk: DiskCopier) -> None:
        """Send the results of orders that have ended. A recovered coordinator asks again for those that are lost."""
        results = disk.results(self._pool_at.epoch)
        if results is not None:
            self._connection.send(results)
        self._connection.also_wake(disk.fileno())

    @property
    def _runner(self) -> ModelRunner:
        assert self._engine is not None, "no step before the model is loaded"
        return self._engine.runner

    def _is_idle(self) -> bool:
        """Return whether no step is in flight, and none has come or ended for a while."""
        return not self._under_way and time.monotonic_ns() - self._active_ns >= BEFORE_IDLE_WORK_MS * 1_000_000

    def _wait_ms(self) -> int:
        """Return how long to wait for a message now, in milliseconds."""
        if self._under_way:
            return self._backoff.wait_ms()
        meter = self._runner.meter
        if meter.steps and time.monotonic_ns() - meter.last_ns > IDLE_NS:
            if meter.steps >= REPORT_STEPS_MIN:
                log.info("%s", meter.line())
            meter.reset()
            assert self._engine is not None
            self._engine.release_idle_memory()
        return BEFORE_IDLE_WORK_MS if self._idle_work else IDLE_WAIT_MS

    def _feed(self) -> None:
        self._watchdog.feed(time.monotonic_ns() // 1000)

    def _run_new_step(self, step: Step) -> None:
        """Run a step unless it came before: a recovered coordinator sends unanswered steps again."""
        if step.step_id > self._last_step:
            if len(self._under_way) == STEPS_UNDER_WAY_MAX:
                self._answer()
            self._launch(step)

    def _resend_results(self, done: int) -> None:
        """Send again the results after step `done`, which the crashed coordinator did not record."""
        lacking = [result for result in self._answered if result.step_id > done]
        under_way = len(self._under_way)
        if len(lacking) + under_way < self._last_step - done:
            raise ProtocolError(f"the result of step {done + 1} is no longer kept; the last step is {self._last_step}")
        for result in lacking:
            self._connection.send(result)

    def _launch(self, step: Step) -> None:
        """Queue a step on the device, unless its coordinator has ended: the next one sends it again."""
        runner, base = self._runner, self._pool_at.base_block
        started_ns = time.monotonic_ns()
        found = self._tables_of(step)
        if found is None:
            return
        tables, states, windows = found
        if base:
            tables, states = tables - base, None if states is None else states - base
            windows = None if windows is None else replace(windows, pages=windows.pages - base)
        runner.meter.read_ns += time.monotonic_ns() - started_ns
        step = pool_local(step, base)
        try:
            self._under_way.append((step.step_id, runner.launch(step, tables, states, windows)))
        except FatalStepError as error:
            self._connection.send(WorkerFailed(error=ErrorInfo.of(error)))
            raise
        self._last_step, self._active_ns = step.step_id, time.monotonic_ns()
        self._backoff.begin(len(self._under_way))
        if log.isEnabledFor(logging.DEBUG):
            self._log_step(step)

    def _log_step(self, step: Step) -> None:
        """Log a step: the requests that it serves, and how many tokens it computes for each."""
        self._request_of.update((start.slot, start.request_id) for start in step.begins)
        rows = zip(step.slots.tolist(), step.counts.tolist(), strict=True)
        listed = ", ".join(f"request {self._request_of.get(slot, 0)}: {count}" for slot, count in rows)
        log.debug("step %d: %d rows, %d tokens (%s)", step.step_id, step.slots.size, step.tokens.size, listed)

    def _answer(self) -> None:
        """Wait for the oldest step in flight and send its result.

        Raises:
            GpuError: The device is lost.
        """
        step_id, pending = self._under_way.popleft()
        try:
            outcome = self._runner.finish(pending)
        except FatalStepError as failure:
            self._connection.send(WorkerFailed(error=ErrorInfo.of(failure)))
            raise
        self._active_ns = time.monotonic_ns()
        self._backoff.end(len(self._under_way))
        started_ns = time.monotonic_ns()
        result = StepResult(
            step_id=step_id,
            epoch=self._pool_at.epoch,
            errors=outcome.errors,
            duration_us=outcome.duration_us,
            host_write_us=pending.host_us[0],
            host_read_us=pending.host_us[1],
            idle_us=pending.idle_us,
            slots=outcome.slots,
            tokens=outcome.tokens,
            logprobs=outcome.logprobs,
            top_counts=outcome.top_counts,
            top_tokens=outcome.top_tokens,
            top_logprobs=outcome.top_logprobs,
            prompt_logprobs=outcome.prompts.logprobs,
            prompt_ranks=outcome.prompts.ranks,
            prompt_top_counts=outcome.prompts.top_counts,
            prompt_top_tokens=outcome.prompts.top_tokens,
            prompt_top_logprobs=outcome.prompts.top_logprobs,
            draft_slots=outcome.proposals.slots,
            draft_counts=outcome.proposals.counts,
            draft_tokens=outcome.proposals.tokens,
            draft_model_rows=outcome.proposals.model_rows,
            draft_us=outcome.proposals.took_us,
            host_copied=pending.host_copied,
            host_missed=pending.host_missed,
        )
        self._answered.append(result)
        self._connection.look()
        if self._still_connected():  # a recovered coordinator requests it after the handshake
            self._connection.send(result)
        self._runner.accept_drafts()
        self._runner.meter.send_ns += time.monotonic_ns() - started_ns
        lost = [error for error in outcome.errors if error.error.code == GpuError.code]
        device = self._runner.model.device
        if lost and not device.survives():
            error = GpuError(f"{device.name} is lost: {lost[0].error.message}")
            self._connection.send(WorkerFailed(error=ErrorInfo.of(error)))
            raise error

    def _tables_of(self, step: Step) -> tuple[Int32Array, Int32Array | None, WindowTables | None] | None:
        """Read the block tables of the step's rows, and the pages of their states and windows, from shared memory.

        Ids are global. Returns None if the coordinator ended while it wrote them. A suspended one is waited for.
        """
        assert self._tables is not None
        assert self._engine is not None
        geometry, ring = self._runner.pool.geometry, self._engine.ring_blocks
        block_size, pages, each = geometry.block_size, geometry.state_blocks, geometry.window_pages
        if not step.slots.size:
            none = WindowTables(np.zeros(0, np.int64), np.zeros((0, 1, each), np.int32)) if each else None
            return np.zeros((0, 1), np.int32), np.zeros((0, pages), np.int32) if pages else None, none
        width = int(-(-int((step.starts + step.counts).max()) // block_size))
        while True:
            try:
                tables = self._tables.rows(step.slots, width)[0]
                states = self._tables.states(step.slots, pages) if pages else None
                if not each:
                    return tables, states, None
                ends = step.starts + step.counts
                first, places = ring_columns(step.starts, ends, geometry.window, block_size, ring)
                return tables, states, WindowTables(first, self._tables.state_groups(step.slots, pages, each, places))
            except DeadlineExceeded:
                self._feed()
                self._connection.look()
                if not self._same_connection():
                    return None

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


@contextmanager
def _signals_end_process() -> Iterator[None]:
    """Let a stop signal end the process at once.

    The worker may be waiting inside a library for a rank that is suspended, and it has no state to lose yet.
    """
    kept = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def pool_local(step: Step, base: int) -> Step:
    """Translate the step's block ids to those of the worker's own pool, which begins at block `base`."""
    if step.copies.size:
        local = step.copies.reshape(-1, 3) - np.array([base, base, 0], np.int32)
        step = msgspec.structs.replace(step, copies=local.reshape(-1))
    if step.zeros.size:
        step = msgspec.structs.replace(step, zeros=step.zeros - np.int32(base))
    for name in ("host_writes", "host_reads"):
        copies = getattr(step, name)
        if copies.size:
            local = copies.copy()
            local[0::COPY_NUMBERS] -= base
            step = msgspec.structs.replace(step, **{name: local})
    return step
