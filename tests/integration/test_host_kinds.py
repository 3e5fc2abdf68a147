"""The host tier for models with blocks of several kinds and for ranks: what comes back has the same bits."""

from __future__ import annotations

import select
from pathlib import Path
from time import monotonic

import pytest

from kvforge import Client, SamplingParams
from tests.amount import examples
from tests.worker.loading.random_models import save
from tests.worker.step.test_windows import COMMON, MODELS
from tools.cluster.cluster import Cluster

from .shared import wait_empty
from .test_disk_tier import WAIT_S, all_again, disk_of
from .test_disk_tier import settings as on_disk
from .test_host_tier import (
    BLOCKS,
    CACHED,
    GREEDY,
    KILLS,
    LONG,
    PROMPTS,
    bits,
    check_whatever_dies,
    found,
    restarted,
    serve,
    settings,
)

KINDS = {"qwen2": 48, "gemma3": 96, "lfm2": 30, "qwen3_5": 30}  # blocks of the pool, which holds about one prompt
CHECKPOINT = 128  # the last multiple of a chunk of 64 tokens


def cluster_of(name: str, folder: Path, blocks: int, coordinator: str = "") -> Cluster:
    """Return a cluster that serves a model with windows or with recurrent states."""
    if name not in MODELS:
        return Cluster(family=name, blocks=blocks, coordinator=coordinator)
    model_type, fields = MODELS[name]
    model = save(folder / "model", model_type, {**fields, **COMMON, "max_position_embeddings": 512})
    return Cluster(model=model, blocks=blocks, coordinator=coordinator)


def started(cluster: Cluster) -> Client:
    """Start a coordinator and a worker with a host file."""
    cluster.start_coordinator()
    cluster.start_worker("w0", settings(cluster))
    kv = cluster.client()
    kv.wait_ready(300)
    return kv


# behaviours: a prefix that was evicted comes back with the same bits, with its window or its state, also after the
# worker was killed while it copied
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize(
    "name", ["gemma3", "qwen3_5", *(pytest.param(name, marks=pytest.mark.soak) for name in ("qwen2", "lfm2"))]
)
def test_evicted_prefixes_come_back_with_the_same_bits_whatever_dies(name: str, tmp_path: Path) -> None:
    with cluster_of(name, tmp_path, KINDS[name]) as cluster:
        kv = started(cluster)
        check_whatever_dies(cluster, kv, CACHED if name in MODELS else CHECKPOINT, examples(KILLS))


# behaviour: the sequences of a killed worker go on from the host with their windows or their state
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_running_sequences_go_on_if_they_are_written_back(name: str, tmp_path: Path) -> None:
    more = "[cache]\nhost_writeback_blocks = 8\ncheckpoint_tokens = 32\n"
    with cluster_of(name, tmp_path, 400, more) as cluster:
        kv = started(cluster)
        sampling = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True)
        whole = [kv.submit(prompt, max_tokens=LONG, sampling=sampling, cache_salt="whole") for prompt in PROMPTS[:2]]
        expected = [bits(request.result(60)) for request in whole]
        running = [kv.submit(prompt, max_tokens=LONG, sampling=sampling) for prompt in PROMPTS[:2]]
        for request in running:
            for _ in zip(range(LONG // 2), request, strict=False):
                pass
        restarted(cluster, kv)
        assert [bits(request.result(120)) for request in running] == expected
        computed = 2 * (CACHED + LONG // 2)
        assert 0 < kv.stats().requests.recomputed_tokens_total < computed // 2


# behaviours: each rank has its share of a prefix in a file of its own; it comes back after one rank was killed
def test_the_files_of_ranks_are_found_again(tmp_path: Path) -> None:
    names = ("w0", "w1")
    with Cluster(ranks=2, blocks=BLOCKS) as cluster:
        cluster.start_coordinator()
        for name in names:
            cluster.start_worker(name, settings(cluster))
        kv = cluster.client()
        kv.wait_ready(300)
        whole = [serve(kv, prompt) for prompt in PROMPTS]
        again = [serve(kv, prompt) for prompt in PROMPTS]
        assert found(again) == [CACHED] * len(PROMPTS)
        assert list(map(bits, again)) == list(map(bits, whole))
        assert len(list(cluster.folder.glob("kvforge-host-*"))) == len(names)
        for victim, other in (names, names[::-1]):  # while blocks are copied in both directions
            running = [kv.submit(prompt, max_tokens=4, sampling=GREEDY) for prompt in 3 * PROMPTS]
            next(iter(running[1]))
            cluster.kill(victim)
            assert cluster.end(other) != 0, "its supervisor must start it again"
            for name in names:
                cluster.start_worker(name, settings(cluster))
            results = [request.result(120) for request in running]
            assert list(map(bits, results)) == list(map(bits, 3 * whole))
            assert any(found(results))
        (pool,) = wait_empty(kv).pools
        assert pool.host_loaded_total > 0 and pool.host_free + pool.host_cached == pool.host_blocks


# behaviour: windows and states are found on the disk after a restart of everything, with the same bits
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.soak)])
def test_prefixes_come_back_from_the_disk(name: str, tmp_path: Path) -> None:
    with cluster_of(name, tmp_path, 400, "[cache]\nhost_writeback_blocks = 64\n") as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0", on_disk(cluster))
        kv = cluster.client()
        kv.wait_ready(300)
        whole = [serve(kv, prompt) for prompt in PROMPTS]
        wait_saved(kv)
        kv = all_again(cluster)
        again = [serve(kv, prompt) for prompt in PROMPTS]
        assert list(map(bits, again)) == list(map(bits, whole))
        assert found(again) == [CACHED if name in MODELS else CHECKPOINT] * len(PROMPTS)
        assert disk_of(kv).loaded_total >= len(PROMPTS) * 8


def wait_saved(kv: Client) -> None:
    """Wait until all blocks of the prompts are on the disk, with what hangs on them."""
    before, deadline = 0, monotonic() + WAIT_S
    while True:
        disk, (pool,) = disk_of(kv), kv.stats().pools
        if disk.saved_total == before == pool.host_saved_total and before >= len(PROMPTS) * CACHED // 16:
            return
        before = disk.saved_total
        assert monotonic() < deadline, f"copies do not end: {disk}"
        select.select([], [], [], 0.5)
