"""Capacity of one gateway process on one core, and the latency it adds to a request.

    python -m benchmarks.gateway [--only NAME ...] [--vllm PYTHON] [--json benchmarks/results/gateway.json]

The gateway is pinned to one core. A null server, which speaks the coordinator's protocol and invents tokens, shares
another core with the driver of the load harness: the figures exclude the time of coordinator and workers. Requests
carry token ids and are streamed. Scenarios:

requests     answers of 16 tokens, each all at once
streams      500 concurrent streams of 50 tokens a second each, all in step
first-token  few requests of one token: time to the first token, less that over ZeroMQ in the same minute
asked        32 clients in a closed loop, answers of 16 tokens: the throughput limit
read         a hundred clients in a closed loop, streams of 50 tokens a second, all in step
million      (with --only) `asked` until a million requests are answered: resident memory; a quarter of an hour

--vllm: the Python of an environment in which vLLM is installed. `asked` and `read` are then run with its API server,
too (`benchmarks.vllm_api`: over an in-process engine without cost), after those of the gateway.

cpu: the gateway's processor seconds a second; us/request and us/token: the same, for each. late: the driver's lateness,
by which the harness judges a run. MB: resident, before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.loadtest.drive.driver_check import null_server
from kvforge.loadtest.drive.outcome import FINISHED, DriverStats, Outcome
from kvforge.loadtest.drive.processes import drive
from kvforge.loadtest.drive.spec import HTTP, KVFORGE, RunSpec
from kvforge.models.store import pull

from .load_capacity import cpu_s
from .load_driver import Scenario, pinned, row
from .report import report
from .vllm_scheduler import MODEL as VLLM_MODEL

PROMPT_TOKENS = 64
MODEL = "smollm2-135m"  # the source of the tokenizer
HEADER = (
    "", "streams", "requests/s", "tokens/s", "first ms p50", "p99", "cpu", "us/request", "us/token", "late ms p99",
    "failed", "MB",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load and its duration. rate: requests a second; clients: closed-loop clients, without a rate; pace: tokens a
    second of each request; 0: all at once. requests: repeat over one gateway until so many were answered."""

    rate: float = 0
    clients: int = 0
    tokens: int
    pace: float
    warm_s: float
    measured_s: float = 10.0
    requests: int = 0
    vocab: int = 30_000


CASES = {
    "requests": Case(rate=800, tokens=16, pace=0, warm_s=2),
    "streams": Case(rate=265, tokens=100, pace=50, warm_s=4),
    "first-token": Case(rate=50, tokens=1, pace=0, warm_s=2),
    "asked": Case(clients=32, tokens=16, pace=0, warm_s=3),
    "read": Case(clients=100, tokens=100, pace=50, warm_s=4),
    "million": Case(clients=32, tokens=16, pace=0, warm_s=0, measured_s=20, requests=1_000_000),
}
BRIEF = [name for name in CASES if name != "million"]
COMPARED = ("asked", "read")


@asynccontextmanager
async def gateway(endpoint: str, core: int, more: str = "") -> AsyncIterator[tuple[str, int]]:
    """Run one gateway process over a coordinator; yield its address and its process id. more: further settings."""
    with tempfile.TemporaryDirectory(prefix="kvforge-bench-") as folder:
        file = Path(folder) / "gateway.toml"
        file.write_text(f'endpoint = "{endpoint}"\ntokenizer = "{MODEL}"\nport = 0\nlog_level = "warning"\n{more}')
        with pinned(core):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvforge.gateway", "--config", str(file)), stdout=asyncio.subprocess.PIPE
            )
        assert process.stdout is not None, "a pipe"
        try:
            line = (await process.stdout.readline()).decode()
            found = re.search(r"http://\S+", line)
            assert found is not None, f"the gateway did not start: {line}"
            await served(found.group())
            yield found.group(), process.pid
        finally:
            process.terminate()
            await process.wait()


async def served(url: str) -> None:
    """Wait until the server is healthy."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with asyncio.timeout(60):
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                head = await reader.readline()
                writer.close()
                if b" 200 " in head:
                    return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def vllm_api(python: str, pace: float, core: int) -> AsyncIterator[tuple[str, int]]:
    """Run vLLM's API server over an engine that invents tokens; yield its address and its process id."""
    with tempfile.TemporaryDirectory(prefix="kvforge-bench-") as folder:
        write_tokenizer(Path(folder))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [python, "-m", "benchmarks.vllm_api", "--port", str(port), "--model", folder, "--pace", f"{pace:g}"]
        with pinned(core):
            process = await asyncio.create_subprocess_exec(*command)
        try:
            await served(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            await process.wait()


def write_tokenizer(folder: Path) -> None:
    """Write the gateway's tokenizer and the configuration of a model that is never loaded."""
    from transformers import AutoTokenizer

    file = pull(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(VLLM_MODEL | {"vocab_size": len(tokenizer)}))


async def run_vllm(name: str, case: Case, cores: Sequence[int], python: str) -> dict[str, Any]:
    """One scenario with vLLM's API server and its engine on the first of two cores, the driver on the second."""
    async with vllm_api(python, case.pace, cores[0]) as (url, pid):
        http = {"url": f"{url}/v1", "model": "null"}
        mb = resident_mb(pid)
        outcomes, drove, used_s, wall_s = await driven(case, HTTP, {"http": http}, cores[1], pid)
        return result_of(name, case, outcomes, drove, used_s / wall_s, [mb, resident_mb(pid)])


async def run(name: str, case: Case, cores: Sequence[int]) -> dict[str, Any]:
    """One scenario: the gateway on the first of two cores, all else on the second."""
    with pinned(cores[1]):
        server = null_server(KVFORGE, case.pace, *(("--steps",) if case.pace else ()))
        endpoint = await server.__aenter__()
    try:
        async with gateway(endpoint, cores[0]) as (url, pid):
            mb = [resident_mb(pid)]
            http, served = {"url": f"{url}/v1", "model": "null"}, 0
            while True:
                outcomes, drove, used_s, wall_s = await driven(case, HTTP, {"http": http}, cores[1], pid)
                mb.append(resident_mb(pid))
                served += sum(o.state == FINISHED for o in outcomes)
                if case.requests:
                    print(f"{served} requests, {mb[-1]} MB", flush=True)
                if served >= case.requests or not any(o.state == FINISHED for o in outcomes):
                    break
            result = result_of(name, case, outcomes, drove, used_s / wall_s, mb) | {"served": served}
        if name == "first-token":
            direct, *_ = await driven(case, KVFORGE, {"endpoint": endpoint}, cores[1], os.getpid())
            result["direct_ms"] = first_ms(case, direct)
            result["added_ms_p50"] = round(result["first_ms"][0] - result["direct_ms"][0], 3)
        return result
    finally:
        await server.__aexit__(None, None, None)


def result_of(
    name: str, case: Case, outcomes: Sequence[Outcome], drove: DriverStats, cpu: float, mb: list[int]
) -> dict[str, Any]:
    """Return the reported figures of a run. cpu: processor seconds of the server a second."""
    used_s = cpu * drove.wall_s
    found = row(_scenario(name, case), outcomes, drove)
    writes = sum(len(np.unique(o.tokens_s)) for o in outcomes)
    tokens = sum(len(o.tokens_s) for o in outcomes)
    return asdict(found) | {
        "first_ms": first_ms(case, outcomes),
        "cpu": round(cpu, 3),
        "us_per_request": round(1e6 * used_s / max(sum(o.state == FINISHED for o in outcomes), 1)),
        "us_per_token": round(1e6 * used_s / max(tokens, 1), 1),
        "tokens_per_write": round(tokens / max(writes, 1), 2),
        "mb": mb,
        "problems": sorted({f"{o.code} {o.message}" for o in outcomes if o.state == "failed"})[:3],
    }


async def driven(
    case: Case, target: str, where: dict[str, Any], core: int, pid: int
) -> tuple[Sequence[Outcome], DriverStats, float, float]:
    """Return the outcomes, the driver's lateness, and the processor time of `pid` with its wall time."""
    wall_s = case.warm_s + case.measured_s
    load = {
        **({"closed": case.clients, "requests": 50_000} if case.clients else {"arrivals": f"poisson:{case.rate:g}"}),
        "duration_s": wall_s,
        "input": str(PROMPT_TOKENS),
        "output": str(case.tokens),
        "vocab": case.vocab,
    }
    spec = RunSpec(load=load, target=target, timeout_s=2 * wall_s + 10, proof_s=0, **where)
    stop, loop, used = asyncio.Event(), asyncio.get_running_loop(), [0.0, 0.0]

    def began(_: float) -> None:
        used[0] = cpu_s(pid)
        loop.call_later(wall_s + 0.2, stop.set)

    with pinned(core):
        _, outcomes, (drove,) = await drive(spec, 1, stop, began=began)
    return outcomes, drove, cpu_s(pid) - used[0], wall_s


def _scenario(name: str, case: Case) -> Scenario:
    return Scenario(
        name=name,
        requests_per_s=case.rate,
        tokens=case.tokens,
        tokens_per_s=case.pace,
        warm_s=case.warm_s,
        measured_s=case.measured_s,
    )


def first_ms(case: Case, outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return the time to the first token, p50 and p99."""
    taken = [o.tokens_s[0] - o.sent_s for o in outcomes if o.due_s >= case.warm_s and len(o.tokens_s)]
    p50, p99 = np.percentile(taken, (50, 99)) * 1e3 if taken else (float("nan"), float("nan"))
    return round(float(p50), 3), round(float(p99), 3)


def resident_mb(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


def main() -> None:
    """Prints a table, and writes the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=BRIEF)
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM, to measure it too")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores required: one for the gateway, one for all else")
    rows = {}
    for name in options.only:
        rows[name] = asyncio.run(run(name, CASES[name], cores))
        if options.vllm and name in COMPARED:
            rows[f"{name}, vLLM"] = asyncio.run(run_vllm(name, CASES[name], cores, options.vllm))
    table = [
        (
            name, found["streams"], found["requests_per_s"], found["tokens_per_s"], *found["first_ms"], found["cpu"],
            found["us_per_request"], found["us_per_token"], found["late_ms"][1], found["failed"],
            "{} -> {}".format(found["mb"][0], found["mb"][-1]),
        )
        for name, found in rows.items()
    ]  # fmt: skip
    report("One gateway process on one core", HEADER, table, rows, options.json)
    if "first-token" in rows:
        print(f"first-token: {rows['first-token']['added_ms_p50']} ms at p50 more than over ZeroMQ")


if __name__ == "__main__":
    main()
