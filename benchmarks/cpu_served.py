"""Serving on a CPU by `kvforge up` and by llama.cpp's llama-server: the same prompts, in alternation.

    python -m benchmarks.cpu_served [--model NAME] [--dtypes float32 bfloat16] [--llama-server PATH --gguf FILE ...]
                                    [--clients 1 8] [--prompt 512] [--tokens 128] [--rounds 3] [--shared 0]
                                    [--checkout FOLDER ...] [--up "OPTIONS"] [--json FILE]

Each side is a server as its users start it: a coordinator, a worker and the client library, or llama-server and its
HTTP streams, with a slot for each client. Every client sends one prompt of its own at the same moment and reads its
tokens one by one; greedy, the end token ignored. In each round every side is started, warmed by a request, measured
with each number of clients, and stopped; figures are medians over the rounds. The i-th dtype is compared with the i-th
GGUF file; a checkout of kvforge in another folder is a separate side for each dtype.

Output tokens a second are all tokens over the time from the first request sent to the last token read. Run it on an
idle machine: other processes slow each side differently.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvforge import AsyncClient, SamplingParams
from kvforge.process.leash import leashed
from kvforge.protocol.errors import Unavailable
from kvforge.protocol.exits import INTERRUPTED
from kvforge.protocol.transport import client_endpoint

from .report import report

ROOT = Path(__file__).resolve().parents[1]
READY_S, MEASURE_S, STOP_S = 180.0, 300.0, 15.0
WARM_TOKENS = 8
TOKEN_FIRST, TOKEN_LAST = 1000, 40_000  # ordinary words of any vocabulary
Prompt = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass
class Answers:
    """Times (monotonic seconds) of each client's tokens and of its request."""

    started: float
    times: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Output tokens/s, times to the first token, times between tokens."""
        first_s = [at[0] - self.started for at in self.times]
        gaps_ms = np.concatenate([np.diff(at) for at in self.times]) * 1e3
        last = max(at[-1] for at in self.times)
        return {
            "tokens_per_s": sum(map(len, self.times)) / (last - self.started),
            "first_mean_s": float(np.mean(first_s)),
            "first_p99_s": float(np.percentile(first_s, 99)),
            "gap_p50_ms": float(np.percentile(gaps_ms, 50)),
            "gap_p99_ms": float(np.percentile(gaps_ms, 99)),
        }


class Server:
    """A server process that ends with this one; its output goes to a file in its folder. The exit stops it and cleans
    up."""

    def __init__(self, command: list[str], folder: Path, cwd: Path) -> None:
        self._command, self.folder, self._cwd = command, folder, cwd
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        environment["PYTHONPATH"] = str(self._cwd)  # import the checkout's packages
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                leashed(self._command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._cwd, env=environment
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self.process is not None
        if kind is not None:
            print(self.log()[-2000:], file=sys.stderr)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # twice: no draining
            self.process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
                break
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Return the server's output so far."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def check(self) -> None:
        """Raise Unavailable with the last output line if the server has exited."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise Unavailable(f"the server ended: {self.log().strip().splitlines()[-1:]}")


def resident_mb(pid: int) -> float:
    """Resident memory of a process, in 10^6 bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024 / 1e6


class Kvforge:
    """`kvforge up` of a checkout, and one client of its library for each prompt."""

    def __init__(self, options: argparse.Namespace, dtype: str, checkout: Path, label: str) -> None:
        self.name, self._dtype, self._checkout, self._options = f"kvforge {dtype}{label}", dtype, checkout, options
        self._server: Server | None = None

    def start(self, folder: Path) -> Server:
        """The server, to be entered."""
        self._runtime = folder / "kvforge" / "r"
        ours = ["-m", "kvforge", "--runtime-dir", str(self._runtime), "up", "--model", self._options.model]
        blocks = max(self._options.clients) * (-(-(self._options.prompt + self._options.tokens) // 16) + 2)
        dtype, _, weights = self._dtype.partition(":")
        ours += ["--device", "cpu", "--dtype", dtype, *(["--weight-dtype", weights] if weights else [])]
        ours += ["--blocks", str(blocks), *shlex.split(self._options.up)]
        self._server = Server([sys.executable, *ours], folder / "kvforge", self._checkout)
        return self._server

    async def ready(self) -> None:
        """Waits until it serves."""
        deadline = monotonic() + READY_S
        assert self._server is not None
        while "ready: " not in self._server.log():
            self._server.check()
            if monotonic() > deadline:
                raise Unavailable(f"kvforge was not ready within {READY_S} s")
            await asyncio.sleep(0.2)

    async def memory_mb(self) -> float:
        """The worker's resident memory."""
        async with AsyncClient(client_endpoint(self._runtime)) as kv:
            return resident_mb((await kv.health()).workers[0].pid)

    async def connect(self, stack: AsyncExitStack, count: int) -> list[AsyncClient]:
        """Open `count` connections."""
        endpoint = client_endpoint(self._runtime)
        return [await stack.enter_async_context(AsyncClient(endpoint, timeout_s=60.0)) for _ in range(count)]

    async def read(self, client: AsyncClient, prompt: Prompt, tokens: int) -> list[float]:
        """When each token came."""
        request = await client.submit(
            prompt, max_tokens=tokens, sampling=SamplingParams(temperature=0.0, ignore_eos=True)
        )
        return [monotonic() async for _ in request]


class Llama:
    """llama-server with a slot for each client; its clients speak HTTP with server-sent events."""

    def __init__(self, options: argparse.Namespace, file: Path) -> None:
        self.name, self._file, self._options = f"llama-server {file.stem}", file, options
        self._server: Server | None = None
        self._port = 0

    def start(self, folder: Path) -> Server:
        """The server, to be entered."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        slots = max(self._options.clients)
        context = slots * (self._options.prompt + self._options.tokens + 32)
        cores = str(len(os.sched_getaffinity(0)))
        command = [str(self._options.llama_server), "-m", str(self._file), "--port", str(self._port), "-t", cores]
        command += ["-np", str(slots), "-c", str(context), *shlex.split(self._options.llama_options)]
        self._server = Server(command, folder / "llama", folder)
        return self._server

    async def ready(self) -> None:
        """Waits until it serves."""
        deadline = monotonic() + READY_S
        assert self._server is not None
        while True:
            self._server.check()
            with suppress(OSError):
                if any([b" 200 " in line async for line in self._ask(b"GET /health HTTP/1.0\r\n\r\n")]):
                    return
            if monotonic() > deadline:
                raise Unavailable(f"llama-server was not ready within {READY_S} s")
            await asyncio.sleep(0.2)

    async def memory_mb(self) -> float:
        """Its resident memory."""
        assert self._server is not None
        assert self._server.process is not None
        return resident_mb(self._server.process.pid)

    async def connect(self, stack: AsyncExitStack, count: int) -> list[None]:  # noqa: ARG002 - as the other side's
        """Each request makes a connection of its own."""
        return [None] * count

    async def _ask(self, question: bytes) -> AsyncIterator[bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(question)
            async for line in reader:
                yield line
        finally:
            writer.close()

    async def read(self, client: None, prompt: Prompt, tokens: int) -> list[float]:  # noqa: ARG002
        """When each token came."""
        body = json.dumps(
            {
                "prompt": prompt.tolist(),
                "n_predict": tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": True,
                "return_tokens": True,
            }
        ).encode()
        head = f"POST /completion HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        times: list[float] = []
        async for line in self._ask(head.encode() + body):
            if line.startswith(b"data: {"):
                now, event = monotonic(), json.loads(line[6:])
                times += [now] * len(event.get("tokens", ()))
        return times


Side = Kvforge | Llama


def prompts_of(options: argparse.Namespace, seed: int, count: int) -> list[Prompt]:
    """Random tokens: the work does not depend on what they mean. All prompts share the first `--shared` tokens."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(TOKEN_FIRST, TOKEN_LAST, (count, options.prompt)).astype(np.int32)
    prompts[:, : options.shared] = prompts[0, : options.shared]
    return list(prompts)


async def ask(side: Any, clients: list[Any], prompts: list[Prompt], tokens: int) -> Answers:
    """All clients at once."""
    async with asyncio.timeout(MEASURE_S):
        answers = Answers(monotonic())
        reads = (side.read(client, prompt, tokens) for client, prompt in zip(clients, prompts, strict=True))
        answers.times = await asyncio.gather(*reads)
    short = [len(times) for times in answers.times if len(times) != tokens]
    if short:
        raise Unavailable(f"{side.name}: {tokens} tokens were requested, but a client received {short}")
    return answers


async def measure(side: Side, folder: Path, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Start a server once; return the clients' figures by number of clients, and the memory afterwards."""
    found: dict[str, Any] = {}
    with side.start(folder):
        await side.ready()
        async with AsyncExitStack() as stack:
            clients = await side.connect(stack, max(options.clients))
            await ask(side, clients[:1], prompts_of(options, 1000 * number, 1), WARM_TOKENS)
            for count in options.clients:
                prompts = prompts_of(options, 1000 * number + count, count)
                found[str(count)] = (await ask(side, clients[:count], prompts, options.tokens)).summary()
        found["memory_mb"] = await side.memory_mb()
    return found


def medians(runs: list[dict[str, Any]], clients: list[int]) -> dict[str, Any]:
    """Return the medians of one side over its rounds."""
    found: dict[str, Any] = {"memory_mb": statistics.median(run["memory_mb"] for run in runs)}
    for count in map(str, clients):
        found[count] = {name: statistics.median(run[count][name] for run in runs) for name in runs[0][count]}
    return found


def rows_of(found: dict[str, Any], pairs: list[tuple[str, str]], clients: list[int]) -> list[list[object]]:
    """One line for each side and number of clients, then one for each pair."""
    formats = {
        "tokens_per_s": ".1f",
        "first_mean_s": ".2f",
        "first_p99_s": ".2f",
        "gap_p50_ms": ".0f",
        "gap_p99_ms": ".0f",
    }
    rows: list[list[object]] = []
    for count in map(str, clients):
        for name, values in found.items():
            shown = [format(values[count][key], how) for key, how in formats.items()]
            rows.append([name, count, *shown, f"{values['memory_mb']:.0f}"])
        for ours, theirs in pairs:
            ratios = [f"{found[ours][count][key] / found[theirs][count][key]:.2f}" for key in formats]
            memory = f"{found[ours]['memory_mb'] / found[theirs]['memory_mb']:.2f}"
            rows.append([f"{ours} / {theirs}", count, *ratios, memory])
    return rows


def sides_of(options: argparse.Namespace) -> tuple[list[Side], list[tuple[str, str]]]:
    """Return the sides and the pairs to compare."""
    ours = [Kvforge(options, dtype, ROOT, "") for dtype in options.dtypes]
    others = [Llama(options, file.resolve()) for file in options.gguf] if options.llama_server is not None else []
    pairs = [(a.name, b.name) for a, b in zip(ours, others, strict=False)]
    sides: list[Side] = []
    for place, checkout in enumerate(options.checkout):
        label = f" ({checkout.name})" if len(options.checkout) > 1 else " (other)"
        before = [Kvforge(options, dtype, checkout.resolve(), label) for dtype in options.dtypes]
        pairs += [(a.name, b.name) for a, b in zip(ours, before, strict=True)]
        sides[place * len(before) :] = before
    return [*sides, *ours, *others], pairs


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_served",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--model", default="smollm2-135m", help="as `kvforge up` takes it [smollm2-135m]")
    parser.add_argument(
        "--dtypes",
        nargs="*",
        default=["float32", "bfloat16"],
        help="as --dtype takes them, or DTYPE:WEIGHTS [float32 bfloat16]",
    )
    parser.add_argument("--up", default="", help="more options of `kvforge up`, as one argument")
    parser.add_argument(
        "--checkout", type=Path, nargs="*", default=[], help="other checkouts of kvforge to compare with"
    )
    parser.add_argument("--llama-server", type=Path, help="the binary; without it kvforge is measured alone")
    parser.add_argument("--llama-options", default="", help="more options of llama-server, as one argument")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="GGUF files in the order of the dtypes")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="[1 8]")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt [512]")
    parser.add_argument("--shared", type=int, default=0, help="tokens of a prefix that all prompts of a run share [0]")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each [128]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    options = parser.parse_args()
    sides, pairs = sides_of(options)
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    folder = Path(tempfile.mkdtemp(prefix="kvf-"))
    try:
        for number in range(options.rounds):
            for side in sides:
                runs[side.name].append(asyncio.run(measure(side, folder, options, number)))
                print(f"round {number + 1}, {side.name}: {runs[side.name][-1]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {name: medians(each, options.clients) for name, each in runs.items()}
    settings = {"prompt_tokens": options.prompt, "shared_tokens": options.shared, "new_tokens": options.tokens}
    results = {"model": Path(options.model).name, **settings, "rounds": options.rounds, "medians": found, "runs": runs}
    title = (
        f"{results['model']}, {options.prompt}-token prompts, {options.tokens} new tokens, medians of {options.rounds}"
    )
    columns = ("clients", "tokens/s", "first token s", "p99", "gap p50 ms", "p99", "memory MB")
    report(title, ["server", *columns], rows_of(found, pairs, options.clients), results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
