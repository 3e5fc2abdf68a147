"""The host tier: rate of its copies, decode steps beside them, prompts found in it, and its cost where nothing hits.

    python -m benchmarks.host_tier [--kv bfloat16,fp8] [--parts copies,steps,first,throughput] [--json FILE]   one GPU
    python -m benchmarks.host_tier --cpu                                       a tiny model, to try the benchmark

Dummy weights of Llama-3.1-8B. Parts, each for every dtype of K and V:

- copies: all blocks of `--megabytes` to the host file and back, at the places that the coordinator gives in a file that
  was written ten times over ("runs"), and in random order, with the file in huge and in small pages, beside a plain
  copy of as many bytes between the device and page-locked memory. "share" divides the rates. The time of ours ends with
  the tags, or with the checksums compared.
- steps: decodes of 64 rows, two steps in flight, which copy none, 4 or 32 blocks to the host and as many from it. Ways
  alternate in turns of 50 steps. 64 rows that decode fill 4 blocks of 16 tokens a step.
- first: time to the first token of a long prompt through coordinator and client, computed and found in the tier. The
  pool holds one such prompt, so two prompts in turn evict each other. "found and saving" is the first time that they
  are found, when the other one is not in the file yet and is copied there by the same step.
- throughput: tokens a second, prompts included, of requests with random prompts: all blocks of the pool are evicted and
  never wanted again. Services of their own run one after the other: without the tier, with it, which learns to copy
  none of them, and with `cache.host_learn_blocks = 0`, which copies all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from kvforge.client.aio import AsyncClient, AsyncStreams
from kvforge.protocol.messages import GENERATED, RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvGeometry, KvPool, LayerShape
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.host_file import HostFile
from kvforge.worker.loading.load import load_model
from kvforge.worker.step.host_placement import HostPlacement
from kvforge.worker.step.host_transfers import HostTransfers
from kvforge.worker.step.pending import PendingStep
from kvforge.worker.step.runner import ModelRunner

from .gpu_step import tiny_model
from .host_runs import aged_places
from .next_turn import READY_S, asked
from .report import report
from .step_plan import BLOCK_SIZE, Plan
from .step_served import open_served

MODEL, LAYERS, HEADS, HEAD = "llama-3.1-8b", 32, 8, 128
PARTS = ("copies", "steps", "first", "throughput")
ROWS, CONTEXT, TURN_STEPS, TURNS = 64, 1024, 50, 5
COPIED = (0, 4, 32)  # blocks that a step copies in each direction
REPEATS = 5
FIRST_REPEATS = 3
LANES, LANE_PROMPT, LANE_TOKENS, LANE_REQUESTS = 64, 1024, 64, 4
BUSY_BLOCKS = 24  # of the pool beside a long prompt


def folder_with_room(needed: int) -> str:
    """Return a new folder in memory, or on the disk if that has too little room."""
    memory = "/dev/shm"  # noqa: S108 - the folder is new
    place = memory if shutil.disk_usage(memory).free > needed else tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="kvf-bench-host-", dir=place)


@contextmanager
def host_folder(needed: int) -> Iterator[str]:
    """Yield a folder for a host file, which is removed with it."""
    folder = folder_with_room(needed)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copies_of(blocks: list[int], hosts: list[int]) -> Any:
    """Return copies as steps carry them, each with a tag of its own."""
    rows = [[block, host, host + 1, 7] for block, host in zip(blocks, hosts, strict=True)]
    return np.array(rows, np.int32).reshape(-1)


def best(run: Callable[[], object]) -> float:
    """Return the median seconds of a call, after one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def plain_rates(device: Device, size: int) -> dict[str, float]:
    """Return GB/s of one plain copy between the device and page-locked memory, in both directions."""
    on_device = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
    on_host = device.host_buffer(size, torch.uint8)

    def copied(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            device.synchronize()

        return run

    pairs = {"to host": (on_host, on_device), "from host": (on_device, on_host)}
    return {way: size / best(copied(*pair)) / 1e9 for way, pair in pairs.items()}


def measure_copies(device: Device, geometry: KvGeometry, size: int) -> dict[str, Any]:
    """Return the rates of plain copies and ours, with the file in huge and in small pages, and their shares."""
    count = max(2, size // geometry.bytes_per_block)
    size = count * geometry.bytes_per_block
    found: dict[str, Any] = {"bytes": size, "plain": plain_rates(device, size)}
    rng = np.random.default_rng(0)
    sources = rng.permutation(count).tolist()
    orders = {"runs": aged_places(count), "ours": rng.permutation(2 * count)[:count].tolist()}
    for huge, pages in ((True, ""), (False, ", small pages")):
        with host_folder(2 * size) as folder:
            pool = KvPool(geometry, count, device)
            placed = HostPlacement(device)
            path = Path(folder) / "file"
            file = HostFile(path, "benchmark", 2 * count, geometry.bytes_per_block, place=placed.place, huge=huge)
            host = HostTransfers(pool, file)
            for name, places in orders.items():
                found[name + pages] = rates_at(device, host, copies_of(sources, places), size)
            found[f"file{pages}"] = placed.describe(file)
            found["refused"], found["folder"] = host.problem, str(Path(folder).parent)
            host.close()
            pool.close()
        for name, share in (("runs", "share of runs"), ("ours", "share")):
            ways = found[name + pages].items()
            found[share + pages] = {way: rate / found["plain"][way] for way, rate in ways}
    return found


def rates_at(device: Device, host: HostTransfers, copies: Any, size: int) -> dict[str, float]:
    """Return GB/s of our copies of so many bytes, in both directions."""

    def load() -> None:
        loaded = host.load(copies)
        device.synchronize()
        assert not loaded.settle().size, "blocks were not found"

    ways: dict[str, Callable[[], object]] = {"to host": lambda: host.save(copies).settle(), "from host": load}
    return {way: size / best(run) / 1e9 for way, run in ways.items()}


class Decodes:
    """Decode steps of ROWS rows over a pool with a host file. Their positions stay; each step writes them again."""

    def __init__(self, runner: ModelRunner, rows: int, context: int, copied: int) -> None:
        self._runner, self._number = runner, 0
        width = context // BLOCK_SIZE + 1
        self._tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        self._slots, self._starts = np.arange(rows, dtype=np.int32), np.full(rows, context, np.int32)
        self._ones = np.ones(rows, np.int32)
        self._tokens = (7 + (GENERATED if runner.model.wants_kinds else 0)) * self._ones
        free = np.arange(rows * width, rows * width + 2 * copied)
        self._sources, self._targets = free[:copied].tolist(), free[copied:].tolist()
        begins = tuple(
            RowStart(slot=slot, request_id=slot + 1, sampling=SamplingParams(temperature=0.0), seed=0)
            for slot in range(rows)
        )
        hosts = list(range(copied))
        runner.finish(self.launch(begins=begins, host_writes=copies_of(self._sources, hosts)))
        self._hosts = hosts

    def launch(self, **fields: Any) -> PendingStep:
        """Launch a step."""
        self._number += 1
        step = Step(
            self._number,
            slots=self._slots,
            starts=self._starts,
            counts=self._ones,
            samples=self._ones,
            tokens=self._tokens,
            **fields,
        )
        return self._runner.launch(step, self._tables)

    def turn(self, steps: int, copied: int) -> list[float]:
        """Run steps that copy so many blocks in each direction, two in flight; return the seconds between results."""
        fields: dict[str, Any] = {}
        if copied:
            writes = [len(self._hosts) + at for at in range(copied)]
            fields["host_writes"] = copies_of(self._sources[:copied], writes)
            fields["host_reads"] = copies_of(self._targets[:copied], self._hosts[:copied])
        pending, times, last = self.launch(**fields), [], time.perf_counter()
        for _ in range(steps):
            behind = self.launch(**fields)
            outcome = self._runner.finish(pending)
            assert not outcome.errors and not pending.host_missed.size, outcome.errors
            now = time.perf_counter()
            times.append(now - last)
            pending, last = behind, now
        self._runner.finish(pending)
        return times[1:]


def measure_steps(device: Device, source: str, kv_dtype: str, cpu: bool) -> dict[str, Any]:
    """Return the median and the 99th percentile of a step in milliseconds, by the blocks that it copies."""
    rows, context, steps = (4, 64, 10) if cpu else (ROWS, CONTEXT, TURN_STEPS)
    dtypes: dict[str, Any] = {"dtype": "float32"} if cpu else {"dtype": "bfloat16", "kv_dtype": kv_dtype}
    model = load_model(
        Path(source) if cpu else source, load_format="dummy", device=device, block_size=BLOCK_SIZE, **dtypes
    )
    most = max(COPIED)
    pool = KvPool(model.geometry, rows * (context // BLOCK_SIZE + 1) + 2 * most, device)
    pool.zero_blocks(np.arange(pool.blocks, dtype=np.int32))
    width = context // BLOCK_SIZE + 1
    sizes: dict[str, Any] = {"slots_max": rows, "step_tokens_max": rows, "step_rows_max": rows, "table_width": width}
    runner = ModelRunner(model, pool, **sizes, graph_rows_max=0 if cpu else rows)
    each = model.geometry.bytes_per_block
    times: dict[int, list[float]] = {copied: [] for copied in COPIED}
    with host_folder(2 * most * each) as folder, torch.inference_mode():
        runner.host = HostTransfers(pool, HostFile(Path(folder) / "file", "benchmark", 2 * most, each))
        if runner.graphs is not None:
            runner.graphs.capture(few=True)
        decodes = Decodes(runner, rows, context, most)
        for turn in range(1 if cpu else TURNS + 1):
            for copied, all_times in times.items():
                one = decodes.turn(steps, copied)
                all_times += one if turn or cpu else []
        runner.close()
        runner.host.close()
    pool.close()
    found: dict[str, Any] = {"rows": rows, "context": context, "bytes_per_block": each}
    for copied, one in times.items():
        found[str(copied)] = {
            "median_ms": 1e3 * median(one),
            "mean_ms": 1e3 * sum(one) / len(one),
            "p99_ms": 1e3 * float(np.percentile(one, 99)),
        }
    return found


def plan_of(options: argparse.Namespace, kv_dtype: str, tokens: int, batch: int, **worker: Any) -> Plan:
    """Return the plan of a service."""
    kv = "auto" if options.cpu or kv_dtype == "bfloat16" else kv_dtype
    return Plan(options.model, (batch,), tokens, 8, 8192, options.cpu, kv, worker=tuple(worker.items()))


async def first_tokens(endpoint: str, tokens: int, vocabulary: int) -> dict[str, list[tuple[float, int]]]:
    """Return (milliseconds, cached tokens) of prompts that are computed and found."""
    found: dict[str, list[tuple[float, int]]] = {"computed": [], "found and saving": [], "found": []}
    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=READY_S) as client:
        await client.wait_ready(READY_S)
        streams = AsyncStreams(client)
        for repeat in range(FIRST_REPEATS + 1):
            rng = np.random.default_rng(repeat)
            prompts = [rng.integers(0, vocabulary, tokens) for _ in range(2)]
            for side in found:
                for prompt in prompts:
                    turn = await asked(streams, prompt, max_tokens=4)
                    if repeat:  # the first ones compile and capture
                        found[side].append((1e3 * turn.first_s, turn.cached_tokens))
        streams.close()
    return found


def measure_first(options: argparse.Namespace, kv_dtype: str, each: int) -> dict[str, Any]:
    """Return the times to the first token of a long prompt."""
    tokens = 512 if options.cpu else options.tokens
    held = tokens // BLOCK_SIZE + BUSY_BLOCKS
    with host_folder(4 * held * each) as folder:
        worker = {"blocks": held, "host_bytes": 4 * held * each, "host_dir": folder}
        plan = plan_of(options, kv_dtype, tokens, 4, **worker)
        with open_served(plan, 1, tokens + 64) as installation:
            found = asyncio.run(first_tokens(installation.endpoint, tokens, options.vocabulary))
            print(host_lines(installation.log_of("worker")), file=sys.stderr)
    return {"tokens": tokens} | {
        side: {"first_token_ms": [ms for ms, _ in turns], "cached_tokens": [cached for _, cached in turns]}
        for side, turns in found.items()
    }


def host_lines(log: str) -> str:
    """Return the lines of a worker's log about its host file."""
    return "\n".join(line for line in log.splitlines() if "host tier" in line)


async def lanes(endpoint: str, cpu: bool, vocabulary: int) -> tuple[float, int]:
    """Return tokens a second, prompts included, of requests that share nothing, and the blocks copied to the host."""
    count, prompt, tokens, requests = (4, 64, 8, 2) if cpu else (LANES, LANE_PROMPT, LANE_TOKENS, LANE_REQUESTS)
    rng = np.random.default_rng(0)

    async def lane(number: int) -> None:
        for _ in range(number):
            turn = await asked(streams, rng.integers(0, vocabulary, prompt), max_tokens=tokens)
            assert turn.cached_tokens < prompt // 10, "a random prompt was found"

    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=READY_S) as client:
        await client.wait_ready(READY_S)
        streams = AsyncStreams(client)
        await asyncio.gather(*(lane(1) for _ in range(count)))
        began = time.monotonic()
        await asyncio.gather(*(lane(requests) for _ in range(count)))
        took = time.monotonic() - began
        (pool,) = (await client.stats()).pools
        streams.close()
    return count * requests * (prompt + tokens) / took, pool.host_saved_total


def measure_throughput(options: argparse.Namespace, kv_dtype: str, each: int) -> dict[str, Any]:
    """Return tokens a second, and copied blocks, without the tier, with it, and where it copies all blocks."""
    count, tokens = (4, 72) if options.cpu else (LANES, LANE_PROMPT + LANE_TOKENS)
    held = count * (tokens // BLOCK_SIZE + 2)
    found: dict[str, Any] = {"copied_blocks": {}}
    with host_folder(2 * held * each) as folder:
        tier = {"host_bytes": 2 * held * each, "host_dir": folder}
        learn = {"host_learn_blocks": 8} if options.cpu else {}
        sides: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
            "without": ({}, {}),
            "with": (tier, learn),
            "copying all": (tier, {"host_learn_blocks": 0}),
        }
        for side, (host, cache) in sides.items():
            plan = plan_of(options, kv_dtype, tokens, count, blocks=held, **host)
            with open_served(plan, 1, tokens + 64, cache=cache) as installation:
                rate, copied = asyncio.run(lanes(installation.endpoint, options.cpu, options.vocabulary))
            found[side], found["copied_blocks"][side] = rate, copied
    return found


def lines_of(kv_dtype: str, found: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of the table: dtype, figure, beside, ours, and their ratio."""
    copies = found.get("copies", {})
    for pages in ("", ", small pages"):
        for key, name, places in (("share of runs", "runs", "runs"), ("share", "ours", "random places")):
            for way, share in copies.get(key + pages, {}).items():
                plain, ours = copies["plain"][way], copies[name + pages][way]
                yield [kv_dtype, f"copy {way}, {places}{pages}, GB/s", f"{plain:.1f}", f"{ours:.1f}", f"{share:.3f}"]
    steps = found.get("steps", {})
    for copied in map(str, COPIED[1:] if steps else ()):
        for name in ("mean_ms", "p99_ms"):
            before, after = steps["0"][name], steps[copied][name]
            yield [
                kv_dtype,
                f"step with {copied} blocks, {name}",
                f"{before:.3f}",
                f"{after:.3f}",
                f"{after / before:.3f}",
            ]
    if "first" in found:
        computed, cached = (median(found["first"][side]["first_token_ms"]) for side in ("computed", "found"))
        name = f"first token of {found['first']['tokens']}, ms"
        yield [kv_dtype, name, f"{computed:.1f}", f"{cached:.1f}", f"{computed / cached:.2f}"]
    if "throughput" in found:
        without = found["throughput"]["without"]
        for side, name in (("with", "no hits"), ("copying all", "no hits, all copied")):
            rate = found["throughput"][side]
            yield [kv_dtype, f"tokens a second, {name}", f"{without:.0f}", f"{rate:.0f}", f"{rate / without:.3f}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--kv", default="bfloat16,fp8", help="dtypes of K and V")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--megabytes", type=int, default=0, help="of the copies; default: 1024, on a CPU 32")
    parser.add_argument("--tokens", type=int, default=32_768, help="of the long prompt")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    options.vocabulary = 97 if options.cpu else 32_000
    options.model = MODEL
    device, parts = open_device("cpu" if options.cpu else "auto"), options.parts.split(",")
    dtypes = ["float32"] if options.cpu else options.kv.split(",")
    results: dict[str, Any] = {"device": device.name}
    with tempfile.TemporaryDirectory() as folder:
        if options.cpu:
            options.model = tiny_model(Path(folder), 1024)
        for kv_dtype in dtypes:
            shape = LayerShape(2, 16) if options.cpu else LayerShape(HEADS, HEAD)
            geometry = KvGeometry((shape,) * (2 if options.cpu else LAYERS), BLOCK_SIZE, kv_dtype)
            size = (options.megabytes or (32 if options.cpu else 1024)) << 20
            own = results[kv_dtype] = {}
            measures: dict[str, Callable[[], Any]] = {
                "copies": lambda: measure_copies(device, geometry, size),  # noqa: B023 - called in this round
                "steps": lambda: measure_steps(device, options.model, kv_dtype, options.cpu),  # noqa: B023
                "first": lambda: measure_first(options, kv_dtype, geometry.bytes_per_block),  # noqa: B023
                "throughput": lambda: measure_throughput(options, kv_dtype, geometry.bytes_per_block),  # noqa: B023
            }
            for part in parts:
                began = time.monotonic()
                own[part] = measures[part]()
                gc.collect()
                device.release_cached()
                device.release_host_buffers()
                print(f"{kv_dtype} {part}: {time.monotonic() - began:.0f} s: {own[part]}", file=sys.stderr, flush=True)
    rows = [line for kv_dtype in dtypes for line in lines_of(kv_dtype, results[kv_dtype])]
    header = ["K and V", "figure", "without the tier", "with it", "ratio"]
    report(f"host tier, {device.name}", header, rows, results, options.json)


if __name__ == "__main__":
    main()
