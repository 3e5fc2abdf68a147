"""Effect of a very long prompt on running requests: time between tokens, with and without it.

    python -m benchmarks.fairness [--prompt 100000] [--decoders 4] [--bounds 512 512:200 512:50] [--json FILE]

A coordinator and one CPU worker with a tiny random model, as processes in a folder of their own, for each bound: a
step's tokens, and after a colon the time in ms that a step beside decodes may take (`decode_gap_ms`). Steady requests
decode alone; then the long prompt arrives and is prefilled in chunks beside them until its first token. Time between
tokens is measured in the client, when the token arrives. A stand-in model makes the absolute numbers small; the result
that carries over is that a decode waits for one chunk at most, never for a prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from kvforge import AsyncClient, AsyncRequest, SamplingParams
from kvforge.protocol.exits import INTERRUPTED

from .installation import BLOCK_SIZE, VOCABULARY, Installation
from .report import report

NO_GAP_MS = 1e9
STEADY_PROMPT_TOKENS = 64
STEADY_TOKENS_MAX = 16_384
WARM_TOKENS = 50
ALONE_TOKENS = 400
RUN_S = 540.0
Times = npt.NDArray[np.float64]


class Steady:
    """A request that decodes all the time, with the arrival time of each token (monotonic seconds)."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._changed = asyncio.Event()

    async def run(self, request: AsyncRequest) -> None:
        """Record its tokens until it ends or is cancelled."""
        async for _ in request:
            self.times.append(monotonic())
            self._changed.set()

    async def reach(self, count: int) -> None:
        """Waits for so many tokens."""
        while len(self.times) < count:
            self._changed.clear()
            await self._changed.wait()


def gaps_ms(steady: list[Steady], after: float, until: float) -> Times:
    """Times between tokens of all steady requests, in ms, that end within a time (monotonic seconds)."""
    found = [np.array(each.times) for each in steady]
    return np.concatenate([np.diff(at)[(at[1:] > after) & (at[1:] <= until)] for at in found]) * 1e3


def summary(gaps: Times) -> dict[str, float]:
    """p50, p99 and max."""
    p50, p99 = np.percentile(gaps, (50, 99))
    return {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(gaps.max()), "tokens": int(gaps.size)}


async def measure(endpoint_of: Installation, prompt_tokens: int, decoders: int) -> dict[str, Any]:
    """One installation: the steady requests alone, then with the long prompt."""
    rng = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    async with AsyncClient(endpoint_of.endpoint, timeout_s=60.0) as kv, asyncio.timeout(RUN_S):
        await endpoint_of.wait_ready(kv)
        steady = [Steady() for _ in range(decoders)]
        tasks = []
        for each in steady:
            prompt = rng.integers(3, VOCABULARY, STEADY_PROMPT_TOKENS).astype(np.int32)
            request = await kv.submit(prompt, max_tokens=STEADY_TOKENS_MAX, sampling=greedy)
            tasks.append(asyncio.create_task(each.run(request)))
        try:
            for each in steady:
                await each.reach(WARM_TOKENS)
            started = monotonic()
            for each in steady:
                await each.reach(len(each.times) + ALONE_TOKENS)
            arrived = monotonic()
            long = rng.integers(3, VOCABULARY, prompt_tokens).astype(np.int32)
            async for _ in await kv.submit(long, max_tokens=1, sampling=greedy):
                break
            served = monotonic()
            for each in steady:  # include the step that completed the long prompt
                await each.reach(len(each.times) + 1)
            ended = monotonic()
            assert not any(task.done() for task in tasks), "a steady request ended before the long prompt was done"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    alone, beside = gaps_ms(steady, started, arrived), gaps_ms(steady, arrived, ended)
    return {"alone": summary(alone), "beside": summary(beside), "long_first_token_s": served - arrived}


def rows_of(results: list[dict[str, Any]]) -> list[list[object]]:
    """One line for each bound."""
    rows: list[list[object]] = []
    for found in results:
        row: list[object] = [f"{found['step_tokens_max']}", _shown(found["decode_gap_ms"])]
        for when in ("alone", "beside"):
            row += [f"{found[when][name]:.1f}" for name in ("p50_ms", "p99_ms", "max_ms")]
        row += [f"{found['beside'][name] / found['alone'][name]:.1f}" for name in ("p50_ms", "p99_ms")]
        rows.append([*row, found["beside"]["tokens"], f"{found['long_first_token_s']:.1f}"])
    return rows


def _shown(gap_ms: float) -> str:
    return "none" if gap_ms == NO_GAP_MS else f"{gap_ms:g}"


def bound(text: str) -> tuple[int, float]:
    """TOKENS or TOKENS:MS."""
    tokens, _, gap_ms = text.partition(":")
    return int(tokens), float(gap_ms) if gap_ms else NO_GAP_MS


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--prompt", type=int, default=100_000, help="tokens of the long prompt [100000]")
    parser.add_argument("--decoders", type=int, default=4, help="steady requests [4]")
    parser.add_argument(
        "--bounds",
        type=bound,
        nargs="+",
        default=[(512, NO_GAP_MS), (512, 200.0), (512, 50.0)],
        metavar="TOKENS[:MS]",
        help="step_tokens_max, and optionally decode_gap_ms [512 512:200 512:50]",
    )
    options = parser.parse_args()
    context = max(options.prompt, STEADY_PROMPT_TOKENS + STEADY_TOKENS_MAX) + BLOCK_SIZE
    steady_tokens = options.decoders * (STEADY_PROMPT_TOKENS + STEADY_TOKENS_MAX + BLOCK_SIZE)
    blocks = -(-(context + steady_tokens) // BLOCK_SIZE) + 64
    results: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    try:
        for step_tokens, gap_ms in options.bounds:
            schedule = {"step_tokens_max": step_tokens, "decode_gap_ms": gap_ms}
            print(f"{schedule} ...", file=sys.stderr, flush=True)
            with Installation(context_tokens=context, blocks=blocks, schedule=schedule) as installation:
                found = asyncio.run(measure(installation, options.prompt, options.decoders))
            results.append({**schedule, **found})
    except KeyboardInterrupt:
        return INTERRUPTED
    title = (
        f"fairness: ms between tokens of {options.decoders} decodes, alone and beside a {options.prompt}-token prompt"
    )
    columns = ("p50", "p99", "max", "beside p50", "p99", "max", "p50 x", "p99 x", "tokens", "its first token, s")
    settings = {"prompt_tokens": options.prompt, "decoders": options.decoders, "runs": results}
    report(title, ["tokens a step", "gap, ms", *columns], rows_of(results), settings, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
