"""Time without tokens when a coordinator with many live requests is killed and restarted at once.

    python -m benchmarks.recovery [--requests 1000] [--prompt 1000] [--written 100] [--rounds 3] [--json FILE]

A real coordinator process, its journal in the temporary folder, one client that reads all streams, and a worker process
without a model (`recovery_worker`), which answers steps at once while the journal grows without a reader, and later at
a device's speed (`--step-ms`): the result covers the coordinator, the client, and the worker's reconnection. Measured
from SIGKILL to the first token of each stream that was computed after it, with the worker's KV kept; then with the
worker killed as well and restarted at once, so that everything is recomputed. It begins when `--written` MB of records
have been written and the client has caught up. It prints the size of the files and the time of each part of the
recovery. Modules are compiled to bytecode when the first processes start, as in an installed kvforge, whatever the
environment variables say.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvforge import Client, SamplingParams
from kvforge.protocol.transport import client_endpoint

from .recovery_worker import age_s
from .report import report

BLOCK_SIZE = 16
ANSWER = 20_000
VOCABULARY = 32_000  # token ids in prompts
BEHIND_S = 0.1  # a client that lags by less has caught up
SETTLED_S = 2.0  # a connection that ends sooner does not count
ENDS = ("ended", "begun", "snapshot", "records", "serving", "worker back", "client back", "first step")


class Bench:
    """The processes, in a temporary folder."""

    def __init__(self, folder: Path, requests: int, prompt: int, step_ms: float) -> None:
        self.folder, self.runtime, self._step_ms = folder, folder / "r", step_ms
        width = (prompt + ANSWER) // BLOCK_SIZE + 2
        self._blocks = requests * width
        (folder / "c.toml").write_text(
            f'runtime_dir = "{self.runtime}"\nlog_level = "debug"\nlog_format = "json"\n'
            f"[limits]\nsequences_max = {requests}\nblocks_max = {self._blocks}\n"
            f"blocks_per_sequence_max = {width}\nqueue_max = {requests}\n[cache]\nblock_size = {BLOCK_SIZE}\n"
            f"[schedule]\nstep_rows_max = {requests}\nstep_tokens_max = 65536\ndecode_gap_ms = 10000\n"
        )
        self._seen: dict[str, int] = {}
        self._environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "pyc")}
        self.coordinator = self.start_coordinator()
        self.worker: subprocess.Popen[bytes] | None = None

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        """A new process."""
        log = (self.folder / "log").open("ab")
        command = [sys.executable, "-m", "kvforge.coordinator", "--config", str(self.folder / "c.toml")]
        return subprocess.Popen(command, stderr=log, stdout=log, env=self._environment)

    def start_worker(self) -> subprocess.Popen[bytes]:
        """A new process."""
        arguments = [str(self.runtime), str(self._blocks), str(self._step_ms), str(self.folder / "steps")]
        command = [sys.executable, "-m", "benchmarks.recovery_worker", *arguments]
        return subprocess.Popen(command, env=self._environment)

    def slow(self) -> None:
        """Make the worker take a device's time for each step from now on."""
        (self.folder / "steps").touch()

    def state_bytes(self) -> tuple[int, int]:
        """Return the bytes of the records and of the snapshot."""
        files = {path.name: path.stat().st_size for path in (self.runtime / "state").iterdir()}
        return tuple(sum(size for name, size in files.items() if name.startswith(kind)) for kind in ("rec", "sta"))  # type: ignore[return-value]

    def written(self) -> int:
        """Return the bytes of records so far, in all segments seen."""
        for path in (self.runtime / "state").glob("records-*"):
            with suppress(OSError):
                self._seen[path.name] = path.stat().st_size
        return sum(self._seen.values())

    def entries(self, since: float) -> dict[str, dict[str, Any]]:
        """The first log entry of each event since then (Unix time), with its time as `at`."""
        found: dict[str, dict[str, Any]] = {}
        for line in (self.folder / "log").read_text().splitlines():
            with suppress(ValueError):
                entry = json.loads(line)
                entry["at"] = datetime.fromisoformat(entry["time"]).timestamp()
                if entry["at"] >= since:
                    found.setdefault(entry.get("event") or entry["message"][:7], entry)
        return found

    def close(self) -> None:
        """Ends them."""
        for process in (self.coordinator, self.worker):
            if process is not None:
                process.kill()
                process.wait()


def submit(endpoint: str, requests: int, prompt: int) -> None:
    """Submit requests that continue without a reader."""
    draw, sampling = np.random.default_rng(0), SamplingParams(temperature=0.0, ignore_eos=True)
    with Client(endpoint, connect_timeout_s=30, timeout_s=60) as kv:
        for _ in range(requests):
            tokens = draw.integers(0, VOCABULARY, prompt).astype(np.int32)
            kv.submit(tokens, max_tokens=ANSWER, sampling=sampling, detached=True)


class Reader:
    """One client's streams, read from their current position."""

    def __init__(self, kv: Client, requests: int) -> None:
        handles = [kv.attach(row.request_id, row.generated_tokens) for row in kv.requests(requests).requests]
        self._ids = frozenset(handle.id for handle in handles)
        self._tokens = kv.merge(*handles)

    def each_has(self, computed_after: float) -> list[float]:
        """Return when each stream's first token computed after that time arrived; both times on time.monotonic."""
        waiting, times = set(self._ids), []
        while waiting:
            request, token = next(self._tokens)
            if request.id in waiting and time.monotonic() - age_s(token.token_id) > computed_after:
                waiting.discard(request.id)
                times.append(time.monotonic())
        return times

    def catch_up(self) -> None:
        """Read until the arriving tokens are new."""
        since = time.monotonic()
        while time.monotonic() - since < SETTLED_S:
            _, token = next(self._tokens)
            if age_s(token.token_id) > BEHIND_S:
                since = time.monotonic()


def killed(bench: Bench, reader: Reader, both: bool) -> dict[str, Any]:
    """Kill once; return the size of the files, the end of each part of the recovery, and when the streams continued."""
    records, snapshot = bench.state_bytes()
    began, began_unix = time.monotonic(), time.time()
    bench.coordinator.send_signal(signal.SIGKILL)
    if both and bench.worker is not None:
        bench.worker.send_signal(signal.SIGKILL)
        bench.worker.wait()
        bench.worker = bench.start_worker()
    bench.coordinator.wait()
    ended = time.monotonic()
    bench.coordinator = bench.start_coordinator()
    times = np.array(reader.each_has(began)) - began
    entries = bench.entries(began_unix)
    went_on = entries["went_on"]
    snapshot_s, records_s = went_on["snapshot_ms"] / 1e3, went_on["records_ms"] / 1e3
    begun = went_on["at"] - began_unix - snapshot_s - records_s
    steps = np.loadtxt(bench.folder / "steps", ndmin=1)
    parts = {
        "ended": ended - began,
        "begun": begun,
        "snapshot": begun + snapshot_s,
        "records": begun + snapshot_s + records_s,
        "serving": entries["serving"]["at"] - began_unix,
        "worker back": entries["worker_ready" if both else "worker_back"]["at"] - began_unix,
        "client back": entries["client_back"]["at"] - began_unix,
        "first step": float(steps[steps > began_unix + begun].min()) - began_unix,
    }
    return {
        "killed": "both" if both else "coordinator",
        "written_mb": bench.written() / 1e6,
        "records_mb": records / 1e6,
        "snapshot_mb": snapshot / 1e6,
        "records": went_on["records"],
        "parts_s": parts,
        "first_s": float(times.min()),
        "median_s": float(np.median(times)),
        "p99_s": float(np.percentile(times, 99)),
        "last_s": float(times.max()),
    }


def measure(requests: int, prompt: int, rounds: int, written: int, step_ms: float) -> list[dict[str, Any]]:
    """A row for each kill."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        bench = Bench(Path(folder), requests, prompt, step_ms)
        try:
            submit(client_endpoint(bench.runtime), requests, prompt)
            bench.worker = bench.start_worker()
            while bench.written() < written:
                time.sleep(0.1)
            bench.slow()
            kv = Client(client_endpoint(bench.runtime), timeout_s=60, stream_timeout_s=60, reconnect_s=60)
            reader = Reader(kv, requests)
            for i in range(2 * rounds):
                reader.catch_up()
                found.append(killed(bench, reader, both=i >= rounds))
                print(json.dumps(found[-1]), file=sys.stderr)
            kv.close()
        finally:
            print((Path(folder) / "log").read_text(), file=sys.stderr)
            bench.close()
    return found


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt [1000]")
    parser.add_argument("--written", type=float, default=100.0, help="MB of records before the first kill [100]")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each kind [3]")
    parser.add_argument("--step-ms", type=float, default=30.0, help="a decode step takes so long [30]")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit in order to end the other processes
    results = measure(options.requests, options.prompt, options.rounds, int(options.written * 1e6), options.step_ms)
    sizes, streams = ("written_mb", "records_mb", "snapshot_mb"), ("first_s", "median_s", "p99_s", "last_s")
    rows: list[list[object]] = [
        [
            row["killed"],
            *(f"{row[name]:.1f}" for name in sizes),
            *(f"{row['parts_s'][name]:.2f}" for name in ENDS),
            *(f"{row[name]:.2f}" for name in streams),
        ]
        for row in results
    ]
    header = ["killed", "written, MB", "records, MB", "snapshot, MB"]
    header += [f"{name}, s" for name in (*ENDS, "first stream", "median", "p99", "last stream")]
    report(f"recovery: {options.requests} live requests; seconds since the kill", header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
