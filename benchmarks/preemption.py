"""Cost of a pool that is too small: preemptions, recomputation and throughput, by the size of the pool.

    python -m benchmarks.preemption [--shares 1.0 0.6 0.4 0.25] [--json FILE]

A coordinator and one CPU worker with a tiny random model serve the same open-loop load, through `kvforge loadtest`,
with pools of a share of the blocks that the requests running at once would need together. With enough blocks each token
is computed once; recomputation after a preemption is reported as a share of all computed tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvforge import AsyncClient

from .installation import BLOCK_SIZE, Installation
from .report import report

ROWS = 32
PROMPT_TOKENS, ANSWER_TOKENS = 64, 128
RUN_S = 900


async def _ready(installation: Installation) -> None:
    async with AsyncClient(installation.endpoint, timeout_s=60.0) as kv:
        await installation.wait_ready(kv)


def run(share: float, requests: int, rate: float) -> dict[str, Any]:
    """The load test's document for a pool of this share. Raises subprocess.CalledProcessError where it fails."""
    context = PROMPT_TOKENS + ANSWER_TOKENS + BLOCK_SIZE
    blocks = max(round(share * ROWS * (context // BLOCK_SIZE)), context // BLOCK_SIZE + 1)
    schedule: dict[str, float] = {"step_rows_max": ROWS}
    with Installation(context_tokens=context, blocks=blocks, schedule=schedule, sequences=2 * ROWS) as installation:
        asyncio.run(_ready(installation))
        folder = Path(installation.folder) / "load"
        command = f"--rate {rate} --requests {requests} --input 16:{PROMPT_TOKENS} --output 32:{ANSWER_TOKENS}"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "kvforge.loadtest",
                *command.split(),
                "--endpoint",
                installation.endpoint,
                "--out",
                folder,
            ],
            check=False,  # the document reports a late driver
            timeout=RUN_S,
            stdout=subprocess.DEVNULL,
        )
        document: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {"share": share, "blocks": blocks, "load": document}


def row_of(found: dict[str, Any]) -> list[object]:
    """One line of the table."""
    load = found["load"]
    counters, latency = load["server"]["totals"], load["all"]["latency_ms"]
    again, computed = counters["recomputed_tokens_total"], counters["computed_tokens_total"]
    return [
        f"{found['share']:.2f}",
        found["blocks"],
        f"{load['all']['requests']['finished']} of {load['all']['requests']['due']}",
        counters["preemptions_total"],
        f"{again / computed:.1%}",
        f"{load['all']['throughput']['output_tokens_per_s']:.0f}",
        f"{latency['ttft']['p50']:.0f}",
        f"{latency['ttft']['p99']:.0f}",
        f"{latency['itl']['p50']:.1f}",
        f"{latency['itl']['p99']:.1f}",
        f"{latency['e2e']['p99']:.0f}",
    ]


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemption", description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.6, 0.4, 0.25], help="sizes of the pool")
    parser.add_argument("--requests", type=int, default=1500, help="requests of each run [1500]")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second [200]")
    options = parser.parse_args()
    results = []
    for share in options.shares:
        print(f"a pool of {share:.0%} ...", file=sys.stderr, flush=True)
        results.append(run(share, options.requests, options.rate))
    title = f"preemption: {options.requests} requests at {options.rate:g}/s, {ROWS} running at once at most"
    header = ["pool", "blocks", "finished", "preemptions", "computed again", "tokens/s"]
    header += ["first token p50, ms", "p99", "between tokens p50, ms", "p99", "end p99, ms"]
    report(title, header, [row_of(found) for found in results], results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
