"""Latency of a step from coordinator to worker, by message and through shared memory.

    python -m benchmarks.handover [--steps 3000] [--json FILE]

Two processes with half of the cores each, and a decode step of 64 rows. The coordinator's side encodes it and sends it
as a turn does; the worker's side is the worker's own connection, `kvforge.worker.step.connection`. Measured on the
clock that both share: from before the step is encoded to after it is decoded. A pause between two steps lets a sleeping
worker fall asleep. Also measured: the coordinator's time for a step, with and without putting it into shared memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import zmq

from kvforge.protocol import codec
from kvforge.protocol.layout import Geometry
from kvforge.protocol.messages import Step, WorkerHello
from kvforge.protocol.tables import TablesReader, TablesWriter
from kvforge.protocol.transport import worker_endpoint
from kvforge.worker.step.connection import CoordinatorConnection
from tests.router import router

from .report import report

ROWS = 64
PAUSE_NS = 300_000
GEOMETRY = Geometry(slots=256, blocks=4096, blocks_per_sequence=64, block_size=16)


def work(folder: str, looks: bool, steps: int, pipe: Connection, cores: set[int]) -> None:
    """Run the worker's process; send the arrival time of each step in nanoseconds."""
    os.sched_setaffinity(0, cores)
    read, _write = os.pipe()
    link = CoordinatorConnection(worker_endpoint(Path(folder)), read)
    link.wait_connected(30)
    link.send(WorkerHello(rid=1, name="w", pid=os.getpid()))
    if looks:
        link.watch(TablesReader(Path(folder) / "t").watch(0, 1), 10 * PAUSE_NS // 1000)
    times = np.zeros(steps, np.int64)
    pipe.send("ready")
    done = 0
    while done < steps:
        message = link.receive(1000)
        if isinstance(message, Step):
            times[done] = perf_counter_ns()
            done += 1
    pipe.send(times)
    link.close(goodbye=False)


def hand_over(looks: bool, steps: int, ours_at: set[int], theirs_at: set[int]) -> tuple[float, float, float]:
    """Return the microseconds until the worker has a step, median and p99, and the coordinator's time for it, median.

    ours_at, theirs_at: the cores of this process and of the worker's.
    """
    os.sched_setaffinity(0, ours_at)
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = router(context)
        socket.bind(worker_endpoint(Path(folder)))
        tables = TablesWriter(Path(folder) / "t", GEOMETRY, "benchmark")
        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.Process(target=work, args=(folder, looks, steps, theirs, theirs_at), daemon=True)
        worker.start()
        identity = socket.recv_multipart()[0]
        assert ours.recv() == "ready"
        rows = np.arange(ROWS, dtype=np.int32)
        sent, spent = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
        for number in range(1, steps + 1):
            until = perf_counter_ns() + PAUSE_NS
            while perf_counter_ns() < until:
                pass
            sent[number - 1] = perf_counter_ns()
            step = Step(step_id=number, slots=rows, starts=rows, counts=rows, samples=rows, tokens=rows)
            frames = codec.encode(step)
            if looks:
                tables.step_ring.put(0, 1, number, frames)
            socket.send_multipart([identity, *frames])
            spent[number - 1] = perf_counter_ns() - sent[number - 1]
        taken = (ours.recv() - sent) / 1e3
        worker.join(10)
        socket.close(0)
        context.term()
        tables.close()
    return float(np.median(taken)), float(np.percentile(taken, 99)), float(np.median(spent)) / 1e3


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handover", description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each measurement")
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    whole = sorted(os.sched_getaffinity(0))
    half = max(1, len(whole) // 2)
    rows: list[list[object]] = []
    found: dict[str, float] = {}
    for name, key, looks in (("message, asleep", "message", False), ("shared memory, looking", "shared", True)):
        median, p99, spent = hand_over(looks, options.steps, set(whole[:half]), set(whole[half:] or whole))
        os.sched_setaffinity(0, whole)
        found |= {f"{key}_p50_us": median, f"{key}_p99_us": p99, f"{key}_coordinator_us": spent}
        rows.append([name, f"{median:.1f}", f"{p99:.1f}", f"{spent:.1f}"])
    headers = ["way", "until the worker has it, us", "p99", "the coordinator spends, us"]
    report(f"handing over a step of {ROWS} rows", headers, rows, found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
