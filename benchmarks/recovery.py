"""How long nobody hears anything: a coordinator with many live requests is killed, and started again at once.

    python -m benchmarks.recovery [--requests 1000] [--prompt 1000] [--written 100] [--rounds 3] [--json FILE]

A real coordinator process, its journal in the temporary folder, one client that reads all streams, and a worker process
without a model, which answers steps at once: so what is measured is the coordinator's part. From SIGKILL to the first
new token of each stream, with the worker's KV kept; then with the worker killed as well and started again at once,
which has everything computed anew. It begins when so many MB of records have been written; what is on the disk then is
printed: the records since the last snapshot, and that snapshot.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvforge import Client, Sampling
from kvforge.protocol import codec, token
from kvforge.protocol.messages import (
    WORKER_REPLIES,
    ModelInfo,
    PoolRegistered,
    Step,
    StepResult,
    Stop,
    WorkerHello,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.transport import client_endpoint, dealer, worker_endpoint

from .report import report

VOCABULARY = 32_000
BLOCK_SIZE = 16
ANSWER = 20_000
KEPT = 16
BUFFERED = 2  # tokens of a stream that came before the kill and are not read yet, at most: two steps are under way
STEP_S = 0.005  # a decode step takes so long
MODEL = ModelInfo(
    name="m", source="", architecture="any", fingerprint="1", vocab_size=VOCABULARY, context_tokens_max=1 << 20
)


def worker(runtime: Path, blocks: int) -> int:
    """A worker without a model: comes back to a coordinator as a real one does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    decoder = codec.Decoder(WORKER_REPLIES)
    boot, epoch, done = "", 0, 0
    answered: deque[StepResult] = deque(maxlen=KEPT)
    while True:
        socket = dealer(context, immediate=False)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(worker_endpoint(runtime))
        while not monitor.poll(1000):
            pass
        if parse_monitor_message(monitor.recv_multipart())["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            continue
        hello = WorkerHello(rid=1, name="w", pid=os.getpid(), boot=boot, epoch=epoch, token=token.read(runtime))
        socket.send_multipart(codec.encode(hello))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        there = True
        while there:
            ready = dict(poller.poll())
            there = monitor not in ready
            while socket.poll(0):
                message = decoder.decode(socket.recv_multipart())
                if isinstance(message, Stop):
                    return 0
                if isinstance(message, WorkerWelcome):
                    if message.epoch != epoch or message.boot != boot:
                        done, boot = 0, message.boot
                        answered.clear()
                        told = WorkerReady(
                            rid=2, model=MODEL, blocks=blocks, bytes_per_block=1, kv_dtype="float32", device="none"
                        )
                        socket.send_multipart(codec.encode(told))
                elif isinstance(message, PoolRegistered):
                    epoch = message.epoch
                    for result in answered:
                        if result.step_id > message.done:
                            socket.send_multipart(codec.encode(result))
                elif isinstance(message, Step) and message.step_id > done:
                    done = message.step_id
                    answered.append(_answer(message, epoch))
                    time.sleep(STEP_S if message.counts.size and message.counts.max() == 1 else 0)
                    socket.send_multipart(codec.encode(answered[-1]))
        socket.disable_monitor()
        socket.close(0)


def _answer(step: Step, epoch: int) -> StepResult:
    slots = step.slots[step.samples != 0]
    tokens = (slots + step.step_id).astype(np.int32) % VOCABULARY
    return StepResult(
        step_id=step.step_id, epoch=epoch, slots=slots, tokens=tokens, logprobs=np.zeros(slots.size, np.float32)
    )


class Bench:
    """The processes, in a folder of their own."""

    def __init__(self, folder: Path, requests: int, prompt: int) -> None:
        self.folder, self.runtime = folder, folder / "r"
        width = (prompt + ANSWER) // BLOCK_SIZE + 2
        self._blocks = requests * width
        (folder / "c.toml").write_text(
            f'runtime_dir = "{self.runtime}"\n[limits]\nsequences_max = {requests}\nblocks_max = {self._blocks}\n'
            f"blocks_per_sequence_max = {width}\nqueue_max = {requests}\n[cache]\nblock_size = {BLOCK_SIZE}\n"
            f"[schedule]\nstep_rows_max = {requests}\nstep_tokens_max = 65536\ndecode_gap_ms = 10000\n"
        )
        self._seen: dict[str, int] = {}
        self.coordinator = self.start_coordinator()
        self.worker = self.start_worker()

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        """A new process."""
        log = (self.folder / "log").open("ab")
        command = [sys.executable, "-m", "coordinator", "--config", str(self.folder / "c.toml")]
        return subprocess.Popen(command, stderr=log, stdout=log)

    def start_worker(self) -> subprocess.Popen[bytes]:
        """A new process."""
        command = [sys.executable, "-m", "benchmarks.recovery", "--worker", str(self.runtime), str(self._blocks)]
        return subprocess.Popen(command)

    def state_bytes(self) -> tuple[int, int]:
        """Of records and of the snapshot."""
        files = {path.name: path.stat().st_size for path in (self.runtime / "state").iterdir()}
        return tuple(sum(size for name, size in files.items() if name.startswith(kind)) for kind in ("rec", "sta"))  # type: ignore[return-value]

    def written(self) -> int:
        """Bytes of records so far, of all segments that were seen."""
        for path in (self.runtime / "state").glob("records-*"):
            with suppress(OSError):
                self._seen[path.name] = path.stat().st_size
        return sum(self._seen.values())

    def close(self) -> None:
        """Ends them."""
        for process in (self.coordinator, self.worker):
            process.kill()
            process.wait()


def measure(requests: int, prompt: int, rounds: int, written: int) -> list[dict[str, Any]]:
    """A row for each kill."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        bench = Bench(Path(folder), requests, prompt)
        try:
            kv = Client(client_endpoint(bench.runtime), connect_timeout_s=30, timeout_s=60, stream_timeout_s=60)
            kv.wait_ready(30)
            draw = np.random.default_rng(0)
            handles = [
                kv.submit(
                    draw.integers(0, VOCABULARY, prompt).astype(np.int32),
                    max_tokens=ANSWER,
                    sampling=Sampling(temperature=0.0, ignore_eos=True),
                )
                for _ in range(requests)
            ]
            tokens, counts = kv.merge(*handles), dict.fromkeys((handle.id for handle in handles), 0)

            def until_each_has(more: int) -> list[float]:
                wanted = {id_: count + more for id_, count in counts.items()}
                times = []
                while wanted:
                    request, _ = next(tokens)
                    counts[request.id] += 1
                    if counts[request.id] == wanted.get(request.id):
                        times.append(time.monotonic())
                        del wanted[request.id]
                return times

            until_each_has(30)
            while bench.written() < written:
                until_each_has(2)
            for i in range(2 * rounds):
                both = i >= rounds
                records, snapshot = bench.state_bytes()
                began = time.monotonic()
                bench.coordinator.send_signal(signal.SIGKILL)
                if both:
                    bench.worker.send_signal(signal.SIGKILL)
                    bench.worker.wait()
                    bench.worker = bench.start_worker()
                bench.coordinator.wait()
                bench.coordinator = bench.start_coordinator()
                times = [at - began for at in until_each_has(BUFFERED + 1)]
                found.append(
                    {
                        "killed": "both" if both else "coordinator",
                        "written_mb": bench.written() / 1e6,
                        "records_mb": records / 1e6,
                        "snapshot_mb": snapshot / 1e6,
                        "median_s": statistics.median(times),
                        "last_s": max(times),
                    }
                )
                until_each_has(20)
            kv.close()
        finally:
            print((Path(folder) / "log").read_text(), file=sys.stderr)
            bench.close()
    return found


def main() -> int:
    """Measures and prints."""
    if sys.argv[1:2] == ["--worker"]:
        return worker(Path(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each [1000]")
    parser.add_argument("--written", type=float, default=100.0, help="MB of records before the first kill [100]")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each kind [3]")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    results = measure(options.requests, options.prompt, options.rounds, int(options.written * 1e6))
    rows: list[list[object]] = [
        [
            row["killed"],
            *(f"{row[name]:.2f}" for name in ("written_mb", "records_mb", "snapshot_mb", "median_s", "last_s")),
        ]
        for row in results
    ]
    header = [
        "killed",
        "written so far, MB",
        "records, MB",
        "snapshot, MB",
        "first new token: median stream, s",
        "last stream, s",
    ]
    report(f"recovery: {options.requests} live requests", header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
