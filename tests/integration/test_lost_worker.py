"""A worker crashes or hangs beside another: only its sequences pause, and they continue with the same tokens."""

from __future__ import annotations

import signal
from operator import itemgetter

from kvforge import Client, Request, SamplingParams
from tools.cluster.cluster import Cluster

from .midway import stopped_midway
from .shared import wait_empty

TOKENS, REQUESTS = 300, 6


def submit(kv: Client, number: int) -> Request:
    """Submit requests, alternately greedy and seeded, without common prefixes."""
    sampling = SamplingParams(temperature=0.0) if number % 2 else SamplingParams(temperature=1.0, seed=number)
    return kv.submit([number, 2, 3], max_tokens=TOKENS, sampling=sampling, cache_salt=str(number))


def lose(cluster: Cluster, kv: Client, number: signal.Signals, whole: list[tuple[int, ...]]) -> None:
    """Signal worker w1 while both workers serve."""
    running = stopped_midway(cluster, kv, lambda: [submit(kv, i) for i in range(REQUESTS)], TOKENS, "w1")
    lost = [kv.status(request.id).worker == "w1" for request in running]
    assert any(lost) and not all(lost)
    cluster.signal("w1", number)
    # Requests on w0 first: they end independently of the others.
    for at_w1, request, tokens in sorted(zip(lost, running, whole, strict=True), key=itemgetter(0)):
        assert request.result(60).tokens == tokens
        row = kv.status(request.id)
        assert (row.worker, row.preemptions > 0) == ("w0", at_w1)
    assert cluster.end("w1") == -signal.SIGKILL, "one that hangs is killed"


def test_only_the_sequences_of_a_lost_worker_pause() -> None:
    with Cluster(blocks=256, coordinator="[limits]\nidle_timeout_s = 3\n") as cluster:
        kv = cluster.start("w0", "w1")
        undisturbed = [submit(kv, i) for i in range(REQUESTS)]
        whole = [request.result(60).tokens for request in undisturbed]
        lose(cluster, kv, signal.SIGKILL, whole)
        cluster.start_worker("w1")
        cluster.wait_workers(kv, 2)
        lose(cluster, kv, signal.SIGSTOP, whole)
        cluster.start_worker("w2", 'attention = "triton"\n')
        assert cluster.end("w2") != 0
        health = kv.health()
        assert health.ready and list(health.gone) == ["w1", "w2"]
        assert health.gone["w1"] == f"was lost, process {cluster.pid('w1')}"
        assert "attention: Triton" in health.gone["w2"], "a failed worker must have a reason"
        requests = wait_empty(kv).requests
        assert requests.failed_total == 0
        assert requests.finished_total == requests.accepted_total >= 3 * REQUESTS
