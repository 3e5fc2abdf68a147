"""The loop over real sockets, turn by turn: a busy peer delays no other peer.

The tests count turns and messages, never time.
"""

from __future__ import annotations

import os
import select
import shutil
import socket as sockets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import zmq

from kvforge.coordinator.config import CoordinatorConfig, LimitsSection
from kvforge.coordinator.machine_store import MachineStore
from kvforge.coordinator.server import RuntimeLock, Server
from kvforge.coordinator.turn import BEAT_US
from kvforge.protocol import codec, token, transport
from kvforge.protocol.errors import CoordinatorInUse, JournalCorrupt
from kvforge.protocol.messages import (
    WORKER_REPLIES,
    CreateSequence,
    GetHealth,
    Hello,
    Refused,
    Submit,
    WorkerHello,
    WorkerWelcome,
)
from kvforge.protocol.tables import TablesReader
from tests.coordinator.net import DEADLINE_S, until
from tests.protocol.frozen import Version
from tests.protocol.systemd_ear import Ear

UNDER_WAY = 4000
TURNS_MAX = 5_000


class Peer:
    """A client or a worker over a real socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = transport.dealer(context)
        self.socket.connect(endpoint)
        self.answers = 0

    def send(self, *messages: object) -> None:
        for message in messages:
            self.socket.send_multipart(codec.encode(message))  # type: ignore[arg-type]

    def has(self, event: int) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & event)  # type: ignore[arg-type]

    def read(self) -> None:
        """Receive all pending messages."""
        while self.has(zmq.POLLIN):
            self.socket.recv_multipart()
            self.answers += 1


class Bench:
    """A server driven turn by turn, and its peers."""

    def __init__(self, folder: Path) -> None:
        limits = LimitsSection(sequences_max=4, blocks_max=64, blocks_per_sequence_max=8, messages_per_turn_max=4)
        self.server = Server(CoordinatorConfig(runtime_dir=str(folder), limits=limits, drain_s=0.2))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[Peer] = []
        self._folder = folder

    def turn(self) -> None:
        self.server._wait()
        self.server.turn()

    def worker(self) -> Peer:
        return self._peer(transport.worker_endpoint(self._folder))

    def client(self) -> Peer:
        """Connect a client and complete its handshake."""
        made = self._peer(transport.client_endpoint(self._folder))
        self.ask(made, Hello(rid=1))
        return made

    def ask(self, peer: Peer, message: object) -> None:
        """Send a message and run turns until the answer arrives."""
        peer.answers = 0
        peer.send(message)
        while not peer.answers:
            self.server._look(10)
            self.server.turn()
            peer.read()

    def _peer(self, endpoint: str) -> Peer:
        """Connect a peer; the server must run turns for the ZMTP handshake."""
        made = Peer(self._context, endpoint)
        self._peers.append(made)
        while not made.has(zmq.POLLOUT):
            self.server._look(10)
            self.server.turn()
        return made

    def close(self) -> None:
        for peer in self._peers:
            peer.socket.close(0)
        self._context.term()
        self.server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))  # a socket path must be short
    made = Bench(folder)
    yield made
    made.close()
    shutil.rmtree(folder)


def test_a_server_that_hears_nothing_wakes_for_what_is_due_and_for_nothing_else(bench: Bench) -> None:
    client, gauges = bench.client(), TablesReader(bench.server.tables.path).gauges
    bench.ask(client, CreateSequence(rid=2, idle_ttl_ms=300, tokens=np.arange(3, dtype=np.int32)))
    assert (
        bench.server.machine.cache.sequences._last_id > bench.server.machine.requests.first_id
    )  # the coordinator must have served before
    waits = 0
    while gauges()["sequences"]:
        bench.turn()
        waits += 1
    assert waits <= 2
    turns, uptime_us = gauges()["turns"], gauges()["uptime_us"]
    bench.turn()  # nothing is due except the gauges
    assert gauges()["turns"] == turns
    assert gauges()["uptime_us"] >= uptime_us + BEAT_US


def test_an_idle_server_feeds_systemds_watchdog_with_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Ear(tmp_path / "notify", monkeypatch)) as ear:
        ear.watch(4)  # after a pause of one microsecond: every turn feeds the watchdog
        with TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder, closing(Bench(Path(folder))) as bench:
            fed = []
            for _ in range(2):
                bench.turn()
                fed.append(ear.heard())
            assert fed == [["WATCHDOG=1"]] * 2


def test_a_drain_by_signal_is_taken_up_at_once_and_ends_when_it_was_said(bench: Bench) -> None:
    client = bench.client()
    bench.ask(client, Submit(rid=2, max_tokens=1, prompt=np.array([1], np.int32)))  # no worker ever connects
    bench.server._on_signal(15, None)
    bench.server._write_wakeup.send(b"\x0f")
    bench.server._handle_signals()
    assert bench.server.machine.draining
    turns = 0
    while not bench.server._finished():
        bench.turn()
        bench.server._handle_signals()
        turns += 1
    assert turns <= 3
    assert not bench.server.machine.requests.live
    assert [request.reason for request in bench.server.machine.requests.finished.values()] == ["failed"]


def test_a_worker_that_speaks_version_1_and_knows_no_token_is_let_in(bench: Bench) -> None:
    """The operating system reports the coordinator's own user, who may read the token."""
    hello = next(
        [bytes.fromhex(frame) for frame in said["frames"]]
        for said in Version.read(1).examples
        if said["message"] == "WorkerHello" and said["meaning"]["version_max"] == 1
    )
    worker = bench.worker()
    worker.socket.send_multipart(hello)
    while not worker.has(zmq.POLLIN):
        bench.turn()
    assert isinstance(codec.Decoder(WORKER_REPLIES).decode(worker.socket.recv_multipart()), WorkerWelcome)
    assert len(bench.server.machine.workers) == 1


def test_a_worker_with_another_token_is_refused(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    worker = bench.worker()
    worker.send(WorkerHello(rid=1, name="w", pid=1, token="0" * 64))
    while not worker.has(zmq.POLLIN):
        bench.turn()
    refused = codec.Decoder(WORKER_REPLIES).decode(worker.socket.recv_multipart())
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.error.fields) == ("not_allowed", {"right": "worker"})
    assert "another token" in refused.error.message
    assert "another token" in caplog.text
    assert not bench.server.machine.workers
    assert len(bench.server.workers) == 0


def test_a_token_is_private_new_with_each_boot_and_gone_with_it(bench: Bench) -> None:
    runtime = bench.server.runtime
    first = token.read(runtime)
    assert len(first) == token.TOKEN_LENGTH_MAX
    assert (runtime / token.TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    assert token.make(runtime) != first
    bench.server.close()
    assert token.read(runtime) == ""
    assert not list(runtime.glob(f"{token.TOKEN_FILE}*"))


def test_a_client_that_always_has_more_hides_no_worker(bench: Bench) -> None:
    busy = bench.client()
    busy.send(*[GetHealth(rid=2)] * UNDER_WAY)
    while busy.answers < 100:
        bench.turn()
        busy.read()
    worker = bench.worker()
    worker.send(WorkerHello(rid=1, name="w", pid=1, token=token.read(bench.server.runtime)))
    for _ in range(TURNS_MAX):
        busy.send(*[GetHealth(rid=2)] * 4)  # the limit of one turn
        bench.turn()
        busy.read()
        if bench.server.machine.workers:
            break
    assert bench.server.machine.workers, f"no worker registered in {TURNS_MAX} turns"
    assert bench.server.clients.waiting, "the client's messages ran out"


def test_what_a_worker_has_sent_is_heard_in_the_next_turn_beside_a_client_with_much_left(bench: Bench) -> None:
    busy, worker = bench.client(), bench.worker()
    bench.ask(worker, WorkerHello(rid=1, name="w", pid=1, token="0" * 64))  # refused, which ends its handshake
    busy.send(*[GetHealth(rid=2)] * UNDER_WAY)

    def has_much_left() -> bool:
        bench.server._look(0)
        bench.server.turn()
        return bench.server.clients.waiting

    until(has_much_left)  # its messages may arrive in parts
    worker.send(WorkerHello(rid=1, name="w", pid=1, token=token.read(bench.server.runtime)))
    assert select.select([bench.server.workers], [], [], DEADLINE_S)[0], "the message must have arrived"
    assert bench.server.clients.waiting
    bench.turn()
    assert bench.server.machine.workers

    def has_more() -> bool:
        bench.server._look(0)
        return bench.server.clients.waiting

    until(has_more)  # the turn may have read all that had arrived


def test_a_client_with_few_messages_does_not_wait_for_one_with_many(bench: Bench) -> None:
    busy, other = bench.client(), bench.client()
    busy.answers = other.answers = 0
    busy.send(*[GetHealth(rid=2)] * UNDER_WAY)
    while not busy.answers:
        bench.turn()
        busy.read()
    other.send(*[GetHealth(rid=2)] * 8)
    while other.answers < 8:
        bench.turn()
        busy.read()
        other.read()
    assert busy.answers < UNDER_WAY // 2, "the busy peer delayed the other one"


def test_a_lock_that_was_let_go_while_it_was_taken_is_taken_anew(tmp_path: Path, monkeypatch: Any) -> None:
    """One coordinator ends while the next one starts: it removes the lock file between the other's open and lock."""
    first = RuntimeLock(tmp_path)
    opened = os.open

    def open_and_let_go(*arguments: Any, **more: Any) -> int:
        descriptor = opened(*arguments, **more)
        first.release()
        return descriptor

    monkeypatch.setattr("kvforge.coordinator.server.os.open", open_and_let_go)
    second = RuntimeLock(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CoordinatorInUse):
        RuntimeLock(tmp_path)
    second.release()
    assert not list(tmp_path.iterdir())


def test_who_comes_back_waits_at_the_door_while_the_journal_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was turned away would have to retry and could miss its deadline."""
    with TemporaryDirectory(prefix="kvf-", dir="/tmp") as name:
        folder, early = Path(name), []

        def read_slowly(*arguments: Any) -> MachineStore:
            for endpoint in (transport.client_endpoint(folder), transport.worker_endpoint(folder)):
                early.append(sockets.socket(sockets.AF_UNIX))
                early[-1].connect(endpoint.removeprefix("ipc://"))
            return MachineStore(*arguments)

        monkeypatch.setattr("kvforge.coordinator.server.MachineStore", read_slowly)
        bench = Bench(folder)
        while not all(select.select([peer], [], [], 0)[0] for peer in early):
            bench.turn()  # each gets a ZMTP greeting
        for peer in early:
            peer.close()
        bench.close()


def test_a_coordinator_has_one_thread() -> None:
    script = "import os, kvforge.coordinator.__main__; print(len(os.listdir('/proc/self/task')))"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_server_that_cannot_read_its_journal_leaves_no_socket_behind() -> None:
    with TemporaryDirectory(prefix="kvf-", dir="/tmp") as name:
        state = Path(name) / "state"
        state.mkdir(mode=0o700)
        (state / "state-0000000000000001").write_bytes(b"damaged")
        with pytest.raises(JournalCorrupt):
            Bench(Path(name))
        assert [path.name for path in Path(name).iterdir()] == ["state"]
