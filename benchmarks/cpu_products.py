"""Steps of a model on a CPU, with products by our kernels and by oneDNN.

    python -m benchmarks.cpu_products [--dtype float32] [--rows 1,2,4,8,16] [--prompts 40,256] [--threads 1]
        [--rounds 9] [--json FILE]

The forward pass alone of SmolLM2-135M's shape (30 layers of 576, a head of 49,152), random weights: decodes behind 100
tokens, and prompts of the given lengths. Our kernels multiply float32 on CPUs with AVX2 and without AVX-512, and
bfloat16 on CPUs with AMX, which oneDNN does not use here (docs/determinism.md). The model is loaded twice; both run in
turn, in one process; medians in milliseconds of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import torch

from benchmarks.cpu_determinism import loaded, pass_ms
from benchmarks.report import report
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.kernels.tiles import Layouts

FIELDS: dict[str, object] = {"vocab_size": 49152, "num_hidden_layers": 30, "tie_word_embeddings": True}
BEFORE = 100
HOWS = ("oneDNN", "tiles")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--prompts", default="40,256")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {"tiles": loaded("llama", options.dtype, "batch-invariant", FIELDS)}
    with patch.object(Layouts, "find"):
        models["oneDNN"] = loaded("llama", options.dtype, "batch-invariant", FIELDS)
    pools = {how: KvPool(model.geometry, 256, model.device) for how, model in models.items()}
    work = {f"decode of {rows}": (int(rows), 1, BEFORE, 4) for rows in options.rows.split(",")}
    work |= {f"prompt of {tokens}": (1, int(tokens), 0, 1) for tokens in options.prompts.split(",")}
    results, table = {}, []
    for name, each in work.items():
        times: dict[str, list[float]] = {how: [] for how in HOWS}
        for turn in range(options.rounds + 1):
            for how in HOWS:
                took = pass_ms(models[how], pools[how], *each, time.perf_counter)
                if turn:  # the first warms up
                    times[how].append(took)
        theirs, ours = (statistics.median(times[how]) for how in HOWS)
        results[name] = {"oneDNN": theirs, "tiles": ours}
        table.append([name, f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}"])
    for pool in pools.values():
        pool.close()
    title = f"SmolLM2-135M's shape, {options.dtype}, {options.threads} threads, ms of a step"
    report(title, ["", *HOWS, "times as fast"], table, results, options.json)


if __name__ == "__main__":
    main()
