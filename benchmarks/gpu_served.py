"""Decode, prefill and start of several shapes on one GPU, through coordinator and client, beside the memory's floor.

    python -m benchmarks.gpu_served [--models llama-3.1-8b,granite-3.3-8b,...] [--batches 1,16,64,256] [--json FILE]

Each shape is a run of `benchmarks.tensor_parallel` with one rank: dummy weights in bfloat16, greedy requests of random
prompts. share = the bytes that a step reads at the read bandwidth that was measured in the same run, over the step's
duration. prefill: 8 prompts of 2048 tokens at once. start: from the start of the processes until the worker is ready;
it includes the compilation of kernels that no earlier run on this machine compiled.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .report import report
from .tensor_parallel import floor_ms, run_other

MODELS = "llama-3.1-8b,granite-3.3-8b,olmo-2-7b,phi-3-mini,gemma-3-12b,qwen3-30b-a3b,gpt-oss-20b"
MODEL_S = 280


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape; return an empty object if that fails."""
    command = ["benchmarks.tensor_parallel", "--ranks", "1", "--model", model, "--batches", options.batches]
    command += ["--context", str(options.context), *(f"--worker={each}" for each in options.worker)]
    found = run_other(command, MODEL_S).get("results", {})
    if not found or not found["sides"]["1"]:
        return {}
    side, shape = found["sides"]["1"], found["shape"]
    for batch, one in side["decode"].items():
        one["floor_ms"] = floor_ms(shape, 1, int(batch), one["context"], 0.0)
    return dict(side) | {"shape": shape}


def rows_of(model: str, found: dict[str, Any], batches: list[str]) -> list[str]:
    """Return a table row: each batch's time and share, prefill and start."""
    cells = [model]
    for batch in batches:
        one = found.get("decode", {}).get(batch)
        cells.append("-" if one is None else f"{one['ms']:.2f} ({one['floor_ms'] / one['ms']:.0%})")
    return [*cells, *(f"{found[part]:.3f}" if part in found else "-" for part in ("prefill_s", "start_s"))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--worker", action="append", default=[], help="a further setting of the worker, KEY=VALUE")
    parser.add_argument("--json", help="write the results here too, after each shape")
    options = parser.parse_args()
    batches = options.batches.split(",")
    results: dict[str, Any] = {}
    for model in options.models.split(","):
        results[model] = measure(model, options)
        if options.json is not None:
            Path(options.json).write_text(json.dumps(results), encoding="utf-8")
    device = next((found["shape"]["device"] for found in results.values() if found), "-")
    header = ["shape", *(f"batch {batch}, ms" for batch in batches), "prefill, s", "start, s"]
    rows = [rows_of(model, found, batches) for model, found in results.items()]
    report(f"served, context {options.context}, {device}", header, rows, results, options.json)


if __name__ == "__main__":
    main()
