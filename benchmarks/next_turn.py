"""Time to the first token of a next turn: on a kept sequence, with its answer computed ahead, cached, and without.

    python -m benchmarks.next_turn --model llama-3.1-8b [--repeats 5] [--json FILE]     on a GPU, dummy weights
    python -m benchmarks.next_turn --agents h200-8b [--sessions 12] [--json FILE]       Claude Code sessions, no GPU

--model: the second turn of a conversation of 2,000 prompt tokens and 1,000 generated ones, with 32 new tokens. "cached"
has all but the new tokens cached as a prompt, "prompt" sends the whole text and finds its answer uncached.
--agents: recorded sessions of an agent over a real coordinator and a simulated worker, which takes the times of a table
for its steps and computes generated tokens as another kind. Sides run one after the other on services of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from kvforge import SamplingParams
from kvforge.client.aio import AsyncClient, AsyncStreams
from kvforge.client.options import RequestOptions
from kvforge.loadtest.load.build import build
from kvforge.loadtest.load.options import LoadOptions
from kvforge.loadtest.load.workload import NO_TOKENS, Session, prompt
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.transport import client_endpoint

from .gpu_step import tiny_model
from .report import report
from .step_plan import Plan
from .step_served import open_served

PROMPT, ANSWER, NEW = 2000, 1000, 32
KEEP_S, READY_S = 600.0, 600.0
THINK_S = 0.5  # between two turns on a GPU, in which an answer is computed ahead
CACHED, SESSION, AHEAD, WHOLE = "cached", "session", "ahead", "prompt"


class Turn(NamedTuple):
    """One answered turn: its tokens, the time to the first in seconds, and what the prompt found cached."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    first_s: float
    prompt_tokens: int
    cached_tokens: int
    sequence_id: int


async def asked(streams: AsyncStreams, text: np.ndarray[Any, Any], **options: Any) -> Turn:
    """Submit a prompt and read its answer."""
    bell = asyncio.Event()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    began, first_s = monotonic(), 0.0
    (stream,) = streams.submit_samples(text.astype(np.int32), 1, RequestOptions(sampling=sampling, **options), bell.set)
    while not stream.done:
        await bell.wait()
        bell.clear()
        if len(stream.tokens) and not first_s:
            first_s = monotonic() - began
    if stream.error is not None:
        raise stream.error
    assert stream.ended is not None
    ended, tokens = stream.ended, np.array(list(stream.tokens), np.int32)
    return Turn(tokens, first_s, ended.prompt_tokens, ended.cached_tokens, ended.sequence_id)


async def next_turn(streams: AsyncStreams, side: str, seed: int, vocabulary: int) -> Turn:
    """Run a first turn, and return the second one."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocabulary, PROMPT)
    first = await asked(streams, text, max_tokens=ANSWER, keep_s=KEEP_S if side == SESSION else 0.0)
    whole = np.concatenate([text, first.tokens])
    if side == CACHED:
        await asked(streams, whole, max_tokens=1)
    elif side == AHEAD:
        try:
            await asked(streams, whole, max_tokens=1, ahead=True)
        except KvforgeError as error:  # a CPU
            print(f"not computed ahead: {error.message}", file=sys.stderr)
    await asyncio.sleep(THINK_S)
    whole = np.concatenate([whole, rng.integers(0, vocabulary, NEW)])
    return await asked(streams, whole, max_tokens=8, continues=first.sequence_id)


async def on_a_gpu(endpoint: str, repeats: int, vocabulary: int) -> dict[str, Any]:
    """Measure the sides in alternation."""
    found: dict[str, list[Turn]] = {side: [] for side in (CACHED, SESSION, AHEAD, WHOLE)}
    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=READY_S) as client:
        await client.wait_ready(READY_S)
        streams = AsyncStreams(client)
        for repeat in range(repeats + 1):
            for at, side in enumerate(found):
                turn = await next_turn(streams, side, 100 * repeat + at, vocabulary)
                if repeat:  # the first compiles and captures
                    found[side].append(turn)
        streams.close()
    return {
        side: {
            "first_token_ms": [round(turn.first_s * 1e3, 3) for turn in turns],
            "cached_tokens": [turn.cached_tokens for turn in turns],
        }
        for side, turns in found.items()
    }


@contextmanager
def simulated(table: str, context: int) -> Iterator[str]:
    """Yield the endpoint of a coordinator with one simulated worker, which distinguishes kinds."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "limits.toml"
        config.write_text(f"[limits]\nblocks_per_sequence_max = {-(-context // 16)}\n", encoding="utf-8")
        command = [sys.executable, "-m", "kvforge.loadtest.fleet", table, "--kinds", "--runtime-dir", f"{folder}/run"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*command, "--config", str(config)], **quiet) as fleet:  # type: ignore[call-overload]
            try:
                yield client_endpoint(Path(folder) / "run")
            finally:
                fleet.terminate()


async def run_session(streams: AsyncStreams, session: Session, side: str) -> list[Turn]:
    """Run the turns of a session, each after its pause."""
    held: np.ndarray[Any, Any] = NO_TOKENS
    turns: list[Turn] = []
    behind: set[asyncio.Task[Turn]] = set()
    for turn in session.turns:
        await asyncio.sleep(turn.think_s)
        text = prompt(turn, held)
        more = {"continues": turns[-1].sequence_id if turns else 0, "keep_s": KEEP_S} if side == SESSION else {}
        turns.append(await asked(streams, text, max_tokens=turn.output_tokens, **more))
        held = np.concatenate([text, turns[-1].tokens])
        if side == AHEAD:
            behind.add(asyncio.ensure_future(asked(streams, held, max_tokens=1, ahead=True)))
    await asyncio.gather(*behind, return_exceptions=True)  # refused or cancelled beside others
    return turns


async def with_agents(endpoint: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the sessions, so many at once, and return the share of cached tokens and the times of later turns."""
    load = build(
        LoadOptions(
            trace="claude-code",
            closed=options.closed,
            requests=options.sessions,
            think_scale=options.think_scale,
            length_scale=options.length_scale,
            context_max=options.context,
        )
    )
    turns: list[list[Turn]] = []
    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=30.0) as client:
        await client.wait_ready(READY_S)
        streams = AsyncStreams(client)
        places = asyncio.Semaphore(options.closed)

        async def one(index: int) -> None:
            async with places:
                turns.append(await run_session(streams, load.session(index), side))

        await asyncio.gather(*(one(index) for index in range(len(load))))
        streams.close()
    every = [turn for session in turns for turn in session]
    later_ms = np.array([turn.first_s for session in turns for turn in session[1:]]) * 1e3
    return {
        "turns": len(every),
        "prompt_tokens": sum(turn.prompt_tokens for turn in every),
        "cached_share": sum(turn.cached_tokens for turn in every) / sum(turn.prompt_tokens for turn in every),
        "first_token_ms": {f"p{p}": round(float(np.percentile(later_ms, p)), 2) for p in (50, 90, 99)},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a shape of benchmarks.gpu_served, or a folder")
    which.add_argument("--agents", help="a table of step times, such as h200-8b")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: a small model, written to the folder --model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--closed", type=int, default=2, help="sessions at once")
    parser.add_argument("--think-scale", type=float, default=0.02)
    parser.add_argument("--length-scale", type=float, default=0.1)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.model:
        if options.tiny:
            options.model = tiny_model(Path(options.model), 4096)
        plan = Plan(options.model, (4,), PROMPT + ANSWER + 2 * NEW, 8, 512, options.tiny)
        with open_served(plan, 1, PROMPT + ANSWER + 2 * NEW) as installation:
            results = asyncio.run(on_a_gpu(installation.endpoint, options.repeats, options.vocabulary))
        base = median(results[CACHED]["first_token_ms"])
        rows = [
            [
                side,
                f"{median(one['first_token_ms']):.2f}",
                f"{median(one['first_token_ms']) / base:.2f}",
                f"{median(one['cached_tokens']):.0f} of {PROMPT + ANSWER + NEW}",
            ]
            for side, one in results.items()
        ]
        title, header = f"second turn, {options.model}", ["side", "first token, ms", "of cached", "found cached"]
    else:
        for side in (WHOLE, AHEAD, SESSION):
            with simulated(options.agents, options.context) as endpoint:
                results[side] = asyncio.run(with_agents(endpoint, side, options))
        rows = [
            [side, str(one["turns"]), f"{one['cached_share']:.1%}", *map(str, one["first_token_ms"].values())]
            for side, one in results.items()
        ]
        title = f"Claude Code sessions, {options.agents}, simulated steps"
        header = ["side", "turns", "found cached", "first token p50, ms", "p90", "p99"]
    report(title, header, rows, results, options.json)


if __name__ == "__main__":
    main()
