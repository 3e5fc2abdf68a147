"""A simulated worker: it speaks the worker protocol and answers each step after the time that a table gives.

    python -m kvforge.loadtest.fleet.worker --config FILE.toml

Steps run one after the other, as on a device. There is no KV cache, so block tables, copies and zeroing are ignored.
Otherwise it behaves like a real worker: it reconnects to a restarted coordinator with its results, and is replaced when
it dies.

The exit status is one of `protocol.exits`; a supervisor restarts the worker after 1 and 4.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import numpy as np

from kvforge.protocol import logs, token
from kvforge.protocol.configuration import expand, load
from kvforge.protocol.errors import CoordinatorUnavailable, KvforgeError, restore
from kvforge.protocol.exits import OK, TIMED_OUT, status_of
from kvforge.protocol.messages import (
    NO_FLOAT32,
    Message,
    ModelInfo,
    PoolRegistered,
    Refused,
    Step,
    StepResult,
    Stop,
    WorkerHello,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.transport import worker_endpoint

from . import step_times
from .connection import WorkerConnection
from .tokens import Tokens

COORDINATOR_WAIT_S = 60.0
ANSWERS_KEPT = 16  # results that may not have reached the coordinator
LATE_S = 60e-6  # the typical lateness of a wait; shorter waits are skipped
IDLE_S = 1.0
log = logging.getLogger("worker")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of a simulated worker.

    Attributes:
        name: Its name.
        runtime_dir: The runtime directory of the coordinator.
        table: A name or a file, as for `step_times.load`.
        blocks: KV blocks; 0 for as many as the table's memory holds.
        time_scale: The factor of the step times; 0 for instant steps.
        kinds: Distinguish prompts and generated tokens, as batch-invariant workers on a GPU do.
        log_level: The log level.
        log_format: text or json.
    """

    name: str
    runtime_dir: str
    table: str
    blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    time_scale: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    kinds: bool = False
    log_level: str = "info"
    log_format: str = "text"


class Worker:
    """The state of a simulated worker: its registration, and the running steps with their ends."""

    def __init__(self, config: Config, table: step_times.StepTimes) -> None:
        self._config, self._table, self._runtime = config, table, expand(config.runtime_dir)
        self._read_wakeup, self._write_wakeup = socket.socketpair()
        self._write_wakeup.setblocking(False)
        signal.set_wakeup_fd(self._write_wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._link = WorkerConnection(worker_endpoint(self._runtime), self._read_wakeup.fileno())
        self._stopping = self._leaving = False
        self._boot, self._epoch, self._last_step, self._registered = "", 0, 0, False
        self._free_at = 0.0  # when the device becomes idle; 0: it has done no step
        self._under_way: deque[tuple[float, StepResult]] = deque()
        self._answered: deque[StepResult] = deque(maxlen=ANSWERS_KEPT)

    def run(self) -> None:
        """Serve until a signal or a stop message. Raises KvforgeError if that is impossible."""
        try:
            while not self._stopping and self._link.connect(COORDINATOR_WAIT_S):
                self._hello()
                while self._link.connected and not self._stopping:
                    message = self._link.receive(self._wait_s())
                    if message is not None:
                        self._handle(message)
                    self._answer()
                    self._stopping |= self._leaving and not self._under_way
        finally:
            self._link.close(goodbye=self._stopping)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _hello(self) -> None:
        self._registered = False
        proof = token.read(self._runtime)
        self._link.send(
            WorkerHello(rid=1, name=self._config.name, pid=os.getpid(), boot=self._boot, epoch=self._epoch, token=proof)
        )

    def _handle(self, message: Message) -> None:
        if isinstance(message, Step):
            if message.step_id > self._last_step:  # otherwise the previous coordinator already sent it
                self._begin(message)
        elif isinstance(message, WorkerWelcome):
            if not (message.epoch and message.epoch == self._epoch and message.boot == self._boot):
                self._register(message)
        elif isinstance(message, PoolRegistered):
            self._epoch, self._registered = message.epoch, True
            for result in self._answered:
                if result.step_id > message.done:
                    self._link.send(result)
            log.info("registered: first block %d, last completed step %d", message.base_block, message.done)
        elif isinstance(message, Refused):
            raise restore(message.error.code, message.error.message, message.error.fields)
        elif isinstance(message, Stop):
            self._leaving = True

    def _register(self, welcome: WorkerWelcome) -> None:
        """Discard the old state and register with the coordinator."""
        self._last_step, self._boot, self._epoch = 0, welcome.boot, 0
        self._free_at = 0.0
        self._under_way.clear()
        self._answered.clear()
        table, size = self._table, welcome.block_size
        self._tokens = Tokens(welcome.slots_max, table.vocabulary)
        model = ModelInfo(
            name=table.name,
            source="",
            architecture="none",
            fingerprint=f"no-model {table.name}",
            vocab_size=table.vocabulary,
            context_tokens_max=min(table.context_tokens_max, size * welcome.blocks_per_sequence_max),
        )
        blocks, bytes_per_block = self._config.blocks or table.blocks(size), table.kv_bytes_per_token * size
        ready = WorkerReady(
            rid=2,
            model=model,
            blocks=blocks,
            bytes_per_block=bytes_per_block,
            kv_dtype="bfloat16",
            device_bytes={"weights": table.weight_bytes, "pool": blocks * bytes_per_block},
            device=f"none: a table, {table.source}",
            zeroes=True,
            wants_kinds=self._config.kinds,
        )
        self._link.send(ready)

    def _begin(self, step: Step) -> None:
        """Schedule the step behind the previous one. Its result is computed at once."""
        slots, tokens = self._tokens.of(step)
        takes_s = self._config.time_scale * self._table.step_s(step.starts, step.counts)
        now = time.monotonic()
        idle_us = round(max(0.0, now - self._free_at) * 1e6) if self._free_at else -1
        self._free_at = max(self._free_at, now) + takes_s
        self._last_step = step.step_id
        result = StepResult(
            step_id=step.step_id,
            epoch=self._epoch,
            errors=self._tokens.refused(step),
            duration_us=round(takes_s * 1e6),
            idle_us=idle_us,
            slots=slots,
            tokens=tokens,
            logprobs=np.zeros(slots.size, np.float32) if slots.size else NO_FLOAT32,
        )
        self._under_way.append((self._free_at, result))

    def _wait_s(self) -> float:
        if not (self._under_way and self._registered):
            return IDLE_S
        left_s = self._under_way[0][0] - time.monotonic()
        return left_s if left_s > LATE_S else 0.0

    def _answer(self) -> None:
        """Send the results of completed steps."""
        while self._registered and self._under_way and not self._wait_s():
            result = self._under_way.popleft()[1]
            self._answered.append(result)
            self._link.send(result)  # it is sent again after a reconnect


def main(arguments: list[str] | None = None) -> int:
    """Run a worker and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvforge.loadtest.fleet.worker")
    parser.add_argument("--config", type=Path, required=True, help="TOML file")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config, Config)
        logs.configure(config.name, config.log_level, config.log_format)
        worker = Worker(config, step_times.load(config.table))
        gc.freeze()
        worker.run()
    except KvforgeError as error:
        print(f"worker: {error}", file=sys.stderr)
        return TIMED_OUT if isinstance(error, CoordinatorUnavailable) else status_of(error)
    return OK


if __name__ == "__main__":
    sys.exit(main())
