"""An idle sequence that moved down comes back to a real worker before its next request, with the same bits."""

from __future__ import annotations

import select
from time import monotonic

from kvforge import Client, Finished
from kvforge.client.sequences import CachedSequence
from kvforge.protocol.messages import PoolStats
from tools.cluster.cluster import Cluster

from .test_host_tier import BLOCKS, GREEDY, PROMPTS, SIZE, TOKENS, bits, serve, settings

CONTEXT = [(5 * i) % 80 + 4 for i in range(2 * SIZE + 1)]
IDLE_PROMPTS = (*[1] * 15, 24)  # prompts that are served while a sequence is idle: the last time is far longer
RETURN_S = 60


def go_on(kv: Client, sequence: CachedSequence, token: int) -> Finished:
    """Continue a sequence with a token."""
    return kv.submit([token], sequence=sequence, max_tokens=TOKENS, sampling=GREEDY).result(60)


def learn(kv: Client) -> None:
    """Let sequences be continued so often that idle times are known, some soon and one late."""
    sequence = kv.create_sequence(CONTEXT[:3])
    go_on(kv, sequence, 5)
    for number, prompts in enumerate(IDLE_PROMPTS):
        for prompt in range(prompts):
            serve(kv, PROMPTS[prompt % len(PROMPTS)])
        kv.rewind(sequence, 3)
        go_on(kv, sequence, number + 5)
    kv.remove(sequence)


def pool_of(kv: Client) -> PoolStats:
    """Return the statistics of the only pool."""
    (pool,) = kv.stats().pools
    return pool


# behaviour: without a request, steps bring the sequence back; the request then reads nothing from the host
def test_a_sequence_that_moved_down_is_back_before_its_request() -> None:
    with Cluster(blocks=BLOCKS) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0", settings(cluster))
        kv = cluster.client()
        kv.wait_ready(300)
        stays = kv.create_sequence(CONTEXT)
        whole = [go_on(kv, stays, token) for token in (6, 7)]
        kv.remove(stays)
        learn(kv)

        sequence = kv.create_sequence(CONTEXT)
        first = go_on(kv, sequence, 6)
        before = pool_of(kv).host_returns_total
        # All are there at once, so that the sequence cannot come back between two prompts, and move down again.
        for request in [kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY) for prompt in PROMPTS[:3]]:
            request.result(60)
        end_s = monotonic() + RETURN_S
        while pool_of(kv).host_returns_total == before or not kv.explain(sequence=sequence).facts["computed_tokens"]:
            assert monotonic() < end_s, kv.explain(sequence=sequence).sentences
            select.select([], [], [], 0.02)
        said = " ".join(kv.explain(sequence=sequence).sentences)
        assert "it came back from the host tier before a request" in said, said
        loaded, used = pool_of(kv).host_loaded_total, pool_of(kv).host_returns_used_total
        again = go_on(kv, sequence, 7)
        assert pool_of(kv).host_loaded_total == loaded and pool_of(kv).host_returns_used_total == used + 1
        assert again.cached_tokens >= 2 * SIZE
        assert list(map(bits, (first, again))) == list(map(bits, whole))
