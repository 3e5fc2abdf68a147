"""After a coordinator crash its successor continues every request with the workers' KV."""

from __future__ import annotations

import select
from time import monotonic

import pytest

from kvforge import Client, Request, SamplingParams
from tools.cluster.cluster import Cluster

DEADLINE_S = 60.0
PROMPT = list(range(5, 45))
TOKENS = 400
SAMPLING = SamplingParams(temperature=1.0, seed=11)


def generated(client: Client, request_id: int) -> int:
    return client.status(request_id).generated_tokens


def wait_for(client: Client, request_id: int, tokens: int) -> None:
    deadline = monotonic() + DEADLINE_S
    while generated(client, request_id) < tokens:
        assert monotonic() < deadline, f"no {tokens} tokens within {DEADLINE_S} s"
        select.select([], [], [], 0.01)


def restart(cluster: Cluster) -> None:
    cluster.kill("coordinator")
    cluster.start_coordinator()


def test_streams_that_are_being_read_go_on_through_kills_as_if_nothing_had_happened() -> None:
    """The user's code needs no handling: each token of an undisturbed run arrives exactly once."""
    with Cluster() as cluster:
        kv = cluster.start("w0")

        def submitted() -> list[Request]:
            return [kv.submit(PROMPT, max_tokens=TOKENS, sampling=SamplingParams(seed=i)) for i in range(3)]

        undisturbed = [request.result() for request in submitted()]
        running = submitted()
        came: dict[int, list[int]] = {request.id: [] for request in running}
        kills = 0
        for request, token in kv.merge(*running):
            came[request.id].append(token.token_id)
            if sum(map(len, came.values())) in (50, 400, 900):
                restart(cluster)
                kills += 1
        assert kills == 3
        assert [tuple(came[request.id]) for request in running] == [answer.tokens for answer in undisturbed]
        sequence = kv.create_sequence(PROMPT)
        restart(cluster)
        assert kv.info(sequence).length == len(PROMPT), "it is still the client's own"
        kv.append(sequence, [1, 2, 3])
        assert kv.tokens(sequence) == (*PROMPT, 1, 2, 3)
        assert kv.remove(sequence) >= 0
        stats = kv.stats()
        assert (stats.sequences, stats.requests.recomputed_tokens_total) == (0, 0)


@pytest.mark.parametrize("kills", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_a_killed_coordinator_goes_on_and_nothing_is_computed_again(kills: int) -> None:
    with Cluster() as cluster:
        first = cluster.start("w0")
        undisturbed = first.submit(PROMPT, max_tokens=TOKENS, sampling=SAMPLING).result()
        first.purge_finished(0)
        computed = first.stats().requests.computed_tokens_total
        handle = first.submit(PROMPT, max_tokens=TOKENS, sampling=SAMPLING, detached=True)
        request_id = handle.id
        for i in range(kills):
            wait_for(cluster.client(), request_id, 40 * (i + 1))
            pid = cluster.pid("w0")
            cluster.kill("coordinator")
            cluster.start_coordinator()
        second = cluster.client()
        assert cluster.pid("w0") == pid
        answer = second.attach(request_id).result()
        assert answer.tokens == undisturbed.tokens
        stats = second.stats().requests
        # A cached prompt recomputes its last token; every other token is computed once.
        assert stats.computed_tokens_total - computed <= len(PROMPT) + TOKENS
        assert stats.recomputed_tokens_total == 0
        assert "worker is back" in cluster.log("coordinator")
        assert "recovered from" in cluster.log("coordinator")
        assert cluster.log("w0").count("registered: blocks") == 1
