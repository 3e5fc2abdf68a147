"""A whole decode step of samples of one prompt on a GPU: common blocks read once, beside read by each row.

    python -m benchmarks.gpu_shared_steps [--model llama-3.1-8b] [--samples 64] [--prompt 8192] [--rounds 3]
        [--json FILE]

The runner alone, dummy weights, captured graphs, two steps in flight as in a worker. Rounds with and without shared
reads alternate, and the least time of a step of each counts. A round before, which captures the graph, is not counted.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any
from unittest.mock import patch

from kvforge.worker.step.graphs import DecodeGraphs

from .report import report
from .step_plan import Plan
from .step_runner import decode_steps, open_runner

STEPS, OWN_TOKENS = 60, 48  # measured steps; tokens that a sample has behind the prompt in their middle


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_shared_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape that ships with kvforge, or a folder")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens that all samples have in common")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the results here too")
    arguments = parser.parse_args()
    context = arguments.prompt + OWN_TOKENS
    plan = Plan(arguments.model, (arguments.samples,), context, STEPS, 8192, tiny=False, common=arguments.prompt)
    device, _, runner = open_runner(plan)
    if runner.graphs is None or not device.queues:
        print("benchmarks.gpu_shared_steps needs a CUDA or HIP device", file=sys.stderr)
        return 1
    found: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(arguments.rounds + 1):
        for shares, times in found.items():
            never = patch.object(DecodeGraphs, "_gains_from_sharing", lambda *_: False)
            if not shares:
                never.start()
            ms = decode_steps(runner, plan, arguments.samples)["ms"]
            if not shares:
                never.stop()
            print(f"round {round_}, shares reads: {shares}, {ms:.3f} ms", file=sys.stderr, flush=True)
            times += [ms] if round_ else []
    alone, shared = (min(found[shares]) for shares in (False, True))
    results: dict[str, Any] = {"device": device.name, "alone_ms": alone, "shared_ms": shared, "ratio": alone / shared}
    rows = [[f"{arguments.samples} x {arguments.prompt}", f"{alone:.2f}", f"{shared:.2f}", f"{alone / shared:.2f} x"]]
    header = ["samples x prompt", "read by each row, ms", "read once, ms", "ratio"]
    report(f"A decode step of {arguments.model}'s shape", header, rows, results, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
