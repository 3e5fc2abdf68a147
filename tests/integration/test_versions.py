"""Client and worker of protocol version 1 with today's coordinator and client."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvforge import Client, SamplingParams
from tests.coordinator.driver import continuation
from tools.cluster.cluster import END_S, Cluster

from .version_1 import VOCABULARY, Answer, Lost, Wire

PROMPT = [5, 6, 7, 8, 9]
LONG = 2000


@contextmanager
def v1_worker(cluster: Cluster, name: str = "old") -> Iterator[subprocess.Popen[bytes]]:
    """Return a registered worker process of version 1."""
    command = [sys.executable, "-m", "tests.integration.version_1", cluster.worker_endpoint, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            wait_ready(process)
            yield process
        finally:
            process.kill()


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"


def hello(cluster: Cluster) -> Wire:
    """Connect a client of version 1, which is accepted."""
    wire = Wire(cluster.endpoint, "coordinator to client")
    welcome = wire.ask("Hello", rid=1)
    assert welcome.version == 1
    return wire


def submit(wire: Wire, rid: int, count: int, **values: object) -> int:
    """Submit a greedy request; return its id."""
    accepted = wire.ask("Submit", rid=rid, max_tokens=count, prompt=PROMPT, sampling={"temperature": 0.0}, **values)
    assert accepted.request_id > 0
    return int(accepted.request_id)


def follows(count: int) -> list[int]:
    return continuation(PROMPT, count, VOCABULARY)


def test_client_and_worker_of_version_1_are_served() -> None:
    with Cluster() as cluster:
        today = cluster.start()
        assert today.health().live
        with v1_worker(cluster) as worker, hello(cluster) as wire:
            health = wire.ask("GetHealth", rid=2)
            assert health.ready and [row.name for row in health.workers] == ["old"]
            request = submit(wire, 3, 40)
            answer = Answer().read(wire, request, 41)
            assert (answer.tokens, answer.ended.reason) == (follows(40), "length")
            running = submit(wire, 4, LONG, detached=True)
            Answer().read(wire, running, 5)
            assert type(wire.ask("Cancel", rid=5, request_id=running)).__name__ == "Done"
            assert wire.ask("GetRequest", rid=6, request_id=running).state == "cancelled"
            refused = wire.ask("Attach", rid=7, request_id=1 << 40)
            assert (type(refused).__name__, refused.error.code) == ("Refused", "request_not_found")
            assert list(ask_today(today, 12)) == follows(12), "a client of today, and its worker is one of then"
            wire.send("Goodbye")
            today.drain()
            cluster.signal("coordinator", signal.SIGTERM)
            assert worker.wait(END_S) == 0, "the worker must exit on a stop"


def ask_today(kv: Client, count: int) -> tuple[int, ...]:
    return kv.submit(PROMPT, max_tokens=count, sampling=SamplingParams(temperature=0.0)).result(30).tokens


def test_they_lose_their_connection_with_the_coordinator_and_go_on_with_the_next() -> None:
    """As in version 1: the client gets no message that it cannot read. Its requests are kept as long as those of any
    lost client, and the worker, without valid state, registers as a new one."""
    with Cluster() as cluster:
        today = cluster.start()
        assert today.health().live
        with v1_worker(cluster) as worker:
            with hello(cluster) as wire:
                request = submit(wire, 2, LONG)
                answer = Answer().read(wire, request, 5)
                cluster.kill("coordinator")
                with pytest.raises(Lost):
                    answer.read(wire, request, LONG + 1)
            cluster.start_coordinator()
            wait_ready(worker)
            with hello(cluster) as wire:
                attached = wire.ask("Attach", rid=2, request_id=request, offset=len(answer.tokens))
                assert attached.request_id == request
                rest = Answer(attached.offset).read(wire, request, LONG)
                assert answer.tokens + rest.tokens == follows(LONG)
            assert [row.pid for row in today.health().workers] == [worker.pid]
