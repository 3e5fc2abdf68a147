"""Cost of a command, beside a bare ZeroMQ echo of the same messages in the same run.

    python -m benchmarks.commands [--seconds 1] [--rounds 5] [--json FILE]

A coordinator process with one stand-in pool, and an echo process that receives, unpacks with msgpack, packs and sends
back. Servers are pinned to one core and clients to others, one each where there are enough, the same for both.
Measured: bulk append of one token to 256 client sequences, one command at a time; single appends, many under way, from
one client and from four at once. Both servers are measured in turn, several times over; the printed figures, ratios
too, are medians over the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import msgpack
import numpy as np
import zmq

from kvforge.coordinator.config import CoordinatorConfig, LimitsSection
from kvforge.coordinator.server import Server
from kvforge.protocol import codec, token
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    Append,
    Appended,
    CreateSequence,
    Goodbye,
    Hello,
    Message,
    SequenceInfo,
    WorkerHello,
    WorkerReady,
)
from kvforge.protocol.transport import client_endpoint, dealer, worker_endpoint

from .control_plane import MODEL
from .report import report

BULK = 256
WINDOW = 64
CLIENTS = 4
BLOCKS = 1 << 19
SEQUENCES = 16  # per client, for single appends
Frames = list[bytes]
# Read before anything is pinned: child processes inherit the core of their parent.
ALLOWED = [int(core) for core in os.environ.get("KVFORGE_BENCH_CORES", "").split(",") if core] or sorted(
    os.sched_getaffinity(0)
)


def pin(place: int) -> None:
    """Pin this process to one core: servers to the first, clients to the others in turn where there are others."""
    cores = ALLOWED
    os.sched_setaffinity(0, {cores[0] if not place or len(cores) == 1 else cores[1 + (place - 1) % (len(cores) - 1)]})


def serve(runtime: str) -> None:
    """The coordinator's process."""
    pin(0)
    limits = LimitsSection(sequences_max=2048, blocks_max=BLOCKS, blocks_per_sequence_max=4096, clients_max=16)
    server = Server(CoordinatorConfig(runtime_dir=runtime, limits=limits, drain_s=0.0))
    try:
        server.run()
    finally:
        server.close()


def echo(endpoint: str) -> None:
    """The bare server: unpacks the body, packs it again, sends everything back."""
    pin(0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        identity, body, *rest = socket.recv_multipart()
        socket.send_multipart([identity, msgpack.packb(msgpack.unpackb(body)), *rest])


class Peer:
    """One client connection that sends frames and counts answers."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dealer(self._context)
        self.socket.connect(endpoint)
        self._decoder = codec.Decoder(CLIENT_REPLIES)

    def ask(self, message: Message) -> Message:
        """Sends a command and waits for its reply."""
        self.socket.send_multipart(codec.encode(message))
        return self._decoder.decode(self.socket.recv_multipart())

    def close(self) -> None:
        """Send a goodbye and close."""
        self.socket.send_multipart(codec.encode(Goodbye()))
        self.socket.close(500)
        self._context.term()

    def sequence(self, rid: int) -> int:
        """A new sequence of one token."""
        reply = self.ask(CreateSequence(rid=rid, tokens=np.ones(1, np.int32)))
        assert isinstance(reply, SequenceInfo)
        return reply.sequence_id

    def round_trip_us(self, make: Callable[[int], Message], check: Callable[[Frames], None], seconds: float) -> float:
        """Return the median microseconds of one command after the other, including encoding and decoding here."""
        taken, deadline, rid = [], perf_counter() + seconds, 0
        while perf_counter() < deadline:
            rid += 1
            started = perf_counter()
            self.socket.send_multipart(codec.encode(make(rid)))
            check(self.socket.recv_multipart())
            taken.append(perf_counter() - started)
        return float(np.median(taken)) * 1e6

    def pipelined(self, make: Callable[[int], Message], check: Callable[[Frames], None], seconds: float) -> float:
        """Return the commands a second with WINDOW commands in flight."""
        sent = done = 0
        started = perf_counter()
        deadline = started + seconds
        while perf_counter() < deadline:
            while sent - done < WINDOW:
                sent += 1
                self.socket.send_multipart(codec.encode(make(sent)))
            check(self.socket.recv_multipart())
            done += 1
        for _ in range(sent - done):
            check(self.socket.recv_multipart())
        return sent / (perf_counter() - started)


def append(sequences: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Callable[[int], Message]:
    """One token to each of the sequences."""
    ones = np.ones(sequences.size, np.int32)
    return lambda rid: Append(rid=rid, sequence_ids=sequences, counts=ones, tokens=ones)


def append_in_turn(sequences: list[int]) -> Callable[[int], Message]:
    """One token to one of the sequences."""
    one = np.ones(1, np.int32)
    each = [np.array([sequence], np.int64) for sequence in sequences]
    return lambda rid: Append(rid=rid, sequence_ids=each[rid % len(each)], counts=one, tokens=one)


def appended(frames: Frames) -> None:
    """The reply of the coordinator, decoded."""
    reply = DECODER.decode(frames)
    assert isinstance(reply, Appended), reply


def echoed(frames: Frames) -> None:
    """The reply of the echo, unpacked."""
    msgpack.unpackb(frames[0])


DECODER = codec.Decoder(CLIENT_REPLIES)


def one_client(endpoint: str, real: bool, seconds: float, results: Connection, place: int) -> None:
    """A client process that appends to sequences of its own, or has the same bytes echoed."""
    pin(place)
    peer = Peer(endpoint)
    sequences = list(range(1, SEQUENCES + 1))
    if real:
        peer.ask(Hello(rid=1))
        sequences = [peer.sequence(2 + i) for i in range(SEQUENCES)]
    make, check = append_in_turn(sequences), appended if real else echoed
    peer.pipelined(make, check, 0.3)
    results.send("ready")
    results.recv()
    results.send(peer.pipelined(make, check, seconds))
    if real:
        peer.close()


def together(endpoint: str, real: bool, clients: int, seconds: float) -> float:
    """Return the commands a second of `clients` clients at once."""
    pipes = [multiprocessing.Pipe() for _ in range(clients)]
    processes = [
        multiprocessing.Process(target=one_client, args=(endpoint, real, seconds, theirs, 1 + i), daemon=True)
        for i, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for mine, _ in pipes:
        assert mine.recv() == "ready"
    for mine, _ in pipes:
        mine.send("go")
    rates = [mine.recv() for mine, _ in pipes]
    for process in processes:
        process.join(10)
    return float(sum(rates))


def bulk(endpoint: str, real: bool, seconds: float) -> float:
    """Microseconds of one append to BULK sequences."""
    peer = Peer(endpoint)
    sequences = np.arange(1, BULK + 1, dtype=np.int64)
    if real:
        peer.ask(Hello(rid=1))
        sequences = np.array([peer.sequence(2 + i) for i in range(BULK)], np.int64)
    make, check = append(sequences), appended if real else echoed
    peer.round_trip_us(make, check, 0.2)
    spent = peer.round_trip_us(make, check, seconds)
    if real:
        peer.close()
    return spent


def register(runtime: Path) -> Peer:
    """A stand-in worker with a pool, so that appends allocate blocks."""
    worker = Peer(worker_endpoint(runtime))
    hello = WorkerHello(rid=1, name="w0", pid=os.getpid(), token=token.read(runtime))
    worker.socket.send_multipart(codec.encode(hello))
    worker.socket.recv_multipart()
    ready = WorkerReady(rid=2, model=MODEL, blocks=BLOCKS, bytes_per_block=1, kv_dtype="float32", device="none")
    worker.socket.send_multipart(codec.encode(ready))
    worker.socket.recv_multipart()
    return worker


def ratio(ours: list[float], echo: list[float]) -> float:
    """Median of the rounds' ratios."""
    return float(np.median(np.array(ours) / np.array(echo)))


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commands", description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="how often each measurement is made")
    options = parser.parse_args()
    os.environ["KVFORGE_BENCH_CORES"] = ",".join(map(str, ALLOWED))  # for the child processes
    pin(1)
    multiprocessing.set_start_method("spawn")
    rounds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        runtime, address = Path(folder) / "r", f"ipc://{folder}/echo"
        servers = [
            multiprocessing.Process(target=serve, args=(str(runtime),), daemon=True),
            multiprocessing.Process(target=echo, args=(address,), daemon=True),
        ]
        for server in servers:
            server.start()
        try:
            worker = register(runtime)
            endpoint = client_endpoint(runtime)
            for _ in range(options.rounds):
                for name, where, real in (("kvforge", endpoint, True), ("echo", address, False)):
                    one = together(where, real, 1, options.seconds)
                    four = together(where, real, CLIENTS, options.seconds)
                    found = {
                        f"{name}_bulk_us": bulk(where, real, options.seconds),
                        f"{name}_one_per_s": one,
                        f"{name}_four_per_s": four,
                        f"{name}_four_by_one": four / one,
                    }
                    for key, value in found.items():
                        rounds.setdefault(key, []).append(value)
            worker.close()
        finally:
            servers[0].terminate()
            servers[0].join(10)
            servers[1].kill()
            servers[1].join(10)
    os.sched_setaffinity(0, ALLOWED)
    mid = {key: float(np.median(values)) for key, values in rounds.items()}
    mid["bulk_by_echo"] = ratio(rounds["kvforge_bulk_us"], rounds["echo_bulk_us"])
    mid["one_by_echo"] = ratio(rounds["kvforge_one_per_s"], rounds["echo_one_per_s"])
    rows: list[list[object]] = [
        [f"append a token to {BULK} sequences, us", f"{mid['kvforge_bulk_us']:.0f}", f"{mid['echo_bulk_us']:.0f}"],
        ["single appends a second, one client", f"{mid['kvforge_one_per_s']:.0f}", f"{mid['echo_one_per_s']:.0f}"],
        [f"the same, {CLIENTS} clients", f"{mid['kvforge_four_per_s']:.0f}", f"{mid['echo_four_per_s']:.0f}"],
        [f"{CLIENTS} clients / one", f"{mid['kvforge_four_by_one']:.2f}", f"{mid['echo_four_by_one']:.2f}"],
    ]
    report("commands beside a bare echo", ["what", "kvforge", "echo"], rows, mid, options.json)
    print(f"bulk: {mid['bulk_by_echo']:.2f} x the echo; one client: {mid['one_by_echo']:.0%} of the echo's rate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
