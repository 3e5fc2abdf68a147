"""Real processes that compute one model together give one process's tokens, whichever rank crashes."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import Client, Request, SamplingParams
from tests.pairs import every_pair
from tests.worker.loading.random_models import DESCRIBED, save
from tools.cluster.cluster import Cluster

from .shared import wait_empty

TOKENS, REQUESTS = 120, 4
NAMES = ("w0", "w1")


def submit(kv: Client, number: int, tokens: int = TOKENS) -> Request:
    """Submit requests, alternately greedy and seeded."""
    sampling = SamplingParams(temperature=0.0) if number % 2 else SamplingParams(temperature=1.0, seed=number)
    return kv.submit([number, 2, 3], max_tokens=tokens, sampling=sampling, cache_salt=str(number))


def answers(kv: Client, tokens: int) -> list[tuple[int, ...]]:
    """Return the tokens of all requests, which run together: a step of few rows takes as long as one of one row."""
    running = [submit(kv, number, tokens) for number in range(REQUESTS)]
    return [request.result(60).tokens for request in running]


@pytest.fixture(scope="module")
def striking() -> Iterator[tuple[Cluster, Client]]:
    """Return the cluster for strikes at its ranks; each test leaves both running."""
    with Cluster(ranks=2, coordinator="[limits]\nidle_timeout_s = 2\n") as cluster:
        yield cluster, cluster.start(*NAMES)


@pytest.fixture(scope="module")
def whole(striking: tuple[Cluster, Client]) -> list[tuple[int, ...]]:
    """Return the tokens of two undisturbed ranks."""
    return answers(striking[1], TOKENS)


def test_each_rank_is_shown_and_their_pool_is_one() -> None:
    with Cluster(ranks=2) as cluster:
        cluster.start_coordinator()
        kv = cluster.client()
        cluster.start_worker("w1")
        while not (workers := kv.health().workers) or not workers[0].phase.startswith("waiting"):
            select.select([], [], [], 0.02)
        assert (workers[0].rank, workers[0].ranks, workers[0].phase) == (1, 2, "waiting for rank 0 of 2")
        cluster.start_worker("w0")
        cluster.wait_workers(kv, 2)
        pids = {worker.rank: worker.pid for worker in kv.health().workers}
        assert pids == {0: cluster.pid("w0"), 1: cluster.pid("w1")}
        assert len(kv.stats().pools) == 1
        assert len(submit(kv, 1).result(60).tokens) == TOKENS
        wait_empty(kv)


@pytest.mark.parametrize(("number", "struck"), every_pair([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], NAMES))
def test_with_one_rank_all_end_and_no_token_changes(
    struck: str, number: signal.Signals, striking: tuple[Cluster, Client], whole: list[tuple[int, ...]]
) -> None:
    other = NAMES[1 - NAMES.index(struck)]
    cluster, kv = striking
    running = [submit(kv, i) for i in range(REQUESTS)]
    for request in running:
        next(iter(request))
    cluster.signal(struck, number)
    assert cluster.end(struck) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert cluster.end(other) != 0, "its supervisor must start it again"
    for name in NAMES:
        cluster.start_worker(name)
    assert [request.result(60).tokens for request in running] == whole
    assert wait_empty(kv).requests.failed_total == 0


def test_a_coordinator_that_dies_finds_them_as_they_were(whole: list[tuple[int, ...]]) -> None:
    with Cluster(ranks=2) as cluster:
        kv = cluster.start(*NAMES)
        running = [submit(kv, i) for i in range(REQUESTS)]
        for request in running:
            next(iter(request))
        cluster.kill("coordinator")
        cluster.start_coordinator()
        assert [request.result(60).tokens for request in running] == whole
        rows = [kv.status(request.id) for request in running]
        assert [row.preemptions for row in rows] == [0] * REQUESTS, "nothing was computed again"
        assert [cluster.status(name) for name in NAMES] == [None, None]


def test_four_ranks_that_divide_experts_lose_one(tmp_path: Path) -> None:
    """Seven experts: three ranks have two of them, and one has one."""
    names = ("w0", "w1", "w2", "w3")
    model_type, fields = DESCRIBED["mixtral"]
    folder = save(tmp_path / "mixtral", model_type, {**fields, "num_local_experts": 7, "max_position_embeddings": 256})
    with Cluster(ranks=4, model=folder, worker="expert_parallel = true\n") as cluster:
        kv = cluster.start(*names)
        before = answers(kv, 60)
        running = [submit(kv, i, 60) for i in range(REQUESTS)]
        for request in running:
            next(iter(request))
        cluster.kill("w3")
        assert all(cluster.end(name) != 0 for name in names[:3]), "their supervisor must start them again"
        for name in names:
            cluster.start_worker(name)
        assert [request.result(60).tokens for request in running] == before
        assert wait_empty(kv).requests.failed_total == 0
