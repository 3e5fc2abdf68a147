"""Tokens per second of many requests at once to `kvforge up`, with its own steps and with others.

    python -m benchmarks.up_burst [--model llama-3.1-8b] [--requests 256] [--steps default 64,512]
        [--json FILE] [--tiny]

Each entry of `--steps` starts `kvforge up` with dummy weights: `default` with no setting, ROWS,TOKENS with these values
of schedule.step_rows_max and schedule.step_tokens_max. All requests are sent at once, three times, with other random
prompts each time; the first time is not counted. Reported are the seconds until the worker is ready (the first start on
a machine also compiles kernels), the tokens that its pool holds, the answers' tokens per second, and the worker's
account of a GPU's memory. --tiny does the same with a tiny model on the CPU; its numbers have no meaning.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvforge import Client, SamplingParams
from kvforge.protocol.transport import client_endpoint

from .gpu_step import tiny_model
from .report import report
from .startup import ROOT, started
from .step_plan import BLOCK_SIZE, VOCABULARY

ANSWER_TOKENS = 128
ROUNDS = 3
MEMORY = "device memory: "
READY_S, ANSWERS_S = 180.0, 300.0


def burst(client: Client, requests: int, seed: int, tokens: int) -> float:
    """Send all requests at once; return their tokens per second."""
    prompts = np.random.default_rng(seed).integers(3, VOCABULARY, (requests, 4 * tokens), dtype=np.int32)
    began = perf_counter()
    pending = [
        client.submit(prompt, max_tokens=tokens, sampling=SamplingParams(temperature=0.0, ignore_eos=True))
        for prompt in prompts
    ]
    found = [each.result(ANSWERS_S) for each in pending]
    spent_s = perf_counter() - began
    assert all(len(each.tokens) == tokens for each in found), "an answer is cut short"
    return requests * tokens / spent_s


def measure(steps: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start `kvforge up` with these steps, and measure ROUNDS bursts."""
    file = folder / "up.toml"
    rows, _, tokens = steps.partition(",")
    chosen = f"[schedule]\nstep_rows_max = {rows}\nstep_tokens_max = {tokens}\n" if tokens else ""
    file.write_text(chosen, encoding="utf-8")
    runtime = Path(tempfile.mkdtemp(prefix="kvf-burst-"))
    model = str(tiny_model(folder)) if options.tiny else options.model
    command = [sys.executable, "-m", "kvforge", "--runtime-dir", str(runtime / "r"), "up", "--config", str(file)]
    command += ["--model-config", model, *(["--device", "cpu"] if options.tiny else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH", ""))))}
    try:
        with (
            Client(client_endpoint(runtime / "r"), timeout_s=30.0) as client,
            started(command, environment, None) as running,
        ):
            ready_s = running.wait_for(client, READY_S) - running.began
            rounds = [burst(client, options.requests, seed, options.tokens) for seed in range(ROUNDS)][1:]
            (pool,) = client.stats().pools
            memory = next((line for _, line in running.lines if MEMORY in line), "")
            return {
                "steps": steps,
                "ready_s": ready_s,
                "pool_tokens": pool.blocks * BLOCK_SIZE,
                "tokens_per_s": rounds,
                "memory": memory.partition(MEMORY)[2],
            }
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.up_burst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="name of a configuration in worker/model_configs")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=ANSWER_TOKENS, help="of an answer; a prompt has four times as many"
    )
    parser.add_argument("--steps", nargs="+", default=["default", "64,512"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(steps, options, Path(folder)) for steps in options.steps]
    rows = [
        [
            each["steps"],
            f"{each['ready_s']:.1f}",
            each["pool_tokens"],
            f"{median(each['tokens_per_s']):,.0f}",
            each["memory"],
        ]
        for each in results
    ]
    title = f"{options.requests} requests of {4 * options.tokens} + {options.tokens} tokens at once, {options.model}"
    header = ["steps", "ready, s", "tokens of the pool", "tokens/s", "memory"]
    report(title, header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
