"""Latency of an honest client: alone, beside a busy neighbour, a flooding client, and a crowd of hostile connections.

    python -m benchmarks.hostile [--seconds 10] [--rounds 3] [--seed 1] [--over ipc|tcp] [--only PLACE] [--json FILE]

A coordinator and a worker with a tiny model, each a process, and an honest client with two kinds of calls: it appends a
token to a sequence, and it has a request answered with 16 tokens. The crowd is a process with one connection for each
attack of tests/hostile/attacks.py to both sockets, all sending as fast as they are read, without a pause. The neighbour
is a process that only counts, without a connection: it shows the cost of any third process on two cores. The flooding
client breaks no rule: one connection requests lists, statistics and explanations without pause, as fast as the
coordinator reads, and reads the answers. All are measured in turn; ratios are those of the medians over the rounds.

It also runs over a network (`tcp`: the loopback device), encrypted, with a key each for the honest and the flooding
client; `slowed` is a flooding client that [access] limits to MESSAGES_PER_S.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import select
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import zmq

from kvforge import CachedSequence, Client, SamplingParams
from kvforge.protocol import keys
from kvforge.protocol.codec import encode
from kvforge.protocol.messages import Explain, GetHealth, GetStats, Hello, ListRequests
from kvforge.protocol.network import credentials_for
from kvforge.protocol.transport import CLIENT_SOCKET, client_endpoint, dealer
from tests.hostile.crowd import Crowd
from tests.hostile.raw import RawPeer, frames

from .installation import VOCABULARY, Installation
from .report import report

WAIT_S = 60.0
PROMPT_TOKENS, ANSWER_TOKENS = 24, 16
LENGTH_MAX = 8000
MESSAGES_PER_S = 100.0
FLOOD = ListRequests(rid=2, count_max=1000), GetStats(rid=3), GetHealth(rid=4), Explain(rid=5, tenant="default")
CLIENTS = {"honest": 0.0, "flooding": 0.0, "slowed": MESSAGES_PER_S}


def attack(runtime: str, seed: int, stop: Event) -> None:
    """The crowd's process."""
    crowd = Crowd(Path(runtime), seed)
    while not stop.is_set():
        if not crowd.go_on():
            crowd.wait()
    print(f"crowd: the coordinator read {crowd.sent_bytes / 1e6:.1f} MB and disconnected it {crowd.ended} times")
    crowd.close()


def flood(runtime: str, seed: int, stop: Event) -> None:
    """The flooding client's process."""
    random, peer = Random(seed), RawPeer(str(Path(runtime) / CLIENT_SOCKET))
    peer.send(frames(Hello(rid=1)))
    messages = [frames(message) for message in FLOOD]
    sent = 0
    while not stop.is_set():
        if not peer.waits:
            sent += peer.send(random.choice(messages))
        elif not peer.send(b""):
            select.select([peer.socket], [peer.socket], [], 0.01)
        peer.ended()  # also reads the answers
    print(f"flooding client: the coordinator read {sent / 1e6:.1f} MB")
    peer.close()


class Key(NamedTuple):
    """A client's credentials for a network connection."""

    endpoint: str
    server_key: str
    key_file: Path


def flood_sealed(key: Key, _runtime: str, seed: int, stop: Event) -> None:
    """The same over the network."""
    random, context = Random(seed), zmq.Context[zmq.Socket[bytes]]()
    socket = dealer(context, credentials_for(key.endpoint, key.server_key, key.key_file))
    socket.connect(key.endpoint)
    socket.send_multipart(encode(Hello(rid=1)))
    messages = [encode(message) for message in FLOOD]
    sent = 0
    while not stop.is_set():
        with contextlib.suppress(zmq.Again):
            socket.send_multipart(random.choice(messages), zmq.NOBLOCK)
            sent += 1
        if socket.poll(0, zmq.POLLIN) or not socket.poll(10, zmq.POLLIN | zmq.POLLOUT):
            with contextlib.suppress(zmq.Again):
                while True:
                    socket.recv_multipart(zmq.NOBLOCK)
    print(f"flooding client: {sent} messages sent, including those in its own queue")
    socket.close(0)
    context.term()


def count(_runtime: str, _seed: int, stop: Event) -> None:
    """The neighbour's process."""
    while not stop.is_set():
        for _ in range(10_000):
            pass


@contextlib.contextmanager
def beside(what: Callable[[str, int, Event], None], runtime: Path, seed: int) -> Iterator[None]:
    """Run `what` in a process until the block ends."""
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=what, args=(str(runtime), seed, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join(WAIT_S)


Beside = Callable[[str, int, Event], None]
PLACES: dict[str, Beside | None] = {"alone": None, "neighbour": count, "flood": flood, "crowd": attack}


def network(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of a coordinator that listens on the loopback device, with its keys."""
    clients = {}
    for name, messages_per_s in CLIENTS.items():
        pair = keys.make()
        keys.write(folder / f"{name}.key", pair, name)
        rights = {"key": pair.public, "tenant": "default", "rights": ["submit", "read"]}
        clients[name] = rights | {"messages_per_s": messages_per_s}
    keys.write(folder / "server.key", keys.make(), "the coordinator")
    tcp = {"listen": "tcp://127.0.0.1:0", "key_file": str(folder / "server.key")}
    return {"tcp": tcp, "access": {"clients": clients}}


def key_of(installation: Installation, name: str) -> Key:
    """Return the named client's credentials for a running coordinator."""
    found = re.search(r"serving clients listed in \[access\] at (tcp://\S+)", installation.log_of("coordinator"))
    assert found is not None, "no listening address in the coordinator's log"
    return Key(found[1], keys.read(installation.folder / "server.key").public, installation.folder / f"{name}.key")


def measured(
    side: str, kv: Client, places: dict[str, Beside | None], runtime: Path, options: argparse.Namespace
) -> tuple[dict[str, float], list[list[str]]]:
    """Measure one transport; return figures by name and the rows of the report."""
    calls = {"append": appends_us, "request": requests_us}
    found: dict[str, list[float]] = {}
    for i in range(options.rounds):
        for call, measure in calls.items():
            for place, what in places.items():
                with beside(what, runtime, options.seed + i) if what else contextlib.nullcontext():
                    taken = measure(kv, options.seconds)
                for share in (50, 99):
                    found.setdefault(f"{call}_{place}_p{share}_us", []).append(float(np.percentile(taken, share)))
                found.setdefault(f"{call}_{place}_per_s", []).append(len(taken) / options.seconds)
    mid = {key: median(values) for key, values in found.items()}
    rows = []
    for call in calls:
        for place in places:
            p50, p99, rate = (mid[f"{call}_{place}_{what}"] for what in ("p50_us", "p99_us", "per_s"))
            ratio = mid[f"{call}_{place}_p99_ratio"] = p99 / mid[f"{call}_alone_p99_us"]
            rows.append([call, side, place, f"{p50:.0f}", f"{p99:.0f}", f"{rate:.0f}", f"{ratio:.2f}"])
    prefix = "" if side == "ipc" else f"{side}_"
    return {prefix + key: value for key, value in mid.items()}, rows


def appends_us(kv: Client, seconds: float) -> list[float]:
    """Return the microseconds of each append answered within `seconds`; the answers are checked."""
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
    """Return the microseconds of each request answered within `seconds`; the answers are checked."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
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
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--over", choices=("ipc", "tcp"), help="transport [both]")
    parser.add_argument("--only", help="one of the places: neighbour, flood, crowd, slowed")
    parser.add_argument("--share-ms", type=float, default=0.5, help="limits.client_share_ms of the coordinator")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    limits = {"client_share_ms": options.share_ms}
    installation = Installation(context_tokens=LENGTH_MAX, blocks=2048, schedule={}, limits=limits, more=network)
    results: dict[str, float] = {}
    rows: list[list[str]] = []
    with installation, Client(client_endpoint(installation.runtime), timeout_s=WAIT_S) as local:
        local.wait_ready(WAIT_S)
        honest, flooding, slowed = (key_of(installation, name) for name in CLIENTS)
        over_network: dict[str, Beside | None] = {
            "alone": None,
            "flood": partial(flood_sealed, flooding),
            "slowed": partial(flood_sealed, slowed),
        }
        with Client(
            honest.endpoint, timeout_s=WAIT_S, server_key=honest.server_key, key_file=honest.key_file
        ) as distant:
            for side, kv, places in (("ipc", local, PLACES), ("tcp", distant, over_network)):
                if options.over not in (None, side):
                    continue
                chosen = {name: what for name, what in places.items() if options.only in (None, name) or what is None}
                figures, shown = measured(side, kv, chosen, installation.runtime, options)
                results |= figures
                rows += shown
    title = "an honest client alone, beside a busy neighbour, a flooding client, hostile clients and workers"
    heads = ["call", "over", "beside", "p50, us", "p99, us", "a second", "p99 x alone"]
    report(title, heads, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
