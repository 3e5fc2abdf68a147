"""Heads of a checkpoint in real processes: answers keep their bits, and what heads store goes with blocks.

The module of the checkpoint computes what the model does, so that each greedy draft must be accepted, wherever its K
and V and the hidden states come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import Client, SamplingParams
from kvforge.client.results import Finished
from tests.worker.head_checkpoints import write_mtp, write_right_mtp
from tests.worker.loading.random_models import NEEDS_CACHE
from tools.cluster.cluster import Cluster

from .drafting_checks import (
    COORDINATOR,
    answers_without,
    bits,
    check_answers,
    check_disk_tier,
    check_hits_and_forks,
    check_host_tier,
    check_preemption_and_death,
    counts,
    results,
)
from .drafting_cluster import NO_DRAFTS, DraftingCluster
from .shared import wait_empty

MTP = 'draft_model = "mtp"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_right_mtp(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def want(model: Path) -> list[Finished]:
    """The answers of a service without heads."""
    with Cluster(model=model, coordinator=NO_DRAFTS) as cluster:
        return answers_without(cluster.start("w0"))


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with DraftingCluster(model=model, coordinator=COORDINATOR, worker=MTP) as cluster:
        cluster.start("w0")
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    kv = cluster.client()
    yield kv
    wait_empty(kv)


def test_answers_are_those_without_heads(kv: Client, want: list[Finished]) -> None:
    (worker,) = kv.health().workers
    assert (worker.drafts, worker.kernels["drafts"].startswith("lookup, and the MTP module of right-0")) == (4, True)
    check_answers(kv, want)


def test_hits_and_forks_bring_keys_values_and_hidden_states(kv: Client) -> None:
    check_hits_and_forks(kv)


def test_preempted_requests_and_those_of_a_killed_worker_go_on(model: Path, want: list[Finished]) -> None:
    check_preemption_and_death(model, MTP, want)


def test_the_host_tier_keeps_what_heads_store_and_other_workers_miss(model: Path, want: list[Finished]) -> None:
    check_host_tier(model, MTP, want, 'draft_model = ""')


def test_the_disk_tier_keeps_what_heads_store_and_other_workers_miss(model: Path) -> None:
    check_disk_tier(model, MTP, 'draft_model = ""')


@NEEDS_CACHE
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_module_drafts_over_recurrent_states(family: str, tmp_path: Path) -> None:
    """Its weights are random, and nearly all of its drafts are wrong: none leaves a trace in a state."""
    model = write_mtp(tmp_path, family)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [[7 + number, 9, 31, 8 + number, 2, 88] for number in range(4)]

    def answers(kv: Client) -> list[tuple[object, ...]]:
        requests = [kv.submit(prompt, max_tokens=40, sampling=greedy) for prompt in prompts]
        return [bits(found) for found in results(requests)]

    with Cluster(model=model, coordinator=NO_DRAFTS) as cluster:
        want = answers(cluster.start("w0"))
    worker = f"{MTP}draft_states = 16\n"
    with DraftingCluster(model=model, coordinator=COORDINATOR, worker=worker) as cluster:
        kv = cluster.start("w0")
        assert kv.health().workers[0].kernels["drafts"].startswith(f"lookup, and the MTP module of {family}")
        assert answers(kv) == want
        drafted, accepted = counts(kv)
        assert drafted > accepted
