"""An honest client next to hostile peers gets the same answers, over the same connection, in as many messages.

`python -m benchmarks.hostile` measures the latency; no test asserts it.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic

import pytest

from kvforge import CapacityExceeded, Client
from kvforge.process.leash import leashed
from kvforge.protocol.transport import CLIENT_SOCKET, client_endpoint, worker_endpoint
from tests.hostile.crowd import Crowd
from tests.hostile.raw import WAIT_S, RawPeer
from tests.hostile.standin import StandIn

ROUNDS = 300
GROWTH_BYTES_MAX = 64 << 20


class Coordinator:
    """A coordinator process."""

    def __init__(self, folder: Path, config: str = "", descriptors: int | None = None) -> None:
        self.runtime = folder / "r"
        self._log = folder / "log"
        file = folder / "c.toml"
        file.write_text(f'runtime_dir = "{self.runtime}"\n{config}')
        command = f"exec {sys.executable} -m kvforge.coordinator --config {file}"
        if descriptors is not None:
            command = f"ulimit -n {descriptors}; {command}"
        bash = leashed(["/bin/bash", "-c", command])
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(bash, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 - counted, not walked

    @property
    def resident_bytes(self) -> int:
        statm = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def client(self) -> Client:
        return Client(client_endpoint(self.runtime), timeout_s=WAIT_S, connect_timeout_s=WAIT_S)

    def wait_listening(self) -> None:
        """Wait until it accepts connections."""
        with self.client() as kv:
            kv.health()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def started() -> Iterator[list[Coordinator]]:
    made: list[Coordinator] = []
    yield made
    for coordinator in made:
        coordinator.close()


def honest_round(kv: Client, tokens: list[int], sequence: int) -> None:
    """Run the operations of an honest client and check each answer."""
    added = [len(tokens) % 97, len(tokens) % 89]
    kv.append([sequence], [added])
    tokens += added
    assert list(kv.tokens(sequence)) == tokens
    # A ghost worker stays registered after its first handshake, until the next sweep.
    assert [name for name in workers(kv) if not name.startswith("ghost-")] == ["honest"]


def workers(kv: Client) -> list[str]:
    return [worker.name for worker in kv.health().workers]


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_an_honest_client_does_not_notice(folder: Path, started: list[Coordinator], seed: int) -> None:
    coordinator = Coordinator(folder, "drain_s = 0\n")
    started.append(coordinator)
    with coordinator.client() as kv, ExitStack() as stack:
        assert kv.health().live, "the coordinator must accept new connections"
        stack.enter_context(StandIn(worker_endpoint(coordinator.runtime)))
        tokens = [1, 2, 3]
        sequence = kv.create_sequence(tokens)
        honest_round(kv, tokens, sequence)
        crowd = stack.enter_context(closing(Crowd(coordinator.runtime, seed)))
        boot, connections, before_bytes = kv.health(), clients(kv), coordinator.resident_bytes
        for _ in range(ROUNDS):
            crowd.go_on()
            honest_round(kv, tokens, sequence)
        assert coordinator.resident_bytes - before_bytes < GROWTH_BYTES_MAX
        assert crowd.sent_bytes > 1 << 20
        assert crowd.ended > 10
        crowd.close()
        honest_round(kv, tokens, sequence)
        assert kv.health().model == boot.model
        until_clients(kv, connections)
        assert workers(kv) == ["honest"]
    assert coordinator.process.poll() is None
    assert "Traceback" not in coordinator.log
    assert len(coordinator.log) < 200_000  # log lines per peer are limited
    assert coordinator.end() == 0


def clients(kv: Client) -> int:
    return kv.stats().clients


def until_clients(kv: Client, count: int) -> None:
    """Wait until `count` clients are left."""
    deadline = monotonic() + WAIT_S
    while clients(kv) != count:
        assert monotonic() < deadline, f"{clients(kv)} clients are left, expected {count}"
        select.select([], [], [], 0.02)


LIMITS = "[limits]\nclients_max = 16\npending_handshakes_max = 8\npools_max = 4\n"


def test_more_connections_than_descriptors_are_refused_and_nobody_else_notices(
    folder: Path, started: list[Coordinator]
) -> None:
    coordinator = Coordinator(folder, LIMITS, descriptors=112)
    started.append(coordinator)
    with coordinator.client() as kv:
        kv.health()
        path = str(coordinator.runtime / CLIENT_SOCKET)
        crowd: list[RawPeer] = []
        for _ in range(20):
            crowd += [RawPeer(path) for _ in range(15)]
            assert kv.health().live
            assert coordinator.descriptors <= 112
        for peer in crowd[:200]:
            peer.wait_ended()
        with coordinator.client() as other:
            assert other.health().live
        for peer in crowd:
            peer.close()
    assert coordinator.end() == 0


def test_where_descriptors_run_out_all_the_same_connections_are_refused(
    folder: Path, started: list[Coordinator]
) -> None:
    coordinator = Coordinator(folder, LIMITS)
    started.append(coordinator)
    with coordinator.client() as kv:
        kv.health()
        _, hard = resource.prlimit(coordinator.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(coordinator.process.pid, resource.RLIMIT_NOFILE, (coordinator.descriptors + 2, hard))
        crowd = [RawPeer(str(coordinator.runtime / CLIENT_SOCKET)) for _ in range(20)]
        for peer in crowd[4:]:
            peer.wait_ended()
        assert kv.health().live
        resource.prlimit(coordinator.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        with coordinator.client() as other:
            assert other.health().live
        for peer in crowd:
            peer.close()
    assert "refused a connection: out of file descriptors" in coordinator.log
    assert coordinator.end() == 0


def test_more_clients_than_descriptors_are_refused_at_the_start(folder: Path, started: list[Coordinator]) -> None:
    coordinator = Coordinator(folder, "[limits]\nclients_max = 500\n", descriptors=256)
    started.append(coordinator)
    assert coordinator.process.wait(WAIT_S) == 2
    assert re.search(r"limits\.clients_max: the connections need \d+ descriptors, .* may open 256", coordinator.log)


def test_one_client_more_than_are_admitted_is_told_so(folder: Path, started: list[Coordinator]) -> None:
    coordinator = Coordinator(folder, "[limits]\nclients_max = 1\n")
    started.append(coordinator)
    with coordinator.client() as kv, coordinator.client() as other:
        kv.health()
        with pytest.raises(CapacityExceeded, match="clients_max"):
            other.health()
        assert kv.health().live


def test_a_log_that_nobody_reads_stops_nobody(folder: Path) -> None:
    """As under a `kvforge up` stopped by Ctrl-Z: the log's pipe is full and stays full."""
    file = folder / "c.toml"
    file.write_text(f'runtime_dir = "{folder / "r"}"\nlog_level = "debug"\n')
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_end, b"x" * 4096)
    os.set_blocking(write_end, True)
    command = [sys.executable, "-m", "kvforge.coordinator", "--config", str(file)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=write_end) as process:
        try:
            with Client(client_endpoint(folder / "r"), timeout_s=WAIT_S, connect_timeout_s=WAIT_S) as kv:
                assert kv.health().live
        finally:
            process.kill()
            os.close(read_end)
            os.close(write_end)
