"""What an honest client notices of others: its calls alone, beside a busy neighbour, a flooding client, and a crowd.

    python -m benchmarks.hostile [--seconds 10] [--rounds 3] [--seed 1] [--json FILE]

A coordinator and a worker with a tiny model, each a process, and an honest client with two kinds of calls: it appends a
token to a sequence, and it has a request answered with 16 tokens. The crowd is a process with one connection for each
attack of tests/hostile/attacks.py to both sockets, all sending as fast as they are read, without a pause. The neighbour
is a process that only counts, and talks to nobody: what it costs is what any third process costs where two cores serve.
The flooding client breaks no rule: it is one connection that asks for lists, statistics and explanations without an
end, as fast as they are taken, and reads the answers. All are measured in turn; ratios are those of the medians over
the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import select
import sys
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import numpy as np

from kvforge import CachedSequence, Client, Sampling
from kvforge.protocol.messages import Explain, GetHealth, GetStats, Hello, ListRequests
from kvforge.protocol.transport import CLIENT_SOCKET, client_endpoint
from tests.hostile.crowd import Crowd
from tests.hostile.raw import RawPeer, frames

from .installation import VOCABULARY, Installation
from .report import report

WAIT_S = 60.0
PROMPT_TOKENS, ANSWER_TOKENS = 24, 16
LENGTH_MAX = 8000


def attack(runtime: str, seed: int, stop: Event) -> None:
    """The crowd's process."""
    crowd = Crowd(Path(runtime), seed)
    while not stop.is_set():
        if not crowd.go_on():
            crowd.wait()
    print(f"crowd: {crowd.sent_bytes / 1e6:.1f} MB were taken from it, it was disconnected {crowd.ended} times")
    crowd.close()


def flood(runtime: str, seed: int, stop: Event) -> None:
    """The flooding client's process."""
    random, peer = Random(seed), RawPeer(str(Path(runtime) / CLIENT_SOCKET))
    peer.send(frames(Hello(rid=1)))
    said = [
        frames(ListRequests(rid=2, count_max=1000)),
        frames(GetStats(rid=3)),
        frames(GetHealth(rid=4)),
        frames(Explain(rid=5, tenant="default")),
    ]
    sent = 0
    while not stop.is_set():
        if not peer.waits:
            sent += peer.send(random.choice(said))
        elif not peer.send(b""):
            select.select([peer.socket], [peer.socket], [], 0.01)
        peer.ended()  # which reads
    print(f"flooding client: {sent / 1e6:.1f} MB were taken from it")
    peer.close()


def count(_runtime: str, _seed: int, stop: Event) -> None:
    """The neighbour's process."""
    while not stop.is_set():
        for _ in range(10_000):
            pass


@contextlib.contextmanager
def beside(what: Callable[[str, int, Event], None], runtime: Path, seed: int) -> Iterator[None]:
    """A process that does `what` until the block ends."""
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=what, args=(str(runtime), seed, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join(WAIT_S)


PLACES: tuple[tuple[str, Callable[[str, int, Event], None] | None], ...]
PLACES = ("alone", None), ("neighbour", count), ("flood", flood), ("crowd", attack)


def appends_us(kv: Client, seconds: float) -> list[float]:
    """Microseconds of each append that was answered within that time. The answers are checked."""
    sequence: CachedSequence = kv.create_sequence([1])
    taken: list[float] = []
    deadline = perf_counter() + seconds
    length = 1
    while (started := perf_counter()) < deadline:
        kv.append([sequence], [[1]])
        taken.append((perf_counter() - started) * 1e6)
        length += 1
        if length >= LENGTH_MAX:
            kv.remove([sequence])
            sequence, length = kv.create_sequence([1]), 1
    assert len(kv.tokens(sequence)) == length, "an append was lost"
    kv.remove([sequence])
    return taken


def requests_us(kv: Client, seconds: float) -> list[float]:
    """Microseconds of each request that was answered within that time. The answers are checked."""
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    taken: list[float] = []
    answers: dict[int, tuple[int, ...]] = {}
    deadline = perf_counter() + seconds
    while (started := perf_counter()) < deadline:
        which = len(taken) % 7
        prompt = np.random.default_rng(which).integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
        result = kv.submit(prompt, max_tokens=ANSWER_TOKENS, sampling=sampling).result()
        taken.append((perf_counter() - started) * 1e6)
        answer = tuple(result.tokens)
        assert len(answer) == ANSWER_TOKENS and answers.setdefault(which, answer) == answer, "another answer"
    return taken


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one of the places: neighbour, flood, crowd")
    parser.add_argument("--share-ms", type=float, default=0.5, help="limits.client_share_ms of the coordinator")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    places = [(place, what) for place, what in PLACES if options.only in (None, place) or what is None]
    calls = {"append": appends_us, "request": requests_us}
    found: dict[str, list[float]] = {}
    limits = {"client_share_ms": options.share_ms}
    installation = Installation(context_tokens=LENGTH_MAX, blocks=2048, schedule={}, limits=limits)
    with installation, Client(client_endpoint(installation.runtime), timeout_s=WAIT_S) as kv:
        kv.wait_ready(WAIT_S)
        for i in range(options.rounds):
            for call, measure in calls.items():
                for place, what in places:
                    with beside(what, installation.runtime, options.seed + i) if what else contextlib.nullcontext():
                        taken = measure(kv, options.seconds)
                    for share in (50, 99):
                        found.setdefault(f"{call}_{place}_p{share}_us", []).append(float(np.percentile(taken, share)))
                    found.setdefault(f"{call}_{place}_per_s", []).append(len(taken) / options.seconds)
    mid = {key: median(values) for key, values in found.items()}
    rows = []
    for call in calls:
        for place, _ in places:
            p50, p99, rate = (mid[f"{call}_{place}_{what}"] for what in ("p50_us", "p99_us", "per_s"))
            ratio = mid[f"{call}_{place}_p99_ratio"] = p99 / mid[f"{call}_alone_p99_us"]
            rows.append([call, place, f"{p50:.0f}", f"{p99:.0f}", f"{rate:.0f}", f"{ratio:.2f}"])
    title = "an honest client alone, beside a busy neighbour, a flooding client, hostile clients and workers"
    report(title, ["call", "beside", "p50, us", "p99, us", "a second", "p99 x alone"], rows, mid, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
