"""Cost of storing a response: processor time of the gateway and of its storage process, for each request.

    python -m benchmarks.stored_responses [--requests 1000] [--rounds 8] [--json FILE]

A null server invents the tokens, so the figures exclude coordinator and workers. 32 clients in a closed loop post to
/v1/responses with `store: false`, with `store: true` (SQLite; all calls that wait share a flush), and with
`background: true` (two writes; not polled). The three take turns over one gateway. Figures are processor time, of which
requests a second of one core are the inverse: the least of the rounds, since other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvforge.loadtest.drive.driver_check import null_server
from kvforge.loadtest.drive.spec import KVFORGE
from kvforge.models.store import pull

from .gateway import MODEL, gateway
from .load_capacity import cpu_s
from .report import report

CLIENTS = 32
KINDS: dict[str, dict[str, Any]] = {
    "not stored": {"store": False},
    "stored": {"store": True},
    "background": {"background": True},
}
HEADER = ("", "gateway us/request", "storage us/request", "gateway, of not stored", "failed")


async def load(url: str, body: dict[str, Any], requests: int) -> int:
    """Post requests from CLIENTS connections; return how many failed."""
    host, _, port = url.removeprefix("http://").partition(":")
    content = json.dumps({"input": "Say something short.", "max_output_tokens": 16, **body}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(content)
    left, failed = requests, 0

    async def client() -> None:
        nonlocal left, failed
        reader, writer = await asyncio.open_connection(host, int(port))
        while left > 0:
            left -= 1
            writer.write(head + content)
            answered = await reader.readuntil(b"\r\n\r\n")
            size = next(
                int(line.split(b":")[1])
                for line in answered.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(size)
            failed += b" 200 " not in answered[:16]
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return failed


def storage_process(pid: int) -> int:
    """Return the process id of a gateway's storage process."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for child in children:
        if b"kvforge.gateway.storage" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise LookupError("the gateway has no storage process")


async def measured(requests: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures of each kind."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvforge-bench-", dir=Path.home()))
        endpoint = await stack.enter_async_context(null_server(KVFORGE))
        more = f'[storage]\nurl = "sqlite:{folder}/stored.sqlite"\n'
        url, pid = await stack.enter_async_context(gateway(endpoint, 0, more))
        for body in KINDS.values():
            await load(url, body, CLIENTS * 4)
        storage = storage_process(pid)
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
        failed = dict.fromkeys(KINDS, 0)
        for _ in range(rounds):
            for name, body in KINDS.items():
                before = cpu_s(pid), cpu_s(storage)
                failed[name] += await load(url, body, requests)
                await asyncio.sleep(0.5)  # background responses end
                spent = cpu_s(pid) - before[0], cpu_s(storage) - before[1]
                rows[name].append((spent[0] * 1e6 / requests, spent[1] * 1e6 / requests))
    plain = min(ours for ours, _ in rows["not stored"])
    found: dict[str, dict[str, float]] = {}
    for name, each in rows.items():
        ours = min(ours for ours, _ in each)
        found[name] = {
            "gateway_us": round(ours, 1),
            "storage_us": round(min(theirs for _, theirs in each), 1),
            "of_not_stored": round(ours / plain, 3),
            "failed": failed[name],
        }
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    pull(MODEL)
    found = asyncio.run(measured(options.requests, options.rounds))
    rows = [
        (name, *(each[key] for key in ("gateway_us", "storage_us", "of_not_stored", "failed")))
        for name, each in found.items()
    ]
    report("Stored responses", HEADER, rows, found, options.json)


if __name__ == "__main__":
    main()
