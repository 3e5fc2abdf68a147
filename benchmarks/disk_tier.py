"""Time to the first token of a prompt: computed, and found on the disk.

    python -m benchmarks.disk_tier [--tokens 4096] [--prompts 4] [--host 2.2] [--folder DIR] [--json FILE]
    python -m benchmarks.disk_tier --gpu [--tokens 32768] [--folder DIR]         one GPU
    python -m benchmarks.disk_tier --tiny                                        a tiny model, to try the benchmark

The shape of SmolLM2-135M with random weights, float32, or with `--gpu` of Llama-3.1-8B in bfloat16, through coordinator
and client, one request at a time. The pool holds one prompt and the host file `--host` prompts, so prompts in turn
leave both, and are on the disk alone when they are asked for again. Each is asked for twice when it is new: where
nothing is ever found again, the host tier copies less and less. Before each request for what is on the disk the tier's
files leave the kernel's page cache. Last comes what a plain read of such a file gives, of as many bytes as a prompt
has, with four threads past the page cache where the file system allows that.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvforge.client.aio import AsyncClient, AsyncStreams

from .gpu_step import tiny_model
from .host_tier import BUSY_BLOCKS, host_folder
from .host_tier import HEAD as GPU_HEAD
from .host_tier import HEADS as GPU_HEADS
from .host_tier import LAYERS as GPU_LAYERS
from .host_tier import MODEL as GPU_MODEL
from .next_turn import READY_S, asked
from .report import report
from .step_plan import BLOCK_SIZE, Plan
from .step_served import open_served

MODEL, LAYERS, HEADS, HEAD, FLOAT = "smollm2-135m", 30, 3, 64, 4
TINY_BYTES = 2 * 2 * 2 * 16 * FLOAT  # of a token: layers, K and V, heads, head
GPU_BYTES = GPU_LAYERS * 2 * GPU_HEADS * GPU_HEAD * 2  # of a token in bfloat16
SETTLE_S = 0.05
READERS, READ_BYTES = 4, 4 << 20


def forget_pages(folder: Path) -> None:
    """Write the files of the disk tier to the disk, and drop them from the page cache."""
    for path in folder.glob("kvforge-disk-*/*/segment-*"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def plain_rate(folder: Path, size: int) -> float:
    """Return the GB/s of reading so many bytes of the disk tier's files in order, with READERS threads."""
    forget_pages(folder)
    parts = list[tuple[Path, int]]()
    for path in sorted(folder.glob("kvforge-disk-*/*/segment-*")):
        parts += [(path, at) for at in range(0, path.stat().st_size - READ_BYTES + 1, READ_BYTES)]
    parts = parts[: max(1, size // READ_BYTES)]

    def read(part: tuple[Path, int]) -> int:
        path, at = part
        buffer = mmap.mmap(-1, READ_BYTES)  # on whole pages, as reads past the cache must be
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            file = os.open(path, os.O_RDONLY)
        try:
            return os.preadv(file, [buffer], at)
        finally:
            os.close(file)

    began = perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        done = sum(readers.map(read, parts))
    return done / (perf_counter() - began) / 1e9


async def settled(client: AsyncClient) -> Any:
    """Return the statistics of the disk once no copy is in flight."""
    while True:
        await asyncio.sleep(SETTLE_S)
        (pool,) = (await client.stats()).pools
        if pool.disk is not None and not pool.disk.referenced and not pool.referenced:
            return pool.disk


async def measure(endpoint: str, folder: Path, tokens: int, count: int, vocabulary: int) -> dict[str, Any]:
    """Return milliseconds to the first token and cached tokens of each request, and the disk's counters."""
    found: dict[str, list[tuple[float, int]]] = {"computed": [], "found on the disk": []}
    async with AsyncClient(endpoint, timeout_s=READY_S, connect_timeout_s=READY_S) as client:
        await client.wait_ready(READY_S)
        streams = AsyncStreams(client)
        prompts = [np.random.default_rng(number).integers(0, vocabulary, tokens) for number in range(count)]
        await asked(streams, np.arange(64) % vocabulary, max_tokens=4)  # warms up
        for side, turns in found.items():
            for prompt in prompts:
                disk = await settled(client)
                if turns is not found["computed"]:
                    forget_pages(folder)
                turn = await asked(streams, prompt, max_tokens=4)
                if turns is found["computed"]:
                    await asked(streams, prompt, max_tokens=4)
                turns.append((1e3 * turn.first_s, turn.cached_tokens))
                print(f"{side}: {1e3 * turn.first_s:.0f} ms, {turn.cached_tokens} cached", file=sys.stderr, flush=True)
        disk = await settled(client)
        streams.close()
    names = ("saved_total", "loaded_total", "unsaved_total", "late_total", "declined_total")
    counters = {name: getattr(disk, name) for name in names}
    return {"first_token_ms": found, "disk": counters}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=0, help="of a prompt [4096; 32768 on a GPU]")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--host", type=float, default=2.2, help="prompts that the host file holds")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, 512 tokens")
    parser.add_argument("--gpu", action="store_true", help="Llama-3.1-8B's shape on one GPU")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    tokens = 512 if options.tiny else options.tokens or (32_768 if options.gpu else 4096)
    held = tokens // BLOCK_SIZE + BUSY_BLOCKS
    token_bytes = TINY_BYTES if options.tiny else GPU_BYTES if options.gpu else LAYERS * 2 * HEADS * HEAD * FLOAT
    each = BLOCK_SIZE * token_bytes
    host = int(options.host * held) * each
    with (
        tempfile.TemporaryDirectory(prefix="kvf-bench-disk-", dir=options.folder) as disk,
        host_folder(host) as memory,
        tempfile.TemporaryDirectory() as models,
    ):
        model = tiny_model(Path(models), 1024) if options.tiny else GPU_MODEL if options.gpu else MODEL
        worker = {"blocks": held, "host_bytes": host, "host_dir": memory, "disk_dir": disk}
        worker["disk_bytes"] = 2 * options.prompts * held * each + (256 << 20)
        step_tokens = 8192 if options.gpu else 512
        plan = Plan(model, (4,), tokens, 8, step_tokens, not options.gpu, worker=tuple(worker.items()))
        with open_served(plan, 1, tokens + 64) as installation:
            vocabulary = 97 if options.tiny else 32_000
            results = asyncio.run(measure(installation.endpoint, Path(disk), tokens, options.prompts, vocabulary))
        plain = results["plain_read_gb_per_s"] = plain_rate(Path(disk), tokens * token_bytes)
    middle = {side: median(ms for ms, _ in turns) for side, turns in results["first_token_ms"].items()}
    computed = middle["computed"]
    rows = [[side, f"{ms:.0f}", f"{computed / ms:.1f}"] for side, ms in middle.items()]
    read_ms = tokens * token_bytes / plain / 1e6
    rows.append([f"its bytes by a plain read, {plain:.1f} GB/s", f"{read_ms:.0f}", f"{computed / read_ms:.1f}"])
    header = [f"prompt of {tokens} tokens", "first token, ms (median)", "times as fast"]
    title = "disk tier, Llama-3.1-8B's shape, GPU" if options.gpu else "disk tier, one CPU thread"
    report(title, header, rows, results | {"tokens": tokens}, options.json)


if __name__ == "__main__":
    main()
