"""What an honest client notices of hostile ones: its round trips alone, and beside a crowd that never pauses.

    python -m benchmarks.hostile [--seconds 10] [--rounds 3] [--seed 1] [--json FILE]

A coordinator process with a stand-in pool, an honest client that appends a token and reads its sequence's length, and a
process with one connection for each attack of tests/hostile/attacks.py to both sockets, all sending as fast as they are
read. Alone and beside the crowd are measured in turn; the ratio is that of the medians over the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from coordinator.config import CoordinatorConfig
from coordinator.server import Server
from kvforge import CachedSequence, Client
from kvforge.protocol import logs
from kvforge.protocol.transport import client_endpoint, worker_endpoint
from tests.hostile.crowd import Crowd
from tests.hostile.standin import StandIn

from .report import report

WAIT_S = 60.0


def serve(runtime: str) -> None:
    """The coordinator's process."""
    output = logs.configure("coordinator", "error", "text")
    server = Server(CoordinatorConfig(runtime_dir=runtime, drain_s=0.0), output.flush)
    try:
        server.run()
    finally:
        server.close()


def attack(runtime: str, seed: int, stop: Event) -> None:
    """The crowd's process."""
    crowd = Crowd(Path(runtime), seed)
    while not stop.is_set():
        if not crowd.go_on():
            crowd.wait()
    print(f"crowd: {crowd.sent_bytes / 1e6:.1f} MB were taken from it, it was disconnected {crowd.ended} times")
    crowd.close()


def round_trips_us(kv: Client, seconds: float) -> list[float]:
    """Microseconds of each append that was answered within that time. The answers are checked."""
    sequence: CachedSequence = kv.create_sequence([1])
    taken: list[float] = []
    deadline = perf_counter() + seconds
    length = 1
    while (started := perf_counter()) < deadline:
        kv.append([sequence], [[1]])
        taken.append((perf_counter() - started) * 1e6)
        length += 1
        if length >= 8000:
            kv.remove([sequence])
            sequence, length = kv.create_sequence([1]), 1
    assert len(kv.tokens(sequence)) == length, "an append was lost"
    kv.remove([sequence])
    return taken


def beside(runtime: str, seed: int, measure: Callable[[], list[float]]) -> list[float]:
    """Measures beside a crowd."""
    stop = multiprocessing.Event()
    crowd = multiprocessing.Process(target=attack, args=(runtime, seed, stop))
    crowd.start()
    try:
        return measure()
    finally:
        stop.set()
        crowd.join(WAIT_S)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvf-bench-", dir="/tmp") as folder:
        runtime = str(Path(folder) / "r")
        server = multiprocessing.Process(target=serve, args=(runtime,))
        server.start()
        try:
            with (
                Client(client_endpoint(Path(runtime)), timeout_s=WAIT_S, connect_timeout_s=WAIT_S) as kv,
                StandIn(worker_endpoint(Path(runtime))),
            ):
                for i in range(options.rounds):

                    def measure() -> list[float]:
                        return round_trips_us(kv, options.seconds)

                    for name, taken in (
                        ("alone", measure()),
                        ("beside", beside(runtime, options.seed + i, measure)),
                    ):
                        for share in (50, 99):
                            found.setdefault(f"{name}_p{share}_us", []).append(float(np.percentile(taken, share)))
                        found.setdefault(f"{name}_per_s", []).append(len(taken) / options.seconds)
        finally:
            server.terminate()
            server.join(WAIT_S)
    mid = {key: median(values) for key, values in found.items()}
    mid["p99_ratio"] = mid["beside_p99_us"] / mid["alone_p99_us"]
    rows = [
        [name, *(f"{mid[f'{name}_{what}']:.0f}" for what in ("p50_us", "p99_us", "per_s"))]
        for name in ("alone", "beside")
    ]
    title = "an honest client beside hostile ones"
    report(title, ["client", "p50, us", "p99, us", "round trips a second"], rows, mid, options.json)
    print(f"p99 beside the crowd: {mid['p99_ratio']:.2f} x alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
