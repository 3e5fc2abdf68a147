"""Latency of interactive requests beside a batch: first tokens and gaps between tokens, alone and beside it.

    python -m benchmarks.beside_batch --table h200-8b [--rate 2] [--seconds 20] [--json FILE]      no model
    python -m benchmarks.beside_batch --cpu smollm2-135m --rate 0.5 --prompt 64 --tokens 16         a CPU worker
    python -m benchmarks.beside_batch --gpu llama-3.1-8b [--rate 2] [--seconds 30]                   dummy weights

Interactive requests come at random (Poisson) with their own prompts. The batch keeps `--lanes` requests of the lowest
priority in flight, as `/v1/batches` does. Three sides take turns on one service: the interactive requests alone, the
same beside the batch, which arrive at the same times, and, before both, the batch alone. Interactive requests that do
not count come between: the first ones of a new worker are slower. "ratio" divides beside by
alone; the last column but one divides the tokens computed a second beside by those of the batch alone. Times are the
client's. "busy" is the share of time in which the worker's device had work, by the pauses between steps that the worker
measures: a launch that the device waits for is a pause.
The batch has a client process of its own, because its tokens would delay the others on their way.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from kvforge import SamplingParams
from kvforge.client.aio import AsyncClient, AsyncStreams
from kvforge.client.arguments import PRIORITY_MAX
from kvforge.client.options import RequestOptions
from kvforge.launch.settings import toml
from kvforge.protocol.transport import client_endpoint

from .gpu_step import tiny_model
from .installation import Installation
from .report import report
from .step_plan import Plan
from .step_served import open_served

READY_S = 600.0
ALONE, BESIDE, BATCH = "alone", "beside", "batch alone"
WARM_S = 2.0
TIMES = ("first_token_ms", "gap_ms", "whole_ms")


class Measured:
    """What a side measured.

    Attributes:
        first_s: Times to the first token.
        gaps_s: Times between two tokens of a request.
        whole_s: Times to the last token.
        tokens: Prompt and generated tokens of all requests, those of the batch included.
        busy: For each run, the share of time in which the device had work.
    """

    def __init__(self) -> None:
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.whole_s: list[float] = []
        self.tokens = 0
        self.busy: list[float] = []


class Load:
    """The requests of one side.

    Args:
        streams: Where to submit.
        options: The command's.
        seed: Of arrivals, which all sides share.
        at: Number of the side. Each has prompts of its own, so that none is cached.
    """

    def __init__(self, streams: AsyncStreams, options: argparse.Namespace, seed: int, at: int) -> None:
        self._streams, self._options = streams, options
        self._draw, self._arrivals = np.random.default_rng((seed, at)), np.random.default_rng(seed)
        self.found = Measured()
        self._counts = False

    async def request(self, prompt_tokens: int, tokens: int, priority: int) -> None:
        """Run one request to its end."""
        bell, times = asyncio.Event(), [monotonic()]
        prompt = self._draw.integers(0, self._options.vocabulary, prompt_tokens).astype(np.int32)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        choices = RequestOptions(max_tokens=tokens, sampling=sampling, priority=priority)
        (stream,) = self._streams.submit_samples(prompt, 1, choices, bell.set)
        try:
            while not stream.done:
                await bell.wait()
                bell.clear()
                came = len(stream.tokens) - (len(times) - 1)
                times += [monotonic()] * came
                if came and self._counts:
                    self.found.tokens += came + (prompt_tokens if len(times) == came + 1 else 0)
        finally:
            if not stream.done:
                stream.cancel()
        if stream.error is not None:
            raise stream.error
        if priority == 0 and self._counts:
            self.found.first_s.append(times[1] - times[0])
            self.found.gaps_s += np.diff(times[1:]).tolist()
            self.found.whole_s.append(times[-1] - times[0])

    async def lane(self) -> None:
        """Run requests of the batch one after the other."""
        own = self._options
        while True:
            await self.request(own.batch_prompt, int(self._draw.integers(1, own.batch_tokens + 1)), -PRIORITY_MAX)

    async def interactive(self, running: set[asyncio.Task[None]]) -> None:
        """Let requests arrive."""
        own = self._options
        while True:
            await asyncio.sleep(float(self._arrivals.exponential(1 / own.rate)))
            task = asyncio.ensure_future(self.request(own.prompt, own.tokens, 0))
            running.add(task)
            task.add_done_callback(running.discard)

    async def run(self, lanes_count: int, interactive: bool) -> Measured:
        """Run requests of a batch, or interactive ones."""
        running: set[asyncio.Task[None]] = set()
        lanes = [asyncio.ensure_future(self.lane()) for _ in range(lanes_count)]
        arrivals = [asyncio.ensure_future(self.interactive(running))] if interactive else []
        await asyncio.sleep(WARM_S)
        self._counts = True
        await asyncio.sleep(self._options.seconds)
        self._counts = False
        ending = [*lanes, *arrivals, *running]
        for task in ending:
            task.cancel()
        ended = await asyncio.gather(*ending, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one
        return self.found


async def batch(endpoint: str, options: argparse.Namespace, draws: tuple[int, int], parent: Connection) -> None:
    """Run the batch; send whether it is connected, and then its tokens. draws: as `Load` takes them."""
    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=READY_S) as client:
        streams = AsyncStreams(client)
        parent.send(True)
        found = await Load(streams, options, *draws).run(options.lanes, interactive=False)
        parent.send(found.tokens)
        streams.close()


def run_batch(endpoint: str, options: argparse.Namespace, draws: tuple[int, int], parent: Connection) -> None:
    """Be the process of the batch."""
    asyncio.run(batch(endpoint, options, draws, parent))


@contextmanager
def beside(endpoint: str, options: argparse.Namespace, draws: tuple[int, int]) -> Iterator[Connection]:
    """Start the process of the batch; yield where its tokens arrive once it ends."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=run_batch, args=(endpoint, options, draws, its))
    process.start()
    its.close()  # so that its end is seen
    try:
        assert mine.recv(), "connected"
        yield mine
        process.join(READY_S)
    finally:
        process.kill()
        process.join()


async def busy_share(client: AsyncClient, seconds: float) -> float:
    """Return the share of the time from WARM_S on in which the device has work."""
    pauses_us, at = list[int](), list[float]()
    for wait_s in (WARM_S, seconds):
        await asyncio.sleep(wait_s)
        (pool,) = (await client.stats()).pools
        pauses_us.append(pool.device_idle_us_total)
        at.append(monotonic())
    return 1 - (pauses_us[1] - pauses_us[0]) / 1e6 / (at[1] - at[0])


async def measure_side(
    endpoint: str,
    client: AsyncClient,
    streams: AsyncStreams,
    side: str,
    options: argparse.Namespace,
    at: tuple[int, int],
) -> Measured:
    """Measure one side once. at: the draws, as `Load` takes them."""
    load = Load(streams, options, *at)
    busy = asyncio.ensure_future(busy_share(client, options.seconds))
    if side == ALONE:
        found = await load.run(0, interactive=True)
    else:
        with beside(endpoint, options, at) as process:
            found = await load.run(0, interactive=side == BESIDE)
            found.tokens += await asyncio.to_thread(process.recv)
    found.busy.append(await busy)
    return found


async def measure(endpoint: str, options: argparse.Namespace) -> dict[str, Measured]:
    """Measure the sides in turns."""
    found = {side: Measured() for side in (BATCH, ALONE, BESIDE)}
    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=READY_S) as client:
        await client.wait_ready(READY_S)
        streams = AsyncStreams(client)
        for repeat in range(options.repeats):
            for at, (side, whole) in enumerate(found.items()):
                if side == ALONE and not repeat:
                    await Load(streams, options, 0, len(found)).run(0, interactive=True)
                if side == BATCH and repeat:
                    continue  # only before the first other request: afterwards batches leave room for the next one
                one = await measure_side(endpoint, client, streams, side, options, (repeat, at))
                whole.first_s += one.first_s
                whole.gaps_s += one.gaps_s
                whole.whole_s += one.whole_s
                whole.tokens += one.tokens
                whole.busy += one.busy
                await asyncio.sleep(WARM_S / 2)  # what was cancelled leaves
        streams.close()
    return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return percentiles in ms."""
    return {f"p{p}": round(float(np.percentile(values, p)) * 1e3, 3) for p in (50, 90, 99)} if values else {}


def results_of(found: dict[str, Measured], seconds: float, repeats: int) -> dict[str, Any]:
    """Return the numbers of all sides and their ratios."""
    sides: dict[str, Any] = {
        side: {
            "requests": len(one.first_s),
            "first_token_ms": percentiles(one.first_s),
            "gap_ms": percentiles(one.gaps_s),
            "whole_ms": percentiles(one.whole_s),
            "tokens_per_s": round(one.tokens / seconds / (repeats if side != BATCH else 1), 1),
            "busy": round(sum(one.busy) / len(one.busy), 3) if one.busy else 0.0,
        }
        for side, one in found.items()
    }
    for what in TIMES:
        alone, beside = sides[ALONE][what], sides[BESIDE][what]
        sides[f"ratio of {what}"] = {p: round(beside[p] / alone[p], 3) for p in alone if p in beside}
    sides["full"] = round(sides[BESIDE]["tokens_per_s"] / sides[BATCH]["tokens_per_s"], 3)
    return sides


@contextmanager
def service(options: argparse.Namespace) -> Iterator[str]:
    """Start a coordinator and a worker; yield the endpoint."""
    context = max(options.prompt + options.tokens, options.batch_prompt + options.batch_tokens)
    rows = options.rows
    schedule: dict[str, float] = {"step_rows_max": rows, "step_tokens_max": options.step_tokens}
    if options.gap_ms:
        schedule["decode_gap_ms"] = options.gap_ms
    if options.table:
        with tempfile.TemporaryDirectory() as folder:
            limits = {"sequences_max": rows + options.lanes + 64, "blocks_per_sequence_max": context}
            config = Path(folder) / "c.toml"
            config.write_text(toml({}, {"limits": limits, "schedule": schedule}), encoding="utf-8")
            command = [sys.executable, "-m", "kvforge.loadtest.fleet", options.table, "--log-level", "error"]
            command += ["--runtime-dir", f"{folder}/run", "--config", str(config)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as fleet:
                try:
                    yield client_endpoint(Path(folder) / "run")
                finally:
                    fleet.terminate()
        return
    if options.cpu:
        blocks = 2 * rows * context // 16
        worker = {"model": options.cpu, "device": "cpu", "dtype": "float32", "threads": 1, "blocks": blocks}
        with Installation(
            context_tokens=context,
            blocks=1 << 20,
            schedule=schedule,
            sequences=rows + options.lanes + 64,
            worker=worker,
        ) as installation:
            yield installation.endpoint
        return
    if options.tiny:
        options.gpu = tiny_model(Path(options.gpu), 4096)
    plan = Plan(options.gpu, (rows,), context, 8, options.step_tokens, options.tiny)
    with open_served(plan, 1, context) as installation:
        yield installation.endpoint


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--table", help="a table of step times, such as h200-8b")
    which.add_argument("--cpu", help="a model for a CPU worker")
    which.add_argument("--gpu", help="a shape of benchmarks.gpu_served, or a folder")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: a small model, written to the folder --gpu")
    parser.add_argument("--rate", type=float, default=2.0, help="interactive requests a second")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=96, help="requests of the batch in flight")
    parser.add_argument("--batch-prompt", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=128, help="at most; answers have 1 to this many")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--gap-ms", type=float, default=0.0, help="decode_gap_ms; 0: the default")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=97)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    with service(options) as endpoint:
        found = asyncio.run(measure(endpoint, options))
    results = results_of(found, options.seconds, options.repeats)
    rows = []
    for side in found:
        one = results[side]
        times = [str(value) for what in TIMES for value in one[what].values()] or [""] * 9
        rows.append([side, str(one["requests"]), *times, str(one["tokens_per_s"]), str(one["busy"])])
    ratios = [str(value) for what in TIMES for value in results[f"ratio of {what}"].values()]
    rows.append(["ratio", "", *ratios, str(results["full"]), ""])
    names = [f"{what} {p}" for what in ("first", "gap", "whole") for p in ("p50", "p90", "p99")]
    header = ["side, ms", "requests", *names, "tokens/s", "busy"]
    title = f"interactive beside a batch, {options.table or options.cpu or options.gpu}"
    report(title, header, rows, results, options.json)


if __name__ == "__main__":
    main()
