"""Heads of a checkpoint in real processes: answers keep their bits, and what heads store goes with blocks.

The module of the checkpoint computes what the model does, so that each greedy draft must be accepted, wherever its K
and V and the hidden states come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvforge import Client, SamplingParams
from kvforge.client.results import Finished
from tests.worker.head_checkpoints import write_eagle, write_right_mtp
from tools.cluster.cluster import Cluster

from .drafting_cluster import DraftingCluster
from .midway import stopped_midway
from .shared import wait_empty
from .test_draft_model import (
    COORDINATOR,
    GREEDY,
    NUMBERS,
    PROMPTS,
    TOKENS,
    VOCABULARY,
    WAIT_S,
    all_accepted,
    bits,
    counts,
    repeats,
    results,
    submitted,
)

MTP = 'draft_model = "mtp"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_right_mtp(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def want(model: Path) -> list[Finished]:
    """The answers of a service without heads, one by one."""
    with Cluster(model=model) as cluster:
        kv = cluster.start("w0")
        return [submitted(kv, number).result(WAIT_S) for number in NUMBERS]


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
    for number in NUMBERS:
        assert bits(submitted(kv, number).result(WAIT_S)) == bits(want[number])
    for mine, other in zip(results([submitted(kv, number) for number in NUMBERS]), want, strict=True):
        assert bits(mine) == bits(other)


def test_hits_and_forks_bring_keys_values_and_hidden_states(kv: Client) -> None:
    prompt = Random("forks").sample(range(VOCABULARY), 70)
    first = kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt="forks").result(WAIT_S)
    branch = kv.submit([*prompt, *first.tokens[:5], 9], max_tokens=TOKENS, sampling=GREEDY, cache_salt="fresh")
    other = branch.result(WAIT_S).tokens
    assert not repeats([*prompt, *first.tokens])
    assert not repeats([*prompt, *first.tokens[:5], 9, *other])
    with all_accepted(kv, 3 * TOKENS):
        again = kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt="forks").result(WAIT_S)
        assert again.cached_tokens >= 64
        assert again.tokens == first.tokens
        parent = kv.create_sequence(prompt, cache_salt="forks")
        kv.submit(sequence=parent, max_tokens=5, sampling=GREEDY).result(WAIT_S)
        children = kv.fork(parent, 2)
        kv.append(children[1], [9])
        runs = [kv.submit(sequence=each, max_tokens=TOKENS, sampling=GREEDY) for each in (*children, parent)]
        answers = [found.tokens for found in results(runs)]
        assert answers[1] == other
        assert answers[0] == answers[2]
        assert answers[0][: TOKENS - 5] == first.tokens[5:]
        kv.remove([parent, *children])


def test_preempted_requests_and_those_of_a_killed_worker_go_on(model: Path, want: list[Finished]) -> None:
    with DraftingCluster(model=model, blocks=24, coordinator=COORDINATOR, worker=MTP) as cluster:
        kv = cluster.start("w0")
        for mine, other in zip(results([submitted(kv, number) for number in NUMBERS]), want, strict=True):
            assert bits(mine) == bits(other)
        assert kv.stats().requests.preemptions_total > 0, "24 blocks hold fewer than these five at their ends"
        with all_accepted(kv, 2 * TOKENS):
            found = results([kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY) for prompt in PROMPTS])
            assert found[0].tokens == want[0].tokens
            assert not any(repeats([*prompt, *each.tokens]) for prompt, each in zip(PROMPTS, found, strict=True))
        few = NUMBERS[2:]  # these run at once
        requests = stopped_midway(cluster, kv, lambda: [submitted(kv, each) for each in few], TOKENS, "w0", begun=2)
        cluster.kill("w0")
        cluster.start_worker("w0")
        for mine, other in zip(results(requests), want[2:], strict=True):
            assert bits(mine) == bits(other)
        assert wait_empty(kv).requests.recomputed_tokens_total > 0


def test_the_host_tier_keeps_what_heads_store_and_a_worker_without_heads_misses(
    model: Path, want: list[Finished]
) -> None:
    learns = COORDINATOR + "[cache]\nhost_learn_blocks = 0\n"
    with DraftingCluster(model=model, blocks=10, coordinator=learns, worker=MTP, host_bytes=64 << 20) as cluster:
        kv = cluster.start("w0")

        def run() -> None:
            """Each prompt evicts the one before to the host file."""
            for prompt in PROMPTS:
                found = kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY).result(WAIT_S)
                assert not repeats([*prompt, *found.tokens])

        run()
        loaded = kv.stats().pools[0].host_loaded_total
        with all_accepted(kv, 2 * TOKENS):
            run()
        assert kv.stats().pools[0].host_loaded_total > loaded + 5
        cluster.kill("w0")
        cluster.start_worker("w0", changed='draft_model = ""')
        cluster.wait_workers(kv, 1)
        before = kv.stats().pools[0].host_loaded_total
        found = submitted(kv, 1).result(WAIT_S)
        assert bits(found) == bits(want[1])
        assert found.cached_tokens == 0
        assert kv.stats().pools[0].host_loaded_total == before


def test_an_eagle_head_in_a_folder_drafts(tmp_path: Path) -> None:
    """Its weights are random, and nearly all of its drafts are wrong."""
    head = write_eagle(tmp_path)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [[7 + number, 9, 31, 8 + number, 2, 88] for number in range(4)]

    def answers(kv: Client) -> list[tuple[object, ...]]:
        requests = [kv.submit(prompt, max_tokens=40, sampling=greedy) for prompt in prompts]
        return [bits(found) for found in results(requests)]

    with Cluster(model=tmp_path / "model") as cluster:
        want = answers(cluster.start("w0"))
    worker = f'draft_model = "{head}"\n'
    with DraftingCluster(model=tmp_path / "model", coordinator=COORDINATOR, worker=worker) as cluster:
        kv = cluster.start("w0")
        assert kv.health().workers[0].kernels["drafts"].startswith("lookup, and eagle3 in float32")
        assert answers(kv) == want
        drafted, accepted = counts(kv)
        assert drafted > accepted


def test_an_eagle_head_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    head = write_eagle(tmp_path)
    with Cluster(model=model, coordinator=COORDINATOR, worker=f'draft_model = "{head}"\n') as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0")
        assert cluster.end("w0") == 2
        assert "draft_model: 'eagle3', an EAGLE-3 head: vocab_size = 97, and right-0 has 3000 tokens" in cluster.log(
            "w0"
        )


def test_a_model_with_recurrent_states_is_refused() -> None:
    with Cluster(family="qwen3_5", coordinator=COORDINATOR, worker=MTP) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0")
        assert cluster.end("w0") == 2
        assert "draft_model: 'mtp', but model has recurrent states, which take back no wrong draft" in cluster.log("w0")
