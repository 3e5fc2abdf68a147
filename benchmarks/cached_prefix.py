"""Time to the first token of a long prompt on a GPU, computed and found in the cache.

    python -m benchmarks.cached_prefix --model qwen3.5-35b-a3b [--tokens 8192] [--repeats 5] [--json FILE]

Dummy weights, through coordinator and client, one request at a time. "computed" is a prompt of random tokens, "cached"
the same tokens and a few new ones, which the coordinator finds behind them: for models with recurrent states it starts
from a checkpoint. Both alternate, and the first pair, which compiles and captures, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvforge.client.aio import AsyncClient, AsyncStreams

from .gpu_step import tiny_model
from .next_turn import READY_S, asked
from .report import report
from .step_plan import Plan
from .step_served import open_served

NEW = 32
COMPUTED, CACHED = "computed", "cached"


async def measure(endpoint: str, tokens: int, repeats: int, vocabulary: int) -> dict[str, Any]:
    """Measure both in alternation."""
    found: dict[str, list[tuple[float, int]]] = {COMPUTED: [], CACHED: []}
    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=READY_S) as client:
        await client.wait_ready(READY_S)
        streams = AsyncStreams(client)
        for repeat in range(repeats + 1):
            rng = np.random.default_rng(repeat)
            text, new = rng.integers(0, vocabulary, tokens), rng.integers(0, vocabulary, NEW)
            for side, whole in ((COMPUTED, text), (CACHED, np.concatenate([text, new]))):
                turn = await asked(streams, whole, max_tokens=4)
                if repeat:
                    found[side].append((round(turn.first_s * 1e3, 3), turn.cached_tokens))
        streams.close()
    return {
        side: {"first_token_ms": [first for first, _ in turns], "cached_tokens": [cached for _, cached in turns]}
        for side, turns in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape that ships with kvforge, or a folder")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tiny", action="store_true", help="on a CPU: a small model, written to the folder --model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    if options.tiny:
        options.model = tiny_model(Path(options.model), 2 * options.tokens)
    plan = Plan(options.model, (4,), options.tokens + 2 * NEW, 8, 8192, options.tiny)
    with open_served(plan, 1, options.tokens + 2 * NEW) as installation:
        results = asyncio.run(measure(installation.endpoint, options.tokens, options.repeats, options.vocabulary))
    computed = median(results[COMPUTED]["first_token_ms"])
    rows = [
        [side, f"{first:.2f}", f"{computed / first:.1f}", f"{median(one['cached_tokens']):.0f}"]
        for side, one in results.items()
        for first in [median(one["first_token_ms"])]
    ]
    header = ["side", "first token, ms", "times faster", "found cached"]
    report(f"a prompt of {options.tokens} tokens, {options.model}", header, rows, results, options.json)


if __name__ == "__main__":
    main()
