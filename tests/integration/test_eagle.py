"""EAGLE-3 heads in real processes: answers keep their bits, and what heads store goes with blocks.

The head computes what the model does, so that each greedy draft must be accepted, wherever its K and V and the hidden
states come from.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvforge import Client, SamplingParams
from kvforge.client.results import Finished
from tests.worker.eagle_checkpoints import RIGHT_RECURRENT_SEED, write_eagle, write_right_eagle
from tests.worker.head_checkpoints import WEIGHTS
from tests.worker.loading.random_models import NEEDS_CACHE
from tools.cluster.cluster import Cluster

from .drafting_checks import (
    COORDINATOR,
    PROMPTS,
    TOKENS,
    all_accepted,
    answers_without,
    bits,
    check_answers,
    check_disk_tier,
    check_hits_and_forks,
    check_host_tier,
    check_preemption_and_death,
    counts,
    greedy,
    repeats,
    results,
)
from .drafting_cluster import NO_DRAFTS, DraftingCluster
from .shared import wait_empty
from .test_disk_tier import all_again, disk_of, started
from .test_host_kinds import wait_saved


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a model and of its head."""
    return write_right_eagle(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def worker(folders: tuple[Path, Path]) -> str:
    """Settings of a worker with the head."""
    return f'draft_model = "{folders[1]}"\n'


@pytest.fixture(scope="module")
def other(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Settings of a worker with another head for the same model."""
    place = tmp_path_factory.mktemp("other") / "eagle3"
    shutil.copytree(folders[1], place)
    tensors = load_file(place / WEIGHTS)
    save_file(tensors | {"fc.weight": 2 * tensors["fc.weight"]}, place / WEIGHTS, {"format": "pt"})
    return f'draft_model = "{place}"'


@pytest.fixture(scope="module")
def want(folders: tuple[Path, Path]) -> list[Finished]:
    """The answers of a service without heads."""
    with Cluster(model=folders[0], coordinator=NO_DRAFTS) as cluster:
        return answers_without(cluster.start("w0"))


@pytest.fixture(scope="module")
def cluster(folders: tuple[Path, Path], worker: str) -> Iterator[Cluster]:
    with DraftingCluster(model=folders[0], coordinator=COORDINATOR, worker=worker) as cluster:
        cluster.start("w0")
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    kv = cluster.client()
    yield kv
    wait_empty(kv)


def test_answers_are_those_without_a_head(kv: Client, want: list[Finished]) -> None:
    (worker,) = kv.health().workers
    assert (worker.drafts, worker.kernels["drafts"].startswith("lookup, and right-1-eagle3 in float32")) == (4, True)
    check_answers(kv, want)


def test_hits_and_forks_bring_keys_values_and_hidden_states(kv: Client) -> None:
    check_hits_and_forks(kv)


def test_preempted_requests_and_those_of_a_killed_worker_go_on(
    folders: tuple[Path, Path], worker: str, want: list[Finished]
) -> None:
    check_preemption_and_death(folders[0], worker, want)


def test_the_host_tier_keeps_what_a_head_stores_and_another_head_is_a_miss(
    folders: tuple[Path, Path], worker: str, other: str, want: list[Finished]
) -> None:
    check_host_tier(folders[0], worker, want, other)


def test_the_disk_tier_keeps_what_a_head_stores_and_another_head_is_a_miss(
    folders: tuple[Path, Path], worker: str, other: str
) -> None:
    check_disk_tier(folders[0], worker, other)


@NEEDS_CACHE
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
def test_a_head_drafts_for_a_model_with_recurrent_states(tmp_path: Path) -> None:
    """It reads what layers with such a state add to; the drafts of a killed worker's successor are right too."""
    model, head = write_right_eagle(tmp_path, RIGHT_RECURRENT_SEED, recurrent=True)
    with Cluster(model=model, coordinator=NO_DRAFTS) as cluster:
        kv = cluster.start("w0")
        want = answers_without(kv)
    worker = f'draft_model = "{head}"\ndraft_states = 16\n'
    with DraftingCluster(model=model, coordinator=COORDINATOR, worker=worker) as cluster:
        kv = cluster.start("w0")
        check_answers(kv, want)
        for restarted in (False, True):
            if restarted:
                cluster.kill("w0")
                cluster.start_worker("w0")
            with all_accepted(kv, 2 * TOKENS):
                answers = [greedy(kv, prompt).tokens for prompt in PROMPTS]
            assert answers[0] == want[0].tokens
            assert not any(repeats([*prompt, *each]) for prompt, each in zip(PROMPTS, answers, strict=True))


@NEEDS_CACHE
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
def test_states_and_what_a_head_stores_come_back_from_the_disk(tmp_path: Path) -> None:
    """A prompt is found up to its last checkpoint, after a restart of everything."""
    model, head = write_right_eagle(tmp_path, RIGHT_RECURRENT_SEED, recurrent=True)
    worker = f'draft_model = "{head}"\ndraft_states = 16\n'
    writes = COORDINATOR + "[cache]\nhost_writeback_blocks = 64\n"
    with DraftingCluster(model=model, coordinator=writes, worker=worker) as cluster:
        kv = started(cluster)
        whole = [greedy(kv, prompt) for prompt in PROMPTS]
        wait_saved(kv)
        kv = all_again(cluster)
        with all_accepted(kv, 2 * TOKENS):
            again = [greedy(kv, prompt) for prompt in PROMPTS]
        assert [found.tokens for found in again] == [found.tokens for found in whole]
        assert all(found.cached_tokens >= 32 for found in again)
        assert disk_of(kv).loaded_total >= 2 * len(PROMPTS)


def test_a_head_that_is_mostly_wrong_changes_nothing(tmp_path: Path) -> None:
    """Its weights are random, and nearly all of its drafts are wrong."""
    head = write_eagle(tmp_path)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [[7 + number, 9, 31, 8 + number, 2, 88] for number in range(4)]

    def answers(kv: Client) -> list[tuple[object, ...]]:
        requests = [kv.submit(prompt, max_tokens=40, sampling=greedy) for prompt in prompts]
        return [bits(found) for found in results(requests)]

    with Cluster(model=tmp_path / "model", coordinator=NO_DRAFTS) as cluster:
        want = answers(cluster.start("w0"))
    worker = f'draft_model = "{head}"\n'
    with DraftingCluster(model=tmp_path / "model", coordinator=COORDINATOR, worker=worker) as cluster:
        kv = cluster.start("w0")
        assert kv.health().workers[0].kernels["drafts"].startswith("lookup, and eagle3 in float32")
        assert answers(kv) == want
        drafted, accepted = counts(kv)
        assert drafted > accepted


def test_a_head_of_another_model_is_refused(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    head = write_eagle(tmp_path)
    with Cluster(model=folders[0], coordinator=COORDINATOR, worker=f'draft_model = "{head}"\n') as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0")
        assert cluster.end("w0") == 2
        assert "draft_model: 'eagle3', an EAGLE-3 head: vocab_size = 97, and right-1 has 3000 tokens" in cluster.log(
            "w0"
        )
