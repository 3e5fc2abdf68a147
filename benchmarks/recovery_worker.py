"""A worker without a model, for `benchmarks.recovery`: it reconnects to a coordinator as a real one does.

    python -m benchmarks.recovery_worker RUNTIME BLOCKS STEP_MS STEPS

Each token is the time of its computation, in milliseconds. Once the file STEPS exists, a decode step takes STEP_MS, and
the worker writes the Unix time of the first step of each connection to the file.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from kvforge.protocol import token
from kvforge.protocol.messages import (
    ModelInfo,
    PoolRegistered,
    Step,
    StepResult,
    Stop,
    WorkerHello,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.transport import worker_endpoint
from kvforge.worker.step.connection import CoordinatorConnection

KEPT = 16  # results
VOCABULARY = 1 << 30
WAIT_MS = 1000
MODEL = ModelInfo(
    name="m", source="", architecture="any", fingerprint="1", vocab_size=VOCABULARY, context_tokens_max=1 << 20
)


def now_ms() -> int:
    """Return the time on time.monotonic as a token."""
    return int(time.monotonic() * 1000) % VOCABULARY


def age_s(token_id: int) -> float:
    """Return the age of a token in seconds."""
    return (now_ms() - token_id) % VOCABULARY / 1e3


class Worker:
    """A worker with the connection state of a real one."""

    def __init__(self, runtime: Path, blocks: int, step_s: float, steps: Path) -> None:
        self._runtime, self._blocks, self._step_s, self._steps = runtime, blocks, step_s, steps
        self._read_wakeup, self._write_wakeup = os.pipe()
        self._connection = CoordinatorConnection(worker_endpoint(runtime), self._read_wakeup)
        self._boot, self._epoch, self._done = "", 0, 0
        self._answered: deque[StepResult] = deque(maxlen=KEPT)

    def run(self) -> int:
        """Serve until the coordinator sends a stop."""
        while True:
            self._connection.wait_connected(60)
            self._connection.discard()
            self._connection.send(
                WorkerHello(
                    rid=1,
                    name="w",
                    pid=os.getpid(),
                    boot=self._boot,
                    epoch=self._epoch,
                    token=token.read(self._runtime),
                )
            )
            self._first = True
            while self._connection.connected:
                message = self._connection.receive(WAIT_MS)
                if isinstance(message, Stop):
                    return 0
                if isinstance(message, WorkerWelcome):
                    self._welcomed(message)
                elif isinstance(message, PoolRegistered):
                    self._epoch = message.epoch
                    for result in self._answered:
                        if result.step_id > message.done:
                            self._connection.send(result)
                elif isinstance(message, Step) and message.step_id > self._done:
                    self._step(message)

    def _welcomed(self, message: WorkerWelcome) -> None:
        if message.epoch == self._epoch and message.boot == self._boot:
            return
        self._done, self._boot = 0, message.boot
        self._answered.clear()
        ready = WorkerReady(
            rid=2, model=MODEL, blocks=self._blocks, bytes_per_block=1, kv_dtype="float32", device="none"
        )
        self._connection.send(ready)

    def _step(self, message: Step) -> None:
        slow = self._steps.exists()
        if slow and self._first:
            self._first = False
            with self._steps.open("a") as file:
                file.write(f"{time.time()}\n")
        if slow and message.counts.size and message.counts.max() == 1:
            time.sleep(self._step_s)
        self._done = message.step_id
        slots = message.slots[message.samples != 0]
        self._answered.append(
            StepResult(
                step_id=message.step_id,
                epoch=self._epoch,
                slots=slots,
                tokens=np.full(slots.size, now_ms(), np.int32),
                logprobs=np.zeros(slots.size, np.float32),
            )
        )
        self._connection.send(self._answered[-1])


if __name__ == "__main__":
    runtime, blocks, step_ms, steps = sys.argv[1:]
    sys.exit(Worker(Path(runtime), int(blocks), float(step_ms) / 1e3, Path(steps)).run())
