"""Decode steps of a few rows on a CPU, with our kernel for the products of up to three and with oneDNN's for all.

    python -m benchmarks.cpu_few_rows [--rows 1,2,3,4] [--threads 1] [--rounds 9] [--json FILE]

The forward pass alone of SmolLM2-135M's shape (30 layers of 576, a head of 49,152), random weights, float32, behind 100
tokens. The model is loaded twice; both in turn, in one process; milliseconds by the clock, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import torch

from benchmarks.cpu_determinism import loaded, pass_ms
from benchmarks.report import report
from worker.attention.pool import KvPool
from worker.kernels.few_rows import Giver

FIELDS: dict[str, object] = {"vocab_size": 49152, "num_hidden_layers": 30, "tie_word_embeddings": True}
BEFORE, PASSES = 100, 4
HOWS = ("oneDNN", "few rows")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,3,4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {"few rows": loaded("llama", "float32", "batch-invariant", FIELDS)}
    with patch.object(Giver, "give"):
        models["oneDNN"] = loaded("llama", "float32", "batch-invariant", FIELDS)
    pools = {how: KvPool(model.geometry, 256, model.device) for how, model in models.items()}
    results, table = {}, []
    for rows in map(int, options.rows.split(",")):
        times: dict[str, list[float]] = {how: [] for how in HOWS}
        for turn in range(options.rounds + 1):
            for how in HOWS:
                took = pass_ms(models[how], pools[how], rows, 1, BEFORE, PASSES, time.perf_counter)
                if turn:  # the first warms up
                    times[how].append(took)
        theirs, ours = (statistics.median(times[how]) for how in HOWS)
        results[str(rows)] = {"oneDNN": theirs, "few rows": ours}
        table.append([str(rows), f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}"])
    for pool in pools.values():
        pool.close()
    title = f"decode of SmolLM2-135M's shape, float32, {options.threads} threads, ms of a step"
    report(title, ["rows", *HOWS, "times as fast"], table, results, options.json)


if __name__ == "__main__":
    main()
