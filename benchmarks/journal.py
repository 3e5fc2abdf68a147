"""Cost of journaling one turn before its messages are sent: an appended file, and SQLite in WAL mode.

    python -m benchmarks.journal [--records 5000] [--rows 16 256 1024] [--rounds 3] [--folder DIR] [--json FILE]

A record holds the input of a decode turn of N rows: a step result and a Turn. In alternation, in the same folder: the
coordinator's journal (`kvforge.coordinator.journal.log`), and one row with the same bytes in one transaction,
synchronous NORMAL (survives a crash of the process) and FULL (survives a crash of the host, as the journal's `durable`
does).
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvforge.coordinator.core.events import FromWorker, Turn
from kvforge.coordinator.journal.entries import pack
from kvforge.coordinator.journal.log import Journal
from kvforge.protocol import codec
from kvforge.protocol.messages import StepResult

from .report import report

WARM = 50
Writer = Callable[[StepResult, list[bytes | memoryview]], None]


def result(rows: int) -> StepResult:
    """Return a worker's result of `rows` rows."""
    slots = np.arange(rows, dtype=np.int32)
    return StepResult(step_id=1, epoch=1, slots=slots, tokens=slots + 7, logprobs=np.zeros(rows, np.float32))


def appended(folder: Path, durable: bool) -> tuple[Writer, Callable[[], None]]:
    """The coordinator's journal."""
    journal = Journal(folder, 1, durable=durable)

    def write(message: StepResult, frames: list[bytes | memoryview]) -> None:
        journal.note(FromWorker(1, message), 1, frames)
        journal.note(Turn(), 1)
        journal.commit()

    return write, journal.close


def database(folder: Path, synchronous: str) -> tuple[Writer, Callable[[], None]]:
    """SQLite, one row a turn."""
    connection = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute(f"pragma synchronous = {synchronous}")
    connection.execute("create table records (number integer primary key, payload blob)")

    def write(message: StepResult, frames: list[bytes | memoryview]) -> None:
        payload = b"".join([*pack(FromWorker(1, message), 1, frames), *pack(Turn(), 1)])
        connection.execute("begin")
        connection.execute("insert into records (payload) values (?)", (payload,))
        connection.execute("commit")

    return write, connection.close


KINDS: dict[str, Callable[[Path], tuple[Writer, Callable[[], None]]]] = {
    "file": partial(appended, durable=False),
    "SQLite NORMAL": partial(database, synchronous="normal"),
    "file, synced": partial(appended, durable=True),
    "SQLite FULL": partial(database, synchronous="full"),
}


def measure(kind: str, rows: int, records: int, folder: str | None) -> list[float]:
    """Microseconds of each record."""
    message = result(rows)
    frames = codec.encode(message)
    with tempfile.TemporaryDirectory(prefix="kvf-bench-", dir=folder) as made:
        write, close = KINDS[kind](Path(made))
        taken = []
        for _ in range(WARM + records):
            started = perf_counter_ns()
            write(message, frames)
            taken.append((perf_counter_ns() - started) / 1e3)
        close()
    return taken[WARM:]


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal", description=__doc__)
    parser.add_argument("--records", type=int, default=5000, help="per kind and round; a tenth if synced [5000]")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256, 1024], help="rows of a step [16 256 1024]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write [the temporary folder]")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    shown: list[list[object]] = []
    results: list[dict[str, Any]] = []
    for rows in options.rows:
        spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind in KINDS:
                synced = kind in ("file, synced", "SQLite FULL")
                spent[kind] += measure(kind, rows, options.records // (10 if synced else 1), options.folder)
        for kind, taken in spent.items():
            p50, p99, most = np.percentile(taken, (50, 99, 100))
            results.append({"rows": rows, "kind": kind, "p50_us": p50, "p99_us": p99, "max_us": most})
            shown.append([rows, kind, f"{p50:.1f}", f"{p99:.1f}", f"{most:.0f}"])
    header = ["rows of a step", "kind", "p50, us", "p99, us", "longest, us"]
    report("journal: one turn written", header, shown, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
