"""A client crashes together with the coordinator: attached requests end with its lease, detached ones continue."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from time import monotonic

import pytest

from kvforge import Client, SamplingParams
from tools.cluster.cluster import Cluster

from .shared import wait_empty

END_S = 60.0
TOKENS = 500
LIMITS = "[limits]\nlease_s = 0.3\nreattach_s = 1.0\n"
CLIENT = """
import json, sys
from kvforge import Client, SamplingParams
with Client(sys.argv[1], timeout_s=60, connect_timeout_s=30) as kv:
    def submit(number, **how):
        sampling = SamplingParams(temperature=1.0, seed=number, ignore_eos=True)
        return kv.submit([number, 2, 3], max_tokens=int(sys.argv[2]), sampling=sampling, **how)
    requests = [submit(0), submit(1), submit(2, detached=True), submit(3, detached=True)]
    for request in requests:
        next(iter(request))
    print(json.dumps([request.id for request in requests]), flush=True)
    for request in requests:
        request.result(600)
"""


def undisturbed(kv: Client, *numbers: int) -> list[tuple[int, ...]]:
    drawn = [SamplingParams(temperature=1.0, seed=number, ignore_eos=True) for number in numbers]
    requests = [kv.submit([each.seed, 2, 3], max_tokens=TOKENS, sampling=each) for each in drawn]
    return [request.result(END_S).tokens for request in requests]


def wait_state(kv: Client, request_id: int, state: str) -> None:
    deadline = monotonic() + END_S
    while (row := kv.status(request_id)).state != state:
        assert monotonic() < deadline, row
        select.select([], [], [], 0.02)


@pytest.mark.parametrize("first", ["client", pytest.param("coordinator", marks=pytest.mark.soak)])
def test_what_a_client_left_behind_survives_or_ends_as_it_was_asked_for(first: str) -> None:
    """No worker runs until the attached requests have ended, so only the lease can end them."""
    with Cluster(blocks=512, coordinator=LIMITS) as cluster:
        kv = cluster.start("w0")
        whole = undisturbed(kv, 2, 3)
        command = [sys.executable, "-c", CLIENT, cluster.endpoint, str(TOKENS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            *attached, third, fourth = json.loads(process.stdout.readline())
            for victim in (process.pid, cluster.pid("coordinator"))[:: 1 if first == "client" else -1]:
                os.kill(victim, signal.SIGKILL)
        cluster.kill("coordinator")
        cluster.kill("w0")
        cluster.start_coordinator()
        for request_id in attached:
            wait_state(kv, request_id, "cancelled")
        for request_id in (third, fourth):
            wait_state(kv, request_id, "preempted")
        cluster.start_worker("w0")
        for request_id in (third, fourth):
            wait_state(kv, request_id, "finished")
        cluster.kill("coordinator")
        cluster.start_coordinator()
        with cluster.client() as another:
            answers = [another.attach(request_id).result(END_S).tokens for request_id in (third, fourth)]
            assert answers == whole
            assert [another.status(request_id).reason for request_id in attached] == ["cancelled"] * 2
            wait_empty(another)
