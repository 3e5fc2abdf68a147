"""Cost of reading block tables from shared memory, beside an idle writer and beside one that never pauses.

    python -m benchmarks.shared_tables [--seconds S] [--json FILE]

One call reads 256 rows of 64 used columns with their lengths and sequence ids. The busy writer is a process of its own
that publishes one decode step after the other, as coordinator/publish.py does: the lengths of all 256 rows and one
table cell in every 16th row. Rows are read side by side and scattered. Reader and writer have a core each; with a
single core they would take turns and hardly ever meet.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvforge.protocol.layout import Geometry
from kvforge.protocol.messages import Int64Array
from kvforge.protocol.tables import TablesReader, TablesWriter

from .report import report

ROWS = 256
COLUMNS = 64
EACH = 16
GEOMETRY = Geometry(slots=1024, blocks=1 << 17, blocks_per_sequence=512, block_size=16)
WARM_CALLS = 1000


def placements() -> dict[str, Int64Array]:
    """Return the slots to read by placement, [ROWS] each."""
    scattered = np.random.default_rng(0).permutation(GEOMETRY.slots)[:ROWS]
    return {"side by side": np.arange(ROWS), "scattered": scattered}


class Steps:
    """Publishes decode steps of all rows, one after the other."""

    def __init__(self, tables: TablesWriter, slots: Int64Array) -> None:
        self._tables, self._slots = tables, slots
        self._length = np.full(GEOMETRY.slots, COLUMNS * GEOMETRY.block_size)
        self._used = np.full(GEOMETRY.slots, COLUMNS)
        self._id = np.arange(GEOMETRY.slots)
        self._cells = [(slots[first::EACH], np.full(ROWS // EACH, COLUMNS - 1)) for first in range(EACH)]
        self._blocks = np.arange(ROWS // EACH, dtype=np.int32)
        self.done = 0

    def step(self) -> None:
        """One more."""
        tables, (rows, columns) = self._tables, self._cells[self.done % EACH]
        tables.begin_rows(rows)
        tables.row_length[rows] = self._length[rows]
        tables.row_blocks[rows] = self._used[rows]
        tables.row_sequence[rows] = self._id[rows]
        tables.block_table[rows, columns] = self._blocks
        tables.end_rows(rows)
        tables.row_length[self._slots] = self._length[self._slots]
        self.done += 1


def write_steps(path: Path, slots: Int64Array, pipe: Connection) -> None:
    """The writer process: sends "ready", writes until something arrives, and sends steps and seconds."""
    pin_to_core(1)
    tables = TablesWriter(path, GEOMETRY, "benchmark")
    steps = Steps(tables, slots)
    steps.step()
    pipe.send("ready")
    started = perf_counter_ns()
    while steps.done % 64 or not pipe.poll():
        steps.step()
    pipe.send((steps.done, (perf_counter_ns() - started) / 1e9))


def pin_to_core(number: int) -> None:
    """Pin this process to one of its allowed cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


@contextmanager
def busy_writer(path: Path, slots: Int64Array) -> Iterator[Connection]:
    """A writer process at full speed, until the block ends."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=write_steps, args=(path, slots, theirs), daemon=True)
    process.start()
    whole = os.sched_getaffinity(0)
    pin_to_core(0)
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        os.sched_setaffinity(0, whole)
        process.kill()
        process.join()


def read(reader: TablesReader, slots: Int64Array, seconds: float) -> dict[str, float]:
    """Read for `seconds`; return median and p99 in microseconds, and retries per 1,000 reads."""
    times: list[int] = []
    for _ in range(WARM_CALLS):
        reader.rows(slots, COLUMNS)
    reader.retries = 0
    gc.collect()
    gc.disable()
    end = perf_counter_ns() + int(seconds * 1e9)
    started = 0
    while started < end:
        started = perf_counter_ns()
        reader.rows(slots, COLUMNS)
        times.append(perf_counter_ns() - started)
    gc.enable()
    p50, p99 = np.percentile(times, [50, 99]) / 1000
    return {"p50_us": float(p50), "p99_us": float(p99), "retries_per_1000": 1000 * reader.retries / len(times)}


def measure(slots: Int64Array, seconds: float) -> dict[str, Any]:
    """One placement of rows: the reader beside an idle writer and beside a busy one, the writer alone."""
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        path = Path(folder) / "tables"
        steps = Steps(TablesWriter(path, GEOMETRY, "benchmark"), slots)
        steps.step()
        found: dict[str, Any] = {"idle": read(TablesReader(path), slots, seconds)}
        found["step_us"] = step_us(steps, seconds)
        with busy_writer(path, slots) as pipe:
            found["busy"] = read(TablesReader(path), slots, seconds)
            pipe.send("enough")
            done, spent = pipe.recv()
        found["writer_steps_per_s"] = done / spent
    return found


def step_us(steps: Steps, seconds: float) -> float:
    """Median microseconds of publishing one step, with no reader."""
    times: list[int] = []
    end = perf_counter_ns() + int(seconds * 1e9)
    started = 0
    while started < end:
        started = perf_counter_ns()
        steps.step()
        times.append(perf_counter_ns() - started)
    return float(np.median(times)) / 1000


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_tables", description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each measurement takes")
    options = parser.parse_args()
    results = {name: measure(slots, options.seconds) for name, slots in placements().items()}
    rows: list[list[object]] = []
    for name, found in results.items():
        idle, busy = found["idle"], found["busy"]
        figures = (idle["p50_us"], idle["p99_us"], busy["p50_us"], busy["p99_us"], busy["retries_per_1000"])
        rows.append([name, *(f"{n:.1f}" for n in (*figures, found["step_us"])), f"{found['writer_steps_per_s']:.0f}"])
    header = ["rows", "idle p50, us", "p99", "busy p50, us", "p99", "retries/1,000", "a step alone, us", "steps/s"]
    report(f"shared tables: {ROWS} rows of {COLUMNS} columns", header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
