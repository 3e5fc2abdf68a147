"""A decode step of N sequences in several checkouts of this repository, one after the other in each round.

    python -m benchmarks.alternation now=. before=../checkout-of-an-older-commit
        [--sequences 16 256 1024 4096] [--steps 200] [--rounds 5] [--json FILE]

Each run is a process of its own, with the benchmark that its checkout has (`benchmarks.control_plane`). The order of
the checkouts is reversed in every second round. Printed are the least and the middle of the runs' medians: of the core
alone, of the whole turn, of the turn with a journal kept for the process, of the difference between the last two,
which is the journal's part, and of the write that follows the turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from .report import report

PARTS = ("core", "turn", "process", "journal", "written")
RUN = """
import inspect, json, statistics
from benchmarks import control_plane as benchmark
spent = {"core": benchmark.core(SEQUENCES, STEPS), "turn": benchmark.whole(SEQUENCES, STEPS)}
if "durability" in inspect.signature(benchmark.whole).parameters:
    spent["process"] = benchmark.whole(SEQUENCES, STEPS, durability="process")
if len(spent.get("process", ())) == 3:
    spent["written"] = spent["process"][2:]
spent = {part: each[0] if isinstance(each, tuple) else each for part, each in spent.items()}
print(json.dumps({part: statistics.median(each) for part, each in spent.items()}))
"""


def run(folder: Path, sequences: int, steps: int) -> dict[str, float]:
    """Return the median of each part in one run of a checkout, in microseconds."""
    code = RUN.replace("SEQUENCES", str(sequences)).replace("STEPS", str(steps))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    medians: dict[str, float] = json.loads(done.stdout)
    if "process" in medians:
        medians["journal"] = medians["process"] - medians["turn"]
    return medians


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alternation", description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    checkouts = {name: Path(folder).resolve() for name, folder in (each.split("=", 1) for each in options.checkouts)}
    rows: list[list[object]] = []
    results: list[dict[str, Any]] = []
    for sequences in options.sequences:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for number in range(options.rounds):
            for name in reversed(checkouts) if number % 2 else checkouts:
                found[name].append(run(checkouts[name], sequences, options.steps))
        for name, runs in found.items():
            medians = {part: [each[part] for each in runs] for part in PARTS if part in runs[0]}
            shown = {part: (min(each), statistics.median(each)) for part, each in medians.items()}
            results.append({"sequences": sequences, "checkout": name, "medians_us": medians})
            texts = (f"{shown[p][0]:.0f} / {shown[p][1]:.0f}" if p in shown else "-" for p in PARTS)
            rows.append([sequences, name, *texts])
    header = [
        "sequences",
        "checkout",
        "core, us",
        "turn, us",
        "turn with journal, us",
        "the journal's part, us",
        "written after it, us",
    ]
    report("control plane in alternation: least / middle of the runs' medians", header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
