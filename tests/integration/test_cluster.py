"""A coordinator, workers and clients as real processes over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgpack
import numpy as np
import pytest
import zmq

from kvforge import Client, Request, SamplingParams
from kvforge.protocol import codec, token
from kvforge.protocol.errors import (
    AlreadyFinished,
    CapacityExceeded,
    InvalidRequest,
    KvforgeError,
    ProtocolError,
    RequestNotFound,
    VersionMismatch,
)
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    WORKER_REPLIES,
    GetHealth,
    Health,
    Hello,
    Refused,
    Submit,
    Welcome,
    WorkerHello,
)
from kvforge.protocol.tables import TablesReader
from kvforge.protocol.transport import TABLES_FILE, configure_dealer
from tools.cluster.cluster import Cluster

from .midway import stopped_midway
from .shared import Shared, wait_empty

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class RawPeer:
    """A DEALER that sends arbitrary frames."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        configure_dealer(self.socket)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.setsockopt(zmq.SNDTIMEO, 20_000)
        self.socket.connect(endpoint)

    def ask(self, frames: Sequence[bytes | memoryview]) -> object:
        self.socket.send_multipart(frames)
        return codec.Decoder(CLIENT_REPLIES).decode(self.socket.recv_multipart())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._context.destroy(linger=0)


def test_hostile_peers_get_typed_errors_and_disturb_nobody(shared: Shared) -> None:
    cluster, kv = shared.cluster, shared.kv
    with ExitStack() as stack:
        alone = kv.submit([5, 6, 7], max_tokens=24, sampling=GREEDY).result(30).tokens
        request = kv.submit([5, 6, 7], max_tokens=24, sampling=GREEDY)
        random = np.random.default_rng(7)
        peer = stack.enter_context(RawPeer(cluster.endpoint))
        hello = [bytes(frame) for frame in codec.encode(Hello(rid=1))]
        bad = [b"\xc1", msgpack.packb({"t": "nobody"}), b"\x91" * 3000, msgpack.packb({"t": "step_result"}), b""]
        for body in [*bad, *(random.bytes(50) for _ in range(40))]:
            refused = peer.ask([body])
            assert isinstance(refused, Refused)
            assert refused.error.code == ProtocolError.code
        before_hello = peer.ask([bytes(frame) for frame in codec.encode(GetHealth(rid=5))])
        assert isinstance(before_hello, Refused)
        assert isinstance(peer.ask(hello), Welcome)
        wrong = peer.ask([msgpack.packb({"t": "submit", "rid": 9, "max_tokens": "x", "n": [1]}), b"\0\0\0\0"])
        assert isinstance(wrong, Refused)
        assert (wrong.rid, wrong.error.code, wrong.error.fields) == (9, "invalid_request", {"field": "max_tokens"})
        assert isinstance(peer.ask([bytes(frame) for frame in codec.encode(GetHealth(rid=5))]), Health)
        worker = stack.enter_context(RawPeer(cluster.worker_endpoint))
        worker.socket.send_multipart([b"garbage"])
        worker.socket.recv_multipart()
        assert request.result(30).tokens == alone
        wait_empty(kv)


def test_versions_that_do_not_meet_are_refused_naming_both(shared: Shared) -> None:
    with RawPeer(shared.cluster.endpoint) as peer:
        refused = peer.ask([bytes(f) for f in codec.encode(Hello(rid=4, version_min=90, version_max=99))])
    assert isinstance(refused, Refused)
    assert refused.error.code == VersionMismatch.code
    assert "90 to 99" in refused.error.message
    assert refused.error.fields["peer_max"] == 99


def test_refusals_at_the_door_name_the_field_and_allocate_nothing() -> None:
    """behaviour 27, and 4: requests that can never fit are refused at submit."""
    with Cluster(blocks=8) as cluster:
        kv = cluster.start("w0")
        fresh = kv.stats()
        cases: list[tuple[list[int], dict[str, object], str]] = [
            ([1, 2, 999], {}, "prompt"),
            ([1] * 3000, {}, "prompt"),
            ([1, 2], {"max_tokens": 100_000}, "max_tokens"),
            ([1, 2], {"sampling": SamplingParams(temperature=101.0)}, "sampling.temperature"),
            ([1, 2], {"sampling": SamplingParams(stop_tokens=tuple(range(17)))}, "sampling.stop_tokens"),
        ]
        for prompt, options, field in cases:
            with pytest.raises(InvalidRequest) as caught:
                kv.submit(prompt, **options)  # type: ignore[arg-type]
            assert caught.value.field == field
        with pytest.raises(InvalidRequest, match="13 blocks; the largest pool has 8"):
            kv.submit([1] * 100, max_tokens=100)
        with pytest.raises(RequestNotFound) as missing:
            kv.status(12345)
        assert missing.value.request_id == 12345
        after = kv.stats()
        assert after.pools == fresh.pools
        assert after.requests.accepted_total == 0
        done = kv.submit([1, 2], max_tokens=2, sampling=GREEDY)
        done.result(30)
        with pytest.raises(AlreadyFinished):
            kv.cancel(done.id)


def test_a_request_waits_for_a_worker_and_readiness_says_why() -> None:
    """behaviour 34."""
    with Cluster() as cluster:
        kv = cluster.start()
        health = kv.health()
        assert health.live
        assert not health.ready
        assert "no worker" in health.reason
        request = kv.submit([1, 2, 3], max_tokens=4, sampling=GREEDY)
        assert kv.status(request.id).state == "pending"
        cluster.start_worker("w0")
        assert len(request.result(60).tokens) == 4


@pytest.mark.parametrize("watch_us", [0, 300], ids=["messages", "shared memory"])
def test_a_killed_worker_gives_its_requests_back_and_they_end_with_the_same_tokens(watch_us: int) -> None:
    """behaviour 35; steps handed over by message alone, and through shared memory too."""
    with Cluster(worker=f"watch_us = {watch_us}") as cluster:
        kv = cluster.start("w0")

        def submitted() -> list[Request]:
            return [kv.submit([i, 2, 3], max_tokens=200, sampling=GREEDY) for i in range(4)]

        expected = [request.result(60).tokens for request in submitted()]
        requests = stopped_midway(cluster, kv, submitted, 200, "w0")
        cluster.kill("w0")
        cluster.start_worker("w0")
        for request, tokens in zip(requests, expected, strict=True):
            assert request.result(60).tokens == tokens
        stats = wait_empty(kv)
        assert stats.requests.recomputed_tokens_total > 0


def test_the_clients_of_two_workers_get_what_one_worker_gives(shared: Shared) -> None:
    prompts = [[i, i + 1, 7, 9] * (1 + i % 5) for i in range(12)]
    alone = [
        shared.kv.submit(prompt, max_tokens=20, sampling=SamplingParams(seed=i)).result(60)
        for i, prompt in enumerate(prompts)
    ]
    with Cluster() as cluster:
        kv = cluster.start("w0", "w1")
        together = [
            kv.submit(prompt, max_tokens=20, sampling=SamplingParams(seed=i)) for i, prompt in enumerate(prompts)
        ]
        assert [request.result(60).tokens for request in together] == [done.tokens for done in alone]
        assert {kv.status(request.id).worker for request in together} == {"w0", "w1"}
        wait_empty(kv)


CLIENT = """
import sys
from kvforge import Client, Request, SamplingParams
with Client(sys.argv[1], timeout_s=60, connect_timeout_s=30) as kv:
    requests = [kv.submit([i, 1, 2], max_tokens=1500, sampling=SamplingParams(ignore_eos=True)) for i in range(3)]
    for token in requests[0]:
        print("streaming", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_client_that_dies_leaves_nothing(number: signal.Signals) -> None:
    """behaviour 29: client death."""
    with Cluster(blocks=512, coordinator="[limits]\nlease_s = 0.2\n") as cluster:
        kv = cluster.start("w0")
        command = [sys.executable, "-c", textwrap.dedent(CLIENT), cluster.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"streaming\n"
            assert kv.stats().requests.running == 3
            os.kill(process.pid, number)
        stats = wait_empty(kv)
        assert stats.requests.cancelled_total == 3
        assert {row.reason for row in kv.requests().requests} == {"cancelled"}


def test_cancel_while_pending_and_running() -> None:
    """behaviour 28."""
    with Cluster(blocks=96, coordinator="[schedule]\nstep_rows_max = 1\n") as cluster:
        kv = cluster.start("w0")
        running = kv.submit([1, 2, 3], max_tokens=1000, sampling=GREEDY)
        pending = kv.submit([1, 2, 4], max_tokens=1000, sampling=GREEDY)
        next(iter(running))
        assert kv.status(pending.id).state == "pending"
        for request in (pending, running):
            kv.cancel(request.id)
            kv.cancel(request.id)  # again: the same answer
            assert request.result(30).reason == "cancelled"
            assert kv.status(request.id).state == "cancelled"
        wait_empty(kv)


def test_the_published_tables_agree_with_the_statistics(shared: Shared) -> None:
    """behaviour 36."""
    kv = shared.kv
    before = kv.stats().requests.generated_tokens_total
    requests = [kv.submit([i, 2, 3], max_tokens=40, sampling=GREEDY) for i in range(6)]
    for request in requests:
        request.result(30)
    stats = wait_empty(kv)
    reader = TablesReader(shared.cluster.runtime / TABLES_FILE)
    gauges = reader.gauges()
    pool = stats.pools[0]
    assert (gauges["blocks_total"], gauges["blocks_free"]) == (pool.blocks, pool.free)
    assert gauges["blocks_cached"] == pool.cached
    assert gauges["generated_tokens_total"] == stats.requests.generated_tokens_total == before + 240
    assert int(reader.block_refcount.sum()) == 0
    with pytest.raises(ValueError, match="read-only"):
        reader.block_refcount[0] = 1


def test_two_coordinators_do_not_share_a_folder_and_two_folders_do_not_disturb_each_other() -> None:
    with Cluster() as one, Cluster() as other:
        first, second = one.start("w0"), other.start("w0")
        config = one.folder / "coordinator.toml"
        rival = subprocess.run(
            [sys.executable, "-m", "kvforge.coordinator", "--config", str(config)],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert rival.returncode == 3
        assert b"another coordinator is serving" in rival.stderr
        assert b"Traceback" not in rival.stderr
        results = [kv.submit([1, 2, 3], max_tokens=8, sampling=GREEDY).result(30).tokens for kv in (first, second)]
        assert results[0] == results[1]
        one.signal("coordinator", signal.SIGTERM)
        assert one.end("coordinator") == 0
        assert one.end("w0") == 0
        assert list(one.runtime.iterdir()) == []
        assert second.submit([1, 2, 3], max_tokens=8, sampling=GREEDY).result(30).tokens == results[1]


def test_sigterm_lets_what_runs_finish() -> None:
    with Cluster(blocks=256) as cluster:
        kv = cluster.start("w0")
        request = kv.submit([1, 2, 3], max_tokens=300, sampling=GREEDY)
        next(iter(request))
        cluster.signal("coordinator", signal.SIGTERM)
        assert len(request.result(60).tokens) == 300
        assert cluster.end("coordinator") == 0
        assert cluster.end("w0") == 0
        assert "stopped; 0 requests were left unfinished" in cluster.log("coordinator")


def test_too_many_clients_and_a_second_worker_of_the_same_name_are_refused() -> None:
    with Cluster(coordinator="[limits]\nclients_max = 2\n") as cluster:
        kv = cluster.start("w0")
        cluster.client().health()
        with pytest.raises(CapacityExceeded, match="clients_max"), Client(cluster.endpoint) as third:
            third.health()
        with RawPeer(cluster.worker_endpoint) as peer:
            hello = WorkerHello(rid=1, name="w0", pid=1, token=token.read(cluster.runtime))
            peer.socket.send_multipart(codec.encode(hello))
            refused = codec.Decoder(WORKER_REPLIES).decode(peer.socket.recv_multipart())
        assert isinstance(refused, Refused)
        assert refused.error.code == "conflict"
        assert len(kv.submit([1, 2, 3], max_tokens=4, sampling=GREEDY).result(30).tokens) == 4


@pytest.mark.parametrize(
    ("setting", "status", "words"),
    [
        ('model = "/nowhere/model"', 2, "nowhere"),
        ("blocks = -5", 2, "blocks"),
        ('devise = "cpu"', 2, "devise"),
        ('device = "cuda"', 2, "device"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_sentence(
    shared: Shared, setting: str, status: int, words: str
) -> None:
    cluster, name = shared.cluster, f"unable-{words}"
    cluster.start_worker(name, changed=setting)
    assert cluster.end(name) == status, cluster.log(name)
    log = cluster.log(name)
    assert words in log
    assert "Traceback" not in log
    assert [worker.name for worker in shared.kv.health().workers] == ["w0"]


def test_every_refusal_over_the_wire_is_one_of_ours() -> None:
    """A well-formed command with odd values is answered, never dropped: 200 random submits."""
    with Cluster(blocks=16) as cluster, ExitStack() as stack:
        cluster.start("w0")
        random = np.random.default_rng(3)
        peer = stack.enter_context(RawPeer(cluster.endpoint))
        peer.ask([bytes(frame) for frame in codec.encode(Hello(rid=1))])
        for rid in range(200):
            tokens = random.integers(-3, 300, random.integers(0, 400)).astype(np.int32)
            message = Submit(rid=rid, max_tokens=int(random.integers(-2, 500)), prompt=tokens, stream=False)
            reply = peer.ask([bytes(frame) for frame in codec.encode(message)])
            while type(reply).__name__ == "Stream":
                reply = codec.Decoder(CLIENT_REPLIES).decode(peer.socket.recv_multipart())
            assert reply.rid == rid  # type: ignore[attr-defined]
            if isinstance(reply, Refused):
                assert reply.error.code in {"invalid_request", "queue_full"}, reply


def test_errors_are_kvforge_errors_when_the_coordinator_dies_under_a_client() -> None:
    with Cluster() as cluster:
        cluster.start("w0")
        request = cluster.client(reconnect_s=0.5).submit([1, 2, 3], max_tokens=1000, sampling=GREEDY)
        next(iter(request))
        cluster.kill("coordinator")
        with pytest.raises(KvforgeError, match="coordinator"):
            request.result(30)
