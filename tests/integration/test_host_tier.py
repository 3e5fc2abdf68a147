"""The host tier with real processes: evicted prefixes come back with the same bits, also after the worker is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge import Client, Finished, SamplingParams
from tools.cluster.cluster import Cluster

from .drafting_cluster import NO_DRAFTS
from .shared import wait_empty

BLOCKS, SIZE, TOKENS = 12, 16, 4
PROMPTS = [[(7 * i + 13 * n) % 90 + 3 for i in range(9 * SIZE + 1)] for n in range(4)]
CACHED = 9 * SIZE
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
HOST_BYTES = 4 << 20
KILLS = 3
LONG = 160


def settings(cluster: Cluster) -> str:
    """Return the worker's settings: a host file in the cluster's folder."""
    return f'host_bytes = {HOST_BYTES}\nhost_dir = "{cluster.folder}"\n'


def restarted(cluster: Cluster, kv: Client, changed: str = "") -> None:
    """Kill the worker, and start another one of its name."""
    cluster.kill("w0")
    cluster.start_worker("w0", settings(cluster), changed)
    cluster.wait_workers(kv, 1)


def serve(kv: Client, prompt: list[int]) -> Finished:
    """Serve a prompt to its end."""
    return kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY).result(60)


def bits(result: Finished) -> tuple[object, ...]:
    """Return everything that must not depend on where the KV came from."""
    return result.tokens, result.logprobs, result.top_logprobs


def found(results: list[Finished]) -> list[int]:
    """Return how many prompt tokens each found."""
    return [result.cached_tokens for result in results]


def check_whatever_dies(cluster: Cluster, kv: Client, cached: int, kills: int = KILLS) -> list[Finished]:
    """Check that evicted prefixes come back with the same bits, also after the worker was killed while it copied.

    Args:
        cluster: A worker "w0" with a host file for all prompts, and a pool for about one.
        kv: A client.
        cached: The tokens of a prompt that are found then.
        kills: How often the worker is killed while it copies.

    Returns:
        The answers, as they were computed.
    """
    whole = [serve(kv, prompt) for prompt in PROMPTS]
    assert found(whole) == [0] * len(PROMPTS)
    again = [serve(kv, prompt) for prompt in PROMPTS]
    assert found(again) == [cached] * len(PROMPTS), "the pool holds one prompt, the file all"
    assert list(map(bits, again)) == list(map(bits, whole))
    (pool,) = wait_empty(kv).pools
    assert pool.host_blocks == HOST_BYTES // pool.bytes_per_block and pool.host_loaded_total > 0

    restarted(cluster, kv)
    after = [serve(kv, prompt) for prompt in PROMPTS[:3]]  # the last one was on the device alone
    assert found(after) == [cached] * 3
    assert list(map(bits, after)) == list(map(bits, whole[:3]))

    for _ in range(kills):  # while blocks are copied in both directions
        running = [kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY) for prompt in 3 * PROMPTS]
        next(iter(running[1]))
        restarted(cluster, kv)
        results = [request.result(120) for request in running]
        assert list(map(bits, results)) == list(map(bits, 3 * whole))
    (pool,) = wait_empty(kv).pools
    assert pool.host_free + pool.host_cached == pool.host_blocks
    return whole


# behaviours: an evicted prefix comes back with the same bits; a successor of a killed worker finds it; another layout
# misses; a half-written block is never a hit
def test_evicted_prefixes_come_back_with_the_same_bits_whatever_dies() -> None:
    with Cluster(blocks=BLOCKS) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0", settings(cluster))
        kv = cluster.client()
        kv.wait_ready(300)
        whole = check_whatever_dies(cluster, kv, CACHED)
        assert " MiB in huge pages" in kv.health().workers[0].kernels["host file"]

        (path,) = cluster.folder.glob("kvforge-host-*")
        _damage_head(path)
        restarted(cluster, kv)
        other = [serve(kv, prompt) for prompt in PROMPTS[:2]]
        assert found(other) == [0, 0] and list(map(bits, other)) == list(map(bits, whole[:2]))


def _damage_head(path: Path) -> None:
    """Change a byte of the file's layout, as if another model had written it."""
    with path.open("r+b") as file:
        file.seek(30)
        byte = file.read(1)[0]
        file.seek(30)
        file.write(bytes([byte ^ 1]))


# behaviour: the sequences of a killed worker go on from the host, with the same bits
# Without, as in test_cluster.py, they are computed again.
@pytest.mark.parametrize("writeback", [pytest.param(0, marks=pytest.mark.soak), 8])
def test_running_sequences_go_on_from_the_host_if_they_are_written_back(writeback: int) -> None:
    settled = f"{NO_DRAFTS}[cache]\nhost_writeback_blocks = {writeback}\n"  # with drafts, they would end too soon
    with Cluster(blocks=64, coordinator=settled) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0", settings(cluster))
        kv = cluster.client()
        kv.wait_ready(300)
        whole = [kv.submit(prompt, max_tokens=LONG, sampling=GREEDY, cache_salt="whole") for prompt in PROMPTS[:2]]
        expected = [bits(request.result(60)) for request in whole]
        running = [kv.submit(prompt, max_tokens=LONG, sampling=GREEDY) for prompt in PROMPTS[:2]]
        for request in running:
            for _ in zip(range(LONG // 2), request, strict=False):
                pass
        restarted(cluster, kv)
        assert [bits(request.result(120)) for request in running] == expected
        computed = 2 * (CACHED + LONG // 2)
        again = kv.stats().requests.recomputed_tokens_total
        assert again >= computed if not writeback else 0 < again < computed // 2
