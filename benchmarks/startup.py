"""Start-up: from `kvforge up` to the first token, by phase, with empty and with warm caches.

    python -m benchmarks.startup [--model llama-3.1-8b] [--shards 4] [--warm 2] [--json FILE] [--log FILE] [--tiny]

A folder with random bfloat16 weights in safetensors is written first. Then, one after the other:

plain      threads that read the folder with preadv into buffers of their own, nothing else: from the disk (page cache
           dropped before) and from the page cache
first      `kvforge up` with empty caches (compiled kernels, passed checks) and without the files in the page cache
warm       `kvforge up` again, with the caches and the page cache of the start before

`up` is the time from the start of the command to the worker's process; the worker's phases are those of its log;
`first token` is one token of a prompt of 16, from when a client sees the worker ready. The share is the rate at which
the worker read its weights, divided by the plain read's from the same place. --tiny does the same with a tiny model on
the CPU; its numbers have no meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np

from kvforge import Client, SamplingParams
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.transport import client_endpoint

from .gpu_step import tiny_model
from .report import report

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "worker" / "model_configs"
CHUNK_BYTES = 16 << 20
PLAIN_THREADS = (4, 8, 16)
START_S = {"first": 120.0, "warm": 60.0}
PROMPT_TOKENS = 16
STD = 0.02
PHASES = re.compile(r"started in ([\d.]+) s: (.*)")
PHASE = re.compile(r"(.+?) ([\d.]+)(?:, |$)")
READ = re.compile(r"read ([\d.]+) GB of weights in ([\d.]+) s")
TAIL_LINES = 60


@dataclass(frozen=True)
class Start:
    """One start: seconds of each phase in order, of the whole start, and of reading weights alone (0: not known)."""

    phases: dict[str, float]
    total_s: float
    read_gb: float
    read_s: float


def write_model(config: Path, folder: Path, shards: int) -> int:
    """Write random weights of a configuration into a folder; return their bytes."""
    from kvforge.worker.loading.lazy_compiler import less_of_torch

    shutil.copy(config, folder / "config.json")
    with less_of_torch():  # its compiler takes longer to import than all the rest
        import torch
        import transformers
        from accelerate import init_empty_weights

        loaded = transformers.AutoConfig.from_pretrained(folder)
        with init_empty_weights():
            module = transformers.AutoModelForCausalLM.from_config(loaded, dtype=torch.bfloat16)
    tied = getattr(loaded, "tie_word_embeddings", False)
    shapes = {name: tuple(each.shape) for name, each in module.state_dict().items()}
    shapes = {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}
    total: int = sum(2 * prod(shape) for shape in shapes.values())
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled > total / shards and len(parts) < shards:
            parts.append({})
            filled = 0
        parts[-1][name] = shape
        filled += 2 * prod(shape)
    files = [folder / f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(_write_shard, files, parts))
    index = {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")
    return total


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    generator = torch.Generator(device).manual_seed(len(encoded))
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            made = made.fill_(1.0) if "norm" in name else made.normal_(std=STD, generator=generator)
            out.write(made.view(torch.uint8).cpu().numpy().data)
        out.flush()
        os.fsync(out.fileno())


def drop_pages(files: list[Path]) -> None:
    """Remove the files from the page cache, as far as the system allows."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def plain_read_s(files: list[Path], threads: int) -> float:
    """Return the seconds in which `threads` threads read all files, each into one buffer of its own."""
    pieces = [
        (file, at, min(CHUNK_BYTES, size - at))
        for file in files
        for size in (file.stat().st_size,)
        for at in range(0, size, CHUNK_BYTES)
    ]
    descriptors = {file: os.open(file, os.O_RDONLY) for file in files}
    buffers = [np.ones(CHUNK_BYTES, np.uint8) for _ in range(threads)]  # their pages exist before the clock runs
    left = iter(pieces)

    def read(buffer: np.ndarray[Any, Any]) -> None:
        for file, at, size in left:  # `next` of a list's iterator is atomic
            done = 0
            while done < size:
                done += os.preadv(descriptors[file], [buffer[done:size].data], at + done)

    try:
        with ThreadPoolExecutor(threads) as pool:
            began = monotonic()
            list(pool.map(read, buffers))
            return monotonic() - began
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class Started:
    """A running `kvforge up`, with its output so far and when each line came."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.began = monotonic()
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((monotonic(), line.rstrip()))

    def line(self, pattern: re.Pattern[str]) -> tuple[float, re.Match[str]] | None:
        """Return the first line so far that the pattern matches, with its time."""
        for at, line in list(self.lines):
            if found := pattern.search(line):
                return at, found
        return None

    def wait_for(self, kv: Client, limit_s: float) -> float:
        """Return when a client sees the worker ready. Raises RuntimeError if it does not become ready in time."""
        deadline = self.began + limit_s
        while monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"kvforge up ended with status {self.process.returncode}")
            with suppress(KvforgeError):
                kv.wait_ready(0.5)
                return monotonic()
            sleep(0.01)
        raise RuntimeError(f"the worker was not ready after {limit_s:g} s")

    def end(self) -> None:
        """Stop it, and wait for its output to end."""
        for number, wait_s in ((signal.SIGINT, 20.0), (signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
            self.process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
                break
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def started(command: list[str], environment: dict[str, str], log: str | None) -> Iterator[Started]:
    """Run `kvforge up`; print the end of its output if anything fails. log: a file for the whole output."""
    running = Started(command, environment)
    try:
        yield running
    except BaseException:
        for _, line in running.lines[-TAIL_LINES:]:
            print(line, file=sys.stderr, flush=True)
        raise
    finally:
        running.end()
        if log is not None:
            with Path(log).open("a", encoding="utf-8") as file:
                file.writelines(f"{at - running.began:8.3f} {line}\n" for at, line in [*running.lines, (0.0, "")])


def measure_start(folder: Path, caches: Path, limit_s: float, options: argparse.Namespace) -> Start:
    """Start `kvforge up` once, and return where the time to the first token went."""
    runtime = Path(tempfile.mkdtemp(prefix="kvf-start-"))
    command = [sys.executable, "-m", "kvforge", "--runtime-dir", str(runtime / "r"), "up", str(folder)]
    command += ["--device", "cpu", "--kv-bytes", str(1 << 24)] if options.tiny else []
    command += options.more
    environment = os.environ | {
        "XDG_CACHE_HOME": str(caches),
        "KVFORGE_CACHE_DIR": str(caches / "kvforge"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
    }
    try:
        client = Client(client_endpoint(runtime / "r"), timeout_s=30.0)
        with client as kv, started(command, environment, options.log) as running:
            ready = running.wait_for(kv, limit_s)
            prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
            request = kv.submit(prompt, max_tokens=1, sampling=SamplingParams(temperature=0.0))
            request.result(timeout_s=60.0)
            total = monotonic() - running.began
            return _start_of(running, ready, total)
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def _start_of(running: Started, ready: float, total: float) -> Start:
    for _ in range(100):
        if running.line(PHASES) is not None:
            break
        sleep(0.05)
    found, read = running.line(PHASES), running.line(READ)
    if found is None:
        raise RuntimeError("the worker's log names no phases")
    registered, match = found
    inside = {phase: float(took) for phase, took in PHASE.findall(match[2])}
    up = registered - float(match[1]) - running.began
    phases = {"up": up, **inside, "seen ready": max(ready - registered, 0.0)}
    phases["first token"] = total - (max(ready, registered) - running.began)
    gigabytes, seconds = (float(read[1][1]), float(read[1][2])) if read is not None else (0.0, 0.0)
    return Start(phases, total, gigabytes, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="name of a configuration in worker/model_configs")
    parser.add_argument("--folder", type=Path, help="where the weights are written, removed at the end")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2, help="starts with warm caches")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--log", help="a file for the output of all starts, with seconds since each start")
    parser.add_argument("more", nargs="*", help="further options of kvforge up, after --")
    options = parser.parse_args(arguments)
    place = Path(tempfile.mkdtemp(prefix="kvf-startup-", dir=options.folder))
    try:
        results = _measured(place, options)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    _print(results, options)
    return 0


def _measured(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder, caches = place / options.model, place / "caches"
    folder.mkdir()
    caches.mkdir()
    config = CONFIGS / f"{options.model}.json"
    if options.tiny:
        tiny_model(place)
        config = place / "config.json"
    began = monotonic()
    subprocess.run(  # a process of its own, so that its memory on the GPU is free again
        [sys.executable, "-c", _WRITE, str(config), str(folder), str(options.shards)],
        check=True,
        cwd=ROOT,
        timeout=180,
    )
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print(f"{size / 1e9:.2f} GB in {len(files)} files, written in {monotonic() - began:.1f} s", file=sys.stderr)
    plain: dict[str, float] = {}
    drop_pages(files)
    plain["disk 16"] = size / 1e9 / plain_read_s(files, 16)
    for threads in PLAIN_THREADS:
        plain[f"page cache {threads}"] = size / 1e9 / plain_read_s(files, threads)
    print(f"plain read, GB/s by threads: {plain}", file=sys.stderr, flush=True)
    drop_pages(files)
    starts: dict[str, Any] = {}
    for name in ("first", *(f"warm {number}" for number in range(1, options.warm + 1))):
        try:
            start = measure_start(folder, caches, START_S[name.split()[0]], options)
        except (RuntimeError, KvforgeError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            starts[name] = {"error": str(error)}
            continue
        rate = start.read_gb / start.read_s if start.read_s else 0.0
        base = plain["disk 16"] if name == "first" else max(plain[f"page cache {each}"] for each in PLAIN_THREADS)
        starts[name] = {
            "total_s": start.total_s,
            "phases_s": start.phases,
            "read_gb_per_s": rate,
            "share_of_plain_read": rate / base,
        }
        print(f"{name}: {json.dumps(starts[name])}", file=sys.stderr, flush=True)
    return {"bytes": size, "plain_read_gb_per_s": plain, "starts": starts}


_WRITE = """
import sys
from pathlib import Path
from benchmarks.startup import write_model
write_model(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
"""


def _print(results: dict[str, Any], options: argparse.Namespace) -> None:
    names = [name for name, start in results["starts"].items() if "error" not in start]
    phases = dict.fromkeys(phase for name in names for phase in results["starts"][name]["phases_s"])
    rows: list[list[object]] = [
        [phase, *(f"{results['starts'][name]['phases_s'].get(phase, 0.0):.2f}" for name in names)] for phase in phases
    ]
    rows.append(["total", *(f"{results['starts'][name]['total_s']:.2f}" for name in names)])
    rows.append(["weights, GB/s", *(f"{results['starts'][name]['read_gb_per_s']:.1f}" for name in names)])
    rows.append(["share of a plain read", *(f"{results['starts'][name]['share_of_plain_read']:.2f}" for name in names)])
    title = f"seconds from `kvforge up` to the first token, {options.model}"
    report(title, ["phase", *names], rows, results, options.json)


if __name__ == "__main__":
    sys.exit(main())
