"""The coordinator's turn between two steps with drafts: microseconds from a result to the next step, by parts.

    python -m benchmarks.draft_turns [--task edit] [--batch 16] [--drafts 16] [--rounds 5] [--json FILE]

A step with drafts is in flight alone, so the device waits for this turn. The turn loop, its sockets and its journal are
the real ones, with one client and one worker in this process; the worker replays the answers of a task and proposes by
lookup, as in `benchmarks.drafts_replay`. Each round runs all requests of the task together, with drafts and without.
Counted are the results of steps without prompt tokens. Parts of a turn:

| part | what it is |
|---|---|
| apply | the machine applies the result |
| plan | the machine plans the next step |
| rest | what else comes before the next step is sent: receive and decode, journal, tables, encode, send |
| behind | what follows the next step: the streams of clients |

Medians, and of the time to the step sent the quickest tenth too, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from kvforge.coordinator.core.events import Applied, Event, FromWorker, Turn
from kvforge.protocol import codec
from kvforge.protocol.messages import (
    WORKER_REPLIES,
    Hello,
    PoolRegistered,
    SamplingParams,
    Step,
    StepResult,
    Submit,
    WorkerHello,
    WorkerReady,
)
from tests.coordinator.driver import model_info
from tools.simulation.limits import make_limits

from .control_plane import Shell
from .drafts_replay import CONTEXT_BLOCKS, VOCABULARY, Replayer, settings
from .drafts_tasks import TASKS, Task, make
from .report import report

PARTS = ("apply", "plan", "rest", "behind")
STEP_US, ROW_US = 4000, 30  # what a step takes, by the clock of the core
WARM_ROUNDS = 1  # prompts are cached, and chances and costs are known


class Clocks:
    """The times of the parts of a turn.

    Attributes:
        parts: Nanoseconds of each part of the last turn.
        messages: How many it sent to the worker.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._sent_ns = self.messages = 0
        self.parts: dict[str, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Observe the machine, and when steps are sent."""
        apply, send = self._shell.machine.apply, self._shell.workers.send

        def observed(event: Event, now_us: int) -> Applied:
            started = perf_counter_ns()
            applied = apply(event, now_us)
            took = perf_counter_ns() - started
            part = "plan" if isinstance(event, Turn) else "apply" if isinstance(event, FromWorker) else ""
            self.parts[part] = self.parts.get(part, 0) + took
            return applied

        def noted(*arguments: Any) -> Any:
            sent = send(*arguments)
            self._sent_ns = perf_counter_ns()
            self.messages += 1
            return sent

        with patch.object(self._shell.machine, "apply", observed), patch.object(self._shell.workers, "send", noted):
            yield

    def turn(self, now_us: int) -> None:
        """Run one turn."""
        self.parts, self._sent_ns, self.messages = {}, 0, 0
        started = perf_counter_ns()
        self._shell.loop.turn(now_us)
        ended = perf_counter_ns()
        if self.messages:
            until = self._sent_ns - started
            self.parts |= {"rest": until - sum(self.parts.values()), "behind": ended - self._sent_ns, "sent": until}


class World:
    """A coordinator's turn loop, with a client and a worker that replays a task.

    Args:
        folder: For the tables, the sockets and the journal.
        task: The requests.
        drafts: The most drafts of a row; 0: none.
    """

    def __init__(self, folder: Path, task: Task, drafts: int) -> None:
        count = len(task.prompts)
        limits = make_limits(**settings(2 * count * CONTEXT_BLOCKS, drafts))
        self._task, self._shell = task, Shell(folder, limits, "process")
        self._clocks, self._decoder = Clocks(self._shell), codec.Decoder(WORKER_REPLIES)
        blocks, model = limits.bounds.blocks_max, model_info(vocabulary=VOCABULARY)
        self._worker = Replayer(self._shell.machine, 1, "w", blocks, model)
        ready = WorkerReady(
            rid=2, model=model, blocks=blocks, bytes_per_block=1, kv_dtype="float32", device="none", drafts=drafts
        )
        for message in (WorkerHello(rid=1, name="w", pid=1), ready):
            self._shell.worker.send_multipart(codec.encode(message))
        self._shell.client.send_multipart(codec.encode(Hello(rid=1)))
        for prompt, answer in zip(task.prompts, task.answers, strict=True):
            self._worker.record(prompt, answer)
        self._inbox: list[Step] = []
        while self._worker.epoch < 0:
            self._turn()

    def close(self) -> None:
        """Close the sockets and files."""
        self._shell.close()

    def run(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Run the requests together. Yield each decode turn: the drafts of the step that ended, and the parts."""
        sampling = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
        for number, (prompt, answer) in enumerate(zip(self._task.prompts, self._task.answers, strict=True)):
            tokens = np.array(prompt, np.int32)
            submit = Submit(rid=3 + number, prompt=tokens, max_tokens=len(answer), sampling=sampling)
            self._shell.client.send_multipart(codec.encode(submit))
        requests = self._shell.machine.requests
        while not requests.live:
            self._turn()
        while requests.live:
            while not self._inbox:
                self._turn()
            step = self._inbox.pop(0)
            drafts = int(step.drafts.sum())
            took_us = STEP_US + ROW_US * (step.slots.size + drafts)
            result = msgspec.structs.replace(self._worker.execute(step), duration_us=took_us)
            assert isinstance(result, StepResult)
            self._shell.now_us += took_us
            self._shell.worker.send_multipart(codec.encode(result))
            before = self._shell.steps_settled
            while self._shell.steps_settled == before:
                followed = self._turn()
            if followed and step.counts.sum() == step.slots.size + drafts:
                yield drafts, self._clocks.parts
        while self._shell.client.poll(0):
            self._shell.client.recv_multipart()

    def _turn(self) -> bool:
        """Run a turn when a message or a timer is due. Return whether a step was sent in it."""
        shell = self._shell
        shell.waiting(0.001)
        shell.now_us += 10
        with self._clocks.running():
            self._clocks.turn(shell.now_us)
        if shell.journal is not None:
            shell.journal.flush()
        steps = len(self._inbox)
        for _ in range(self._clocks.messages):
            message = self._decoder.decode(shell.receive_as_worker())
            if isinstance(message, PoolRegistered):
                self._worker.epoch = message.epoch
            elif isinstance(message, Step):
                self._inbox.append(message)
        return len(self._inbox) > steps


def measure(task: Task, drafts: int, rounds: int) -> list[dict[str, float]]:
    """Return microseconds of the parts of each turn: with drafts those of steps with drafts, otherwise of all."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        world = World(Path(folder), task, drafts)
        try:
            for number in range(WARM_ROUNDS + rounds):
                gc.collect()
                turns = [parts for count, parts in world.run() if bool(count) == bool(drafts)]
                if number >= WARM_ROUNDS:
                    found += [{part: ns / 1e3 for part, ns in parts.items()} for parts in turns]
        finally:
            world.close()
    return found


def summary(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part, of the time to the step sent, and the quickest tenth of the latter."""
    medians = {part: float(np.median([turn.get(part, 0.0) for turn in turns])) for part in (*PARTS, "sent")}
    return medians | {"sent_p10": float(np.percentile([turn["sent"] for turn in turns], 10)), "turns": len(turns)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS[:-1], default="edit")
    parser.add_argument("--batch", type=int, default=16, help="requests that run together [16]")
    parser.add_argument("--drafts", type=int, default=16, help="schedule.drafts_max [16]")
    parser.add_argument("--tokens", type=int, default=256, help="the most of an answer")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt, about")
    parser.add_argument("--rounds", type=int, default=5, help="how often all requests run [5]")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    gc.disable()
    task = make(options.task, options.batch, options.prompt, options.tokens)
    rows: list[list[object]] = []
    results: dict[str, dict[str, float]] = {}
    for name, drafts in (("with drafts", options.drafts), ("without", 0)):
        found = results[name] = summary(measure(task, drafts, options.rounds))
        rows.append([name, int(found["turns"]), *(f"{found[part]:.0f}" for part in (*PARTS, "sent", "sent_p10"))])
    header = ["turns", "count", *(f"{part}, us" for part in PARTS), "to the step sent, us", "quickest tenth"]
    title = f"turns between steps, {options.batch} requests of {options.task!r}, medians"
    report(title, header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
