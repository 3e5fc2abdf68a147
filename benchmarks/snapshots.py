"""Cost of a snapshot: the pause of the loop, its turns meanwhile, and the time to write and read it.

    python -m benchmarks.snapshots [--blocks 131072 1500000] [--sequences 256 1000] [--json FILE]

A machine of the default size with sequences of the maximum length, and a larger one. All blocks hold indexed prompts:
half belong to decoding requests, half are cached from finished requests. The snapshot is made as a coordinator makes
it (`kvforge.coordinator.journal.state_folder`): a forked child writes it while this process continues to decode, and
the first write to each page copies the page. Then it is read, as the next process does.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvforge.coordinator.core.events import Boot, ClientCame, FromClient, FromWorker, ToWorker, Turn
from kvforge.coordinator.core.limits import Bounds, Limits, ScheduleLimits
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.journal.recovery import recover
from kvforge.coordinator.journal.state_folder import StateFolder
from kvforge.protocol.messages import SamplingParams, Step, Submit, WorkerHello, WorkerReady

from .control_plane import BLOCK_SIZE, MODEL, VOCABULARY, Answerer
from .report import report

ANSWER = 4096
SAMPLING = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
TURNS = 200  # before the snapshot


class Filled:
    """A machine with a full pool, driven without sockets."""

    def __init__(self, blocks: int, sequences: int) -> None:
        self._rows = sequences // 2
        prompt = blocks * BLOCK_SIZE // sequences - (ANSWER + BLOCK_SIZE) // 2
        width = (prompt + ANSWER) // BLOCK_SIZE + 2
        limits = Limits(
            bounds=Bounds(
                sequences_max=sequences,
                blocks_max=max(blocks, 1 << 20),
                blocks_per_sequence_max=width,
                queue_max=sequences,
            ),
            schedule=ScheduleLimits(step_rows_max=sequences, step_tokens_max=1 << 16, steps_in_flight_max=1),
        )
        self.boot, self._answerer, self._now_us = Boot("benchmark", b"key", limits), Answerer(), 0
        self.machine = Machine(self.boot, 0)
        self.machine.apply(ClientCame(2), 0)
        ready = WorkerReady(rid=2, model=MODEL, blocks=blocks, bytes_per_block=1, kv_dtype="float32", device="none")
        for message in (WorkerHello(rid=1, name="w", pid=1), ready):
            self.machine.apply(FromWorker(1, message), 0)
        draw = np.random.default_rng(0)
        for i in range(sequences):
            tokens = draw.integers(0, VOCABULARY, max(prompt, BLOCK_SIZE)).astype(np.int32)
            most = 1 if i % 2 else ANSWER
            self.machine.apply(FromClient(2, Submit(rid=i, max_tokens=most, sampling=SAMPLING, prompt=tokens), 1), 0)
        self._pending = self._steps()
        while not self.decoding:
            self.turn()

    @property
    def decoding(self) -> bool:
        """Return whether all prompts are computed."""
        step = self._pending[0]
        return step.slots.size == self._rows and int(step.counts.max()) == 1

    def turn(self) -> float:
        """One step. Returns the microseconds of its turn."""
        step = self._pending.pop(0)
        event = FromWorker(1, self._answerer.answer(step, 1))
        started = perf_counter_ns()
        self.machine.apply(event, self._now_us)
        self._pending += self._steps()
        return (perf_counter_ns() - started) / 1e3

    def _steps(self) -> list[Step]:
        self._now_us += 1000
        effects = self.machine.apply(Turn(), self._now_us).effects
        s = self.machine.cache.sequences
        for changed in (s.changed_rows, s.changed_lengths, s.changed_cells, self.machine.cache.blocks.changed):
            changed.clear()  # the shell publishes these
        return [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Step)]


def measure(blocks: int, sequences: int) -> dict[str, Any]:
    """Write and read one snapshot."""
    filled = Filled(blocks, sequences)
    machine = filled.machine
    live = len(machine.requests.live)
    gc.collect()
    gc.freeze()
    gc.disable()
    before = [filled.turn() for _ in range(TURNS)]
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        keeper = StateFolder(Path(folder), "process", 1 << 40, 1)
        journal = keeper.begin(None, lambda: False)
        journal.note(filled.boot, 0)
        journal.commit()
        began = perf_counter_ns()
        keeper.turned(machine, 10, 1, 1)  # more records than may be replayed
        during, files = [], []
        while not keeper.snapshots:
            if filled.decoding:
                during.append(filled.turn())
            keeper.turned(machine, 1, 1, 1)
        wrote_s = (perf_counter_ns() - began) / 1e9
        keeper.close(keep=True)
        files = [path.stat().st_size for path in Path(folder).glob("state-*")]
        began = perf_counter_ns()
        found = recover(Path(folder))
        read_s = (perf_counter_ns() - began) / 1e9
        assert found is not None and len(found.machine.requests.live) == live
    gc.enable()
    gc.unfreeze()
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "blocks": blocks,
        "sequences": sequences,
        "indexed": len(machine.cache.groups[0].index),
        "peak_mb": int(resident.split()[1]) / 1e3,
        "stopped_ms": keeper.longest_us / 1e3,
        "turn_before_us": float(np.median(before)),
        "turn_during_us": float(np.median(during)),
        "turn_during_longest_ms": max(during) / 1e3,
        "wrote_s": wrote_s,
        "file_mb": files[0] / 1e6,
        "read_s": read_s,
    }


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.snapshots", description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1 << 17, 1_500_000])
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1000], help="for each number of blocks")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    results = [measure(*sizes) for sizes in zip(options.blocks, options.sequences, strict=True)]
    header = ["blocks", "sequences", "indexed", "loop paused, ms", "turn before, us", "turn meanwhile, us"]
    header += ["longest, ms", "written in, s", "file, MB", "read in, s"]
    names = ("stopped_ms", "turn_before_us", "turn_during_us", "turn_during_longest_ms", "wrote_s", "file_mb", "read_s")
    rows: list[list[object]] = [
        [row["blocks"], row["sequences"], row["indexed"], *(f"{row[name]:.2f}" for name in names)] for row in results
    ]
    report("snapshots of the coordinator's state", header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
