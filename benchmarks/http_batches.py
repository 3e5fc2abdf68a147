"""Batches over HTTP: their rate on one core, the gateway's memory, and the latency of interactive requests beside them.

    python -m benchmarks.http_batches [--only NAME ...] [--lines 100000] [--rate 20] [--seconds 30] [--json FILE]

lines    a batch over a null server, which invents tokens at once. The gateway has one core; its storage process
         (SQLite) and the null server share another. Completions of 64 token ids and 16 tokens. Rate: from `in_progress`
         to `completed`, checks of the input file excluded; memory: the gateway's, every 50 ms
chats    the same with chats of 200 characters, whose prompts the gateway's helper processes render and tokenise
beside   interactive requests (Poisson, 64 + 64 tokens, streamed) over a simulated device (`kvforge.loadtest.fleet`),
         alone and beside a batch of the same shape. Latency: to the first token, and of whole requests
busy     the same with 50 requests/s of 16 tokens over a null server: the gateway's core is what they share

Upload and download are timed with `lines`. busy: rows of the device in use, the mean of samples taken every 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kvforge.client.aio import AsyncClient
from kvforge.loadtest.drive.driver_check import null_server
from kvforge.loadtest.drive.outcome import FINISHED, Outcome
from kvforge.loadtest.drive.spec import HTTP, KVFORGE
from kvforge.loadtest.fleet.simulated import SimulatedFleet

from .gateway import MODEL, Case, driven, resident_mb, served
from .load_capacity import cpu_s
from .load_driver import pinned
from .report import report

SAMPLE_S = 0.05
PROMPT, ANSWER = 64, 16
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCENARIOS = ("lines", "chats", "beside", "busy")
ENDED = ("completed", "failed", "expired", "cancelled")


@asynccontextmanager
async def gateway(endpoint: str, core: int, tokenizer: str = "") -> AsyncIterator[tuple[str, int]]:
    """Run one gateway process with a new SQLite file; yield its address and its process id."""
    with tempfile.TemporaryDirectory(prefix="kvforge-bench-") as folder:
        file = Path(folder) / "gateway.toml"
        file.write_text(
            f'endpoint = "{endpoint}"\nstate_dir = "{folder}"\ntokenizer = "{tokenizer}"\nport = 0\n'
            'log_level = "warning"\n'
            "[batches]\nin_flight_max = 1024\n"
        )
        with pinned(core):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvforge.gateway", "--config", str(file)), stdout=asyncio.subprocess.PIPE
            )
        assert process.stdout is not None, "a pipe"
        try:
            announced = (await process.stdout.readline()).decode()
            found = re.search(r"http://\S+", announced)
            assert found is not None, f"the gateway did not start: {announced}"
            await served(found.group())
            yield found.group(), process.pid
        finally:
            process.terminate()
            await process.wait()


def input_file(lines: int, prompt: int, answer: int, model: str, *, chats: bool = False) -> bytes:
    """Return a file of completions with prompts that share no prefix, or of chats."""
    draw = np.random.default_rng(0)
    made = []
    for at in range(lines):
        body: dict[str, Any] = {"model": model, "max_tokens": answer, "ignore_eos": True}
        if chats:
            body["messages"] = [{"role": "user", "content": f"Question {at}: " + "why and what for? " * 11}]
        else:
            body["prompt"] = draw.integers(0, 30_000, prompt).tolist()
        line = {"custom_id": str(at), "method": "POST", "url": CHATS if chats else COMPLETIONS, "body": body}
        made.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return b"".join(made)


async def begun(http: httpx.AsyncClient, content: bytes, endpoint: str = COMPLETIONS) -> str:
    """Upload a file and begin its batch. Return the id."""
    given = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    file = given.raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    return str((await http.post("/v1/batches", json=body)).raise_for_status().json()["id"])


async def batch(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """Return a batch."""
    found: dict[str, Any] = (await http.get(f"/v1/batches/{name}")).raise_for_status().json()
    return found


async def run_lines(lines: int, cores: Sequence[int], *, chats: bool = False) -> dict[str, Any]:
    """Measure one batch over a null server."""
    content = input_file(lines, PROMPT, ANSWER, "null", chats=chats)
    with pinned(cores[1]):
        server = null_server(KVFORGE)
        endpoint = await server.__aenter__()
    try:
        async with (
            gateway(endpoint, cores[0], MODEL if chats else "") as (url, pid),
            httpx.AsyncClient(base_url=url, timeout=120) as http,
        ):
            before = resident_mb(pid)
            upload = time.monotonic()
            name = await begun(http, content, CHATS if chats else COMPLETIONS)
            upload = time.monotonic() - upload
            _pin_children(pid, cores[1])
            mb, began, used_s = [resident_mb(pid)], 0.0, 0.0
            counted: list[tuple[float, int]] = []
            while True:
                found = await batch(http, name)
                now = time.monotonic()
                if found["status"] != "validating" and not began:
                    began, used_s = now, cpu_s(pid)
                mb.append(resident_mb(pid))
                counted.append((now, found["request_counts"]["completed"]))
                if found["status"] in ENDED:
                    break
                await asyncio.sleep(SAMPLE_S)
            wall_s, used_s = time.monotonic() - began, cpu_s(pid) - used_s
            download, size = time.monotonic(), 0
            async with http.stream("GET", f"/v1/files/{found['output_file_id']}/content") as answer:
                async for piece in answer.aiter_bytes():
                    size += len(piece)
            download = time.monotonic() - download
            return {
                "status": found["status"],
                "counts": found["request_counts"],
                "lines_per_s": round(lines / wall_s),
                "cpu": round(used_s / wall_s, 3),
                "us_per_line": round(1e6 * used_s / lines),
                "input_mb": round(len(content) / 1e6, 1),
                "output_mb": round(size / 1e6, 1),
                "upload_s": round(upload, 2),
                "download_s": round(download, 2),
                "mb_before": before,
                "mb_tenth": mb[len(mb) // 10],
                "mb_max": max(mb),
                "mb_after": resident_mb(pid),
            }
    finally:
        await server.__aexit__(None, None, None)


def _pin_children(pid: int, core: int) -> None:
    """Move the helper processes of a gateway to another core."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        os.sched_setaffinity(int(child), {core})


async def run_beside(rate: float, seconds: float, table: str, cores: Sequence[int]) -> dict[str, Any]:
    """Measure interactive requests alone and beside a batch, over a simulated device."""
    case = Case(rate=rate, tokens=64, pace=0, warm_s=8.0, measured_s=seconds)
    async with SimulatedFleet(table) as fleet:
        return await _alone_and_beside(case, fleet.endpoint, cores, lines=20_000)


async def run_busy(seconds: float, cores: Sequence[int]) -> dict[str, Any]:
    """Measure the same over a null server: the gateway's core is what they share."""
    case = Case(rate=50, tokens=ANSWER, pace=0, warm_s=8.0, measured_s=seconds)
    with pinned(cores[1]):
        server = null_server(KVFORGE)
        endpoint = await server.__aenter__()
    try:
        return await _alone_and_beside(case, endpoint, cores, lines=100_000)
    finally:
        await server.__aexit__(None, None, None)


async def _alone_and_beside(case: Case, endpoint: str, cores: Sequence[int], lines: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with (
        gateway(endpoint, cores[0]) as (url, pid),
        httpx.AsyncClient(base_url=url, timeout=120) as http,
        AsyncClient(endpoint) as client,
    ):
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        where = {"http": {"url": f"{url}/v1", "model": model}}
        content = input_file(lines, PROMPT, case.tokens, model)
        for name in ("alone", "beside"):
            driving = asyncio.ensure_future(driven(case, HTTP, where, cores[1], pid))
            await asyncio.sleep(case.warm_s / 4)
            batch_id = await begun(http, content) if name == "beside" else ""
            await asyncio.sleep(case.warm_s / 2)
            began, before = time.monotonic(), await _completed(http, batch_id)
            busy: list[int] = []
            sampling = asyncio.ensure_future(_sample(client, busy))
            outcomes, _, used_s, wall_s = await driving
            sampling.cancel()
            came = await _completed(http, batch_id) - before
            found[name] = latencies(outcomes, case.warm_s) | {
                "lines_per_s": round(came / (time.monotonic() - began), 1),
                "busy": round(float(np.mean(busy)), 1),
                "cpu": round(used_s / wall_s, 3),
            }
            if batch_id:
                await http.post(f"/v1/batches/{batch_id}/cancel")
    return found


async def _completed(http: httpx.AsyncClient, name: str) -> int:
    return int((await batch(http, name))["request_counts"]["completed"]) if name else 0


async def _sample(client: AsyncClient, busy: list[int]) -> None:
    while True:
        busy.append((await client.find_prefix((0,))).running)
        await asyncio.sleep(SAMPLE_S)


def latencies(outcomes: Sequence[Outcome], warm_s: float) -> dict[str, Any]:
    """Return the latencies of requests that were due after the warm-up, p50 and p99 in milliseconds."""
    counted = [one for one in outcomes if one.due_s >= warm_s and one.state == FINISHED and len(one.tokens_s)]

    def ms(values: list[float]) -> list[float]:
        return [round(float(one) * 1e3, 1) for one in np.percentile(values, (50, 99))] if values else []

    return {
        "requests": len(counted),
        "failed": sum(one.state != FINISHED for one in outcomes),
        "first_ms": ms([one.tokens_s[0] - one.due_s for one in counted]),
        "whole_ms": ms([one.tokens_s[-1] - one.due_s for one in counted]),
    }


def main() -> None:
    """Prints tables, and writes the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=20.0, help="interactive requests a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--table", default="h200-8b")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores required: one for the gateway, one for all else")
    found: dict[str, Any] = {}
    rows: list[list[object]] = []
    for scenario in ("lines", "chats"):
        if scenario in options.only:
            lines = found[scenario] = asyncio.run(run_lines(options.lines, cores, chats=scenario == "chats"))
            rows += [[f"{scenario}: {name}", value] for name, value in lines.items()]
    if "beside" in options.only:
        beside = found["beside"] = asyncio.run(run_beside(options.rate, options.seconds, options.table, cores))
        rows += [[f"{which}: {name}", value] for which, row in beside.items() for name, value in row.items()]
    if "busy" in options.only:
        busy = found["busy"] = asyncio.run(run_busy(options.seconds, cores))
        rows += [[f"busy, {which}: {name}", value] for which, row in busy.items() for name, value in row.items()]
    report("Batches", ("", ""), rows, found, options.json)


if __name__ == "__main__":
    main()
