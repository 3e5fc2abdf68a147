"""Workers that hang, and a stop while requests run: real processes, real signals."""

from __future__ import annotations

import re
import select
import signal
from time import monotonic

import pytest

from kvforge import Client, Draining, KvforgeError, Request, SamplingParams
from tools.cluster.cluster import END_S, Cluster

from .midway import stopped_midway

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
TOKENS = 300


def wait_log(cluster: Cluster, name: str, words: str) -> None:
    """Wait until a member has logged these words."""
    deadline = monotonic() + END_S
    while words not in cluster.log(name):
        assert monotonic() < deadline, f"{name} did not write {words!r} within {END_S} s"
        select.select([], [], [], 0.05)


def begun(kv: Client) -> Request:
    """Return a request that runs."""
    return kv.submit([1, 2, 3], max_tokens=TOKENS, sampling=GREEDY)


def stand_still(cluster: Cluster, kv: Client) -> Request:
    """Return a running request that cannot end, because its worker is suspended."""
    (request,) = stopped_midway(cluster, kv, lambda: [begun(kv)], TOKENS, "w0")
    return request


def test_a_hung_worker_is_killed_and_its_requests_end_with_the_same_tokens() -> None:
    with Cluster(blocks=256, coordinator="[schedule]\nstep_timeout_s = 4\n") as cluster:
        kv = cluster.start("w0")
        expected = begun(kv).result(120).tokens
        request = stand_still(cluster, kv)
        assert cluster.end("w0") == -signal.SIGKILL
        cluster.start_worker("w0")
        assert request.result(120).tokens == expected
        assert f"worker process {cluster.pid('w0')}" not in cluster.log("coordinator")
        # The check runs between turns, so the silence that is logged may be a little longer than the limit.
        silence = re.search(r"worker w0 has done no step for ([0-9.]+) s while one was due", cluster.log("coordinator"))
        assert silence is not None
        assert float(silence[1]) >= 4
        assert "was killed" in cluster.log("coordinator")


def test_a_worker_writes_its_stack_when_it_is_asked_and_goes_on() -> None:
    with Cluster() as cluster:
        kv = cluster.start("w0")
        cluster.signal("w0", signal.SIGUSR1)
        wait_log(cluster, "w0", "(most recent call first)")
        assert 'worker/step/loop.py", line' in cluster.log("w0")
        assert len(kv.submit([1, 2, 3], max_tokens=4, sampling=GREEDY).result(60).tokens) == 4


@pytest.mark.parametrize("drain_s", [0, 1.5])
def test_what_a_drain_cannot_finish_is_handed_back(drain_s: float) -> None:
    with Cluster(blocks=256, coordinator=f"drain_s = {drain_s}\n") as cluster:
        kv = cluster.start("w0")
        request = stand_still(cluster, kv)
        cluster.signal("coordinator", signal.SIGTERM)
        with pytest.raises(Draining, match="submit it elsewhere"):
            request.result(60)
        assert cluster.end("coordinator") == 0
        log = cluster.log("coordinator")
        left = re.search(r"draining: 1 request left, [0-9.]+ s until the rest is handed back", log)
        assert (left is not None) == (drain_s > 0)
        assert "stopped; 0 requests were left unfinished" in log


def test_a_second_signal_ends_a_drain() -> None:
    with Cluster(blocks=256, coordinator="drain_s = 3600\n") as cluster:
        cluster.start("w0")
        kv = cluster.client(reconnect_s=0.5)
        request = stand_still(cluster, kv)
        cluster.signal("coordinator", signal.SIGTERM)
        wait_log(cluster, "coordinator", "draining: 1 request left")
        assert kv.health().draining
        cluster.signal("coordinator", signal.SIGTERM)
        assert cluster.end("coordinator") == 0
        assert "stopped; 1 requests were left unfinished" in cluster.log("coordinator")
        with pytest.raises(KvforgeError, match="coordinator"):
            request.result(60)
