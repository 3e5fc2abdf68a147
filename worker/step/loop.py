"""The worker's life: connect, load, register the pool, run steps, leave.

One thread. While a model loads, ZeroMQ's own thread answers heartbeats. When the coordinator goes away the model
stays loaded, steps under way go on, and what they give is kept: the next process goes on with it where it knows the
pool, else the worker registers again.

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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np

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
    ErrorInfo,
    Int32Array,
    Meeting,
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
from kvforge.protocol.notify import Watchdog, notify, working
from kvforge.protocol.steady_clock import monotonic
from kvforge.protocol.tables import TablesReader
from worker.config import WorkerConfig
from worker.cores import Cores, Place

from .engine import Engine
from .link import Link
from .patience import Patience
from .runner import STEPS_UNDER_WAY_MAX, OutOfStep, PendingStep, Runner

REPLY_WAIT_S = 10.0
TABLES_GONE_S = 1.0  # for the end of a connection to be heard of, after the tables of who was there are gone
IDLE_WAIT_MS = 1000
ANSWERS_KEPT = 16  # results, each of which may not have reached the coordinator: as many as steps may be under way
NO_POOL = PoolRegistered(rid=0, epoch=0, base_block=0)
PROGRESS_EVERY_S = 0.2
# Between two words of a model that loads: kernels are compiled without one, on a slow machine for minutes.
LOADING_S_MAX = 900.0
IDLE_NS = 900_000_000
REPORT_STEPS_MIN = 100  # shorter bursts are not worth a line in the log
log = logging.getLogger("worker")


class Worker:
    """One worker process."""

    def __init__(self, config: WorkerConfig, cores: Cores, place: Place) -> None:
        """Connects lazily. cores: its share when it started; place: among those with whom it shares.

        Raises InvalidConfiguration.
        """
        self.config, self._cores, self._place = config, cores, place
        endpoint, proof = config.coordinator()
        self._stopping = False
        self._read_wakeup, self._write_wakeup = sockets.socketpair()
        self._catch_signals()
        self._link = Link(endpoint, self._read_wakeup.fileno(), proof)
        self._rid = 0
        self._engine: Engine | None = None
        self._request_of: dict[int, int] = {}  # by slot; kept only where steps are logged
        self._under_way: deque[tuple[int, PendingStep]] = deque()
        self._answered: deque[StepResult] = deque(maxlen=ANSWERS_KEPT)  # of this registration
        self._last_step = 0  # that was launched under it
        self._patience = Patience()
        self._watchdog = Watchdog()
        self._tables: TablesReader | None = None
        self._pool_at, self._boot = NO_POOL, ""
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
                    if welcome.epoch:
                        registered = self._come_back(welcome)
                    else:
                        registered = self._prepare(welcome) and self._register()
                except KvforgeError as error:
                    self._link.send(WorkerFailed(error=ErrorInfo.of(error)))
                    raise
                if registered:
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
        working("waiting for a coordinator", self.config.coordinator_wait_s + REPLY_WAIT_S)
        self._link.wait_connected(self.config.coordinator_wait_s)
        if not self._link.connected:
            return None
        self._connection = self._link.connections
        self._link.discard()
        hello = WorkerHello(
            rid=self._next_rid(),
            name=self.config.name,
            pid=os.getpid(),
            boot=self._boot,
            epoch=self._pool_at.epoch,
            watches=self._watches,
            token=token.read(self.config.runtime_path),  # another one after each start of the coordinator
            rank=self.config.rank,
            ranks=self.config.ranks,
        )
        reply = self._ask(hello)
        return reply if isinstance(reply, WorkerWelcome) else None

    def _ask(self, message: Message) -> Message | None:
        """Sends a command and waits for its reply. None where the connection ended or we are to stop."""
        return self._next_reply() if self._link.send(message) else None

    def _next_reply(self) -> Message | None:
        deadline = monotonic() + REPLY_WAIT_S
        while monotonic() < deadline and self._same_connection():
            self._feed()
            reply = self._link.receive(100)
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
        return self._link.connected and self._link.connections == self._connection

    def _next_rid(self) -> int:
        self._rid += 1
        return self._rid

    # -------------------------------------------------------------------------------------------------------- loading

    def _prepare(self, welcome: WorkerWelcome) -> bool:
        """Loads the model once, makes the pool once, maps this coordinator's tables. False where it went away
        meanwhile."""
        self._under_way.clear()
        self._answered.clear()
        self._last_step, self._pool_at = 0, NO_POOL
        if self._engine is None:
            meeting = self._wait_for_ranks() if self.config.ranks > 1 else ""
            if meeting is None:
                return False
            working(f"loading {self.config.model}", LOADING_S_MAX)
            cores = replace(self._cores, others=self._place.others())  # others may have started meanwhile
            with _ending_at_once() if meeting else nullcontext():
                self._engine = Engine(self.config, welcome, self._report_progress, cores, meeting)
            if not self._engine.device.computes_on_cores:
                self._place.close()
        elif self.config.ranks > 1:
            # Another one may stand in the middle of a step that this one will never get.
            raise WorkerError(
                f"rank {self.config.rank} of {self.config.ranks}: the coordinator knows nothing of this worker's pool, "
                "and ranks begin anew together"
            )
        else:
            self._engine.adopt(welcome)
        return self._map_tables(welcome)

    def _wait_for_ranks(self) -> str | None:
        """Where the ranks of this worker meet, once all are there, however long that takes. None where the connection
        ended or we are to stop."""
        log.info("rank %d of %d: waiting for the others", self.config.rank, self.config.ranks)
        while self._same_connection():
            working("waiting for the other ranks", LOADING_S_MAX)
            message = self._link.receive(IDLE_WAIT_MS)
            if isinstance(message, Meeting):
                return message.name
            if isinstance(message, Refused):
                raise restore(message.error.code, message.error.message, message.error.fields)
            self._stopping |= isinstance(message, Stop)
        return None

    def _map_tables(self, welcome: WorkerWelcome) -> bool:
        """False where the coordinator that named them went away, and its tables with it.

        Raises Unavailable where it is there and they are not, ProtocolError where they are none of its own.
        """
        try:
            self._tables, self._boot = TablesReader(Path(welcome.tables_path), welcome.boot), welcome.boot
        except (OSError, ProtocolError) as error:
            deadline = monotonic() + TABLES_GONE_S
            while self._same_connection() and monotonic() < deadline:
                self._link.receive(100)
            if not self._same_connection():
                return False
            if isinstance(error, ProtocolError):
                raise
            raise Unavailable(f"the tables {welcome.tables_path} cannot be read here: {error.strerror}") from None
        return True

    @property
    def _watches(self) -> bool:
        return self.config.watched_us > 0 and self.config.ranks == 1

    def _come_back(self, welcome: WorkerWelcome) -> bool:
        """The coordinator's process is another one and knows the pool: what is in it counts, and steps under way go on.
        False where the connection ended meanwhile."""
        if not self._map_tables(welcome):
            return False
        self._link.watch(None, 0)
        reply = self._next_reply()
        if not isinstance(reply, PoolRegistered):
            return False
        self._go_on_at(reply)
        self._answer_again(reply.done)
        log.info("the coordinator is back: going on after step %d", self._last_step)
        return True

    def _report_progress(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_EVERY_S and fraction < 1:
            return
        self._progress_at = now
        working(f"{phase} {100 * fraction:.0f} %", LOADING_S_MAX)
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
            watches=self._watches,
            device_bytes=self._engine.device_bytes().by_purpose(),
            kernels=self._engine.kernels(),
            zeroes=True,
            wants_kinds=model.wants_kinds,
        )
        self._link.watch(None, 0)
        reply = self._ask(ready)
        if not isinstance(reply, PoolRegistered):
            return False
        self._go_on_at(reply)
        notify("READY=1", f"STATUS=serving {model.info.name}, {pool.blocks} blocks")
        log.info("registered: blocks %d to %d", reply.base_block, reply.base_block + pool.blocks - 1)
        return True

    def _go_on_at(self, place: PoolRegistered) -> None:
        if self._watches:
            assert self._tables is not None
            self._link.watch(self._tables.watch(place.pool, place.epoch), self.config.watched_us)
        self._pool_at = place

    # -------------------------------------------------------------------------------------------------------- serving

    def _serve(self) -> None:
        """Runs steps in the order in which they come, until told to stop or the coordinator is gone."""
        while self._same_connection():
            self._feed()
            message = self._link.receive(self._wait_ms())
            if isinstance(message, Step):
                self._take(message)
            elif isinstance(message, Stop):
                log.info("told to stop: %s", message.reason)
                self._stopping = True
            elif isinstance(message, Refused):
                raise restore(message.error.code, message.error.message, message.error.fields)
            while self._under_way and self._under_way[0][1].done():
                self._answer()
        while self._stopping and self._link.connected and self._under_way:
            self._answer()  # it finishes what it was sent
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
        if meter.steps and time.monotonic_ns() - meter.last_ns > IDLE_NS:
            if meter.steps >= REPORT_STEPS_MIN:
                log.info("%s", meter.line())
            meter.reset()
            assert self._engine is not None
            self._engine.rest()
        return IDLE_WAIT_MS

    def _feed(self) -> None:
        self._watchdog.feed(time.monotonic_ns() // 1000)

    def _take(self, step: Step) -> None:
        """Does a step, unless it came before: a coordinator whose process is another one sends anew what is due."""
        if step.step_id > self._last_step:
            if len(self._under_way) == STEPS_UNDER_WAY_MAX:
                self._answer()
            self._launch(step)

    def _answer_again(self, done: int) -> None:
        """Sends the results that the process before did not write down: those after step `done`."""
        lacking = [result for result in self._answered if result.step_id > done]
        under_way = len(self._under_way)
        if len(lacking) + under_way < self._last_step - done:
            raise ProtocolError(
                f"the result of step {done + 1} is not kept any more, the last step is {self._last_step}"
            )
        for result in lacking:
            self._link.send(result)

    def _launch(self, step: Step) -> None:
        """Queues a step on the device, unless its coordinator has ended: the next one sends it again."""
        runner, base = self._runner, self._pool_at.base_block
        started_ns = time.monotonic_ns()
        tables = self._tables_of(step)
        if tables is None:
            return
        if base:
            tables = tables - base
        runner.meter.read_ns += time.monotonic_ns() - started_ns
        step = pool_local(step, base)
        try:
            self._under_way.append((step.step_id, runner.launch(step, tables)))
        except OutOfStep as error:
            self._link.send(WorkerFailed(error=ErrorInfo.of(error)))
            raise
        self._last_step = step.step_id
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
        outcome = self._runner.finish(pending)
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
        self._answered.append(result)
        self._link.look()
        if self._still_connected():  # another process of the coordinator asks for it when it knows us
            self._link.send(result)
        self._runner.meter.send_ns += time.monotonic_ns() - started_ns
        lost = [error for error in outcome.errors if error.error.code == GpuError.code]
        device = self._runner.model.device
        if lost and not device.survives():
            error = GpuError(f"{device.name} is lost: {lost[0].error.message}")
            self._link.send(WorkerFailed(error=ErrorInfo.of(error)))
            raise error

    def _tables_of(self, step: Step) -> Int32Array | None:
        """The block tables of the step's rows, global ids, from shared memory.

        None where the coordinator ended while it wrote them. One that was stopped there is waited for.
        """
        assert self._tables is not None
        if not step.slots.size:
            return np.zeros((0, 1), np.int32)
        block_size = self._runner.pool.block_size
        width = int(-(-int((step.starts + step.counts).max()) // block_size))
        while True:
            try:
                return self._tables.rows(step.slots, width)[0]
            except DeadlineExceeded:
                self._feed()
                self._link.look()
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
def _ending_at_once() -> Iterator[None]:
    """A signal to stop ends the process: it may be waiting, in a library, for a rank that is stopped itself and will
    not come. There is nothing yet that would be lost."""
    kept = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def pool_local(step: Step, base: int) -> Step:
    """The step with ids of the worker's own pool, which begins at block `base`."""
    if step.copies.size:
        local = step.copies.reshape(-1, 3) - np.array([base, base, 0], np.int32)
        step = msgspec.structs.replace(step, copies=local.reshape(-1))
    if step.zeros.size:
        step = msgspec.structs.replace(step, zeros=step.zeros - np.int32(base))
    return step
