"""Drafts in real processes: tokens and log-probabilities are those of a service without drafts, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvforge import Client, Request, SamplingParams
from kvforge.client.results import Finished
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE, save
from tools.cluster.cluster import Cluster

from .drafting_cluster import NO_DRAFTS, DraftingCluster
from .midway import stopped_midway
from .shared import wait_empty

DRAFTS = "[schedule]\ndrafts_max = 4\n"
FEW = {7: 60.0, 11: 60.0, 13: 60.0}  # answers of three tokens repeat their prompts and themselves
DOCUMENT = [7, 11, 13, 13, 11, 7, 7, 11, 13] * 4
SAMPLINGS = [
    SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=FEW),
    SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=FEW, frequency_penalty=0.02, logprobs=3),
    SamplingParams(temperature=1.0, seed=5, ignore_eos=True, logit_bias=FEW, logprobs=2),
    SamplingParams(temperature=0.7, seed=6, ignore_eos=True, logit_bias=FEW, top_k=2, repetition_penalty=1.05),
    SamplingParams(temperature=1.0, seed=7, ignore_eos=True, logit_bias=FEW, min_p=0.1, top_p=0.9),
    SamplingParams(temperature=1.0, seed=8, ignore_eos=True),  # hardly a draft fits
]
NUMBERS = range(len(SAMPLINGS))
TOKENS, WAIT_S = 90, 120.0


def submitted(kv: Client, number: int, **changes: object) -> Finished:
    sampling = replace(SAMPLINGS[number], **changes)  # type: ignore[arg-type]
    return kv.submit([20 + number, *DOCUMENT], max_tokens=TOKENS, sampling=sampling).result(WAIT_S)


def together(kv: Client, numbers: Sequence[int]) -> list[Finished]:
    return [request.result(WAIT_S) for request in all_submitted(kv, numbers)]


def all_submitted(kv: Client, numbers: Sequence[int]) -> list[Request]:
    return [kv.submit([20 + number, *DOCUMENT], max_tokens=TOKENS, sampling=SAMPLINGS[number]) for number in numbers]


def bits(found: Finished) -> tuple[object, ...]:
    return found.tokens, found.logprobs, found.top_logprobs, found.reason


def steps(kv: Client) -> int:
    return kv.stats().pools[0].steps


@pytest.fixture(scope="module")
def want() -> list[Finished]:
    """The answers of a service without drafts."""
    with Cluster(coordinator=NO_DRAFTS) as cluster:
        kv = cluster.start("w0")
        found = together(kv, NUMBERS)
        assert steps(kv) >= TOKENS
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with DraftingCluster(coordinator=DRAFTS) as cluster:
        cluster.start("w0")
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    kv = cluster.client()
    yield kv
    wait_empty(kv)


def test_answers_are_those_without_drafts_in_fewer_steps(kv: Client, want: list[Finished]) -> None:
    before = steps(kv)
    assert bits(submitted(kv, 0)) == bits(want[0])
    taken = steps(kv) - before
    assert taken <= 0.8 * TOKENS, "a step without an accepted draft has one token"
    (worker,) = kv.health().workers
    assert worker.drafts == 4
    assert TOKENS - taken <= worker.accepted_total <= worker.drafted_total <= 4 * taken
    for number in NUMBERS:
        assert bits(submitted(kv, number)) == bits(want[number])
    for mine, other in zip(together(kv, NUMBERS), want, strict=True):
        assert bits(mine) == bits(other)


def test_an_answer_ends_at_a_stop_token_among_accepted_drafts(kv: Client, want: list[Finished]) -> None:
    for number in (0, 2):
        tokens = list(want[number].tokens)
        for stop in (7, 11, 13):
            if stop in tokens:
                found = submitted(kv, number, stop_tokens=(stop,))
                assert list(found.tokens) == tokens[: tokens.index(stop) + 1]
                assert found.reason == "stop"


def test_a_worker_killed_among_drafts_changes_no_bit(want: list[Finished]) -> None:
    with Cluster(coordinator=DRAFTS) as cluster:
        kv = cluster.start("w0")
        requests = stopped_midway(cluster, kv, lambda: all_submitted(kv, NUMBERS), TOKENS, "w0", begun=8)
        cluster.kill("w0")
        cluster.start_worker("w0")
        for request, other in zip(requests, want, strict=True):
            assert bits(request.result(WAIT_S)) == bits(other)
        assert wait_empty(kv).requests.recomputed_tokens_total > 0


@NEEDS_CACHE
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_a_model_with_recurrent_states_gives_the_bits_without_drafts(name: str, tmp_path: Path) -> None:
    model_type, fields = HYBRIDS[name]
    model = save(tmp_path / "model", model_type, {**fields, "max_position_embeddings": 256})
    with Cluster(model=model, coordinator=NO_DRAFTS) as cluster:
        kv = cluster.start("w0")
        want = together(kv, NUMBERS)
    with DraftingCluster(coordinator=DRAFTS, model=model, worker="draft_states = 12\n") as cluster:
        kv = cluster.start("w0")
        before = steps(kv)
        assert bits(submitted(kv, 0)) == bits(want[0])
        taken = steps(kv) - before
        assert taken <= 0.8 * TOKENS
        (worker,) = kv.health().workers
        assert worker.drafts == 4 and worker.accepted_total >= TOKENS - taken
        assert worker.device_bytes["draft_states"] > 0
        for mine, other in zip(together(kv, NUMBERS), want, strict=True):
            assert bits(mine) == bits(other)
        # Forks, and a turn behind an answer, begin with the state behind its last token.
        sequence = kv.create_sequence([20, *DOCUMENT])
        first = kv.submit(sequence=sequence, max_tokens=40, sampling=SAMPLINGS[0]).result(WAIT_S)
        assert first.tokens == want[0].tokens[:40]
        (fork,) = kv.fork(sequence)
        for one in (sequence, fork):
            rest = kv.submit(sequence=one, max_tokens=TOKENS - 40, sampling=SAMPLINGS[0]).result(WAIT_S)
            assert (rest.tokens, rest.logprobs) == (want[0].tokens[40:], want[0].logprobs[40:])
        kv.remove([sequence, fork])
        assert kv.health().workers[0].drafted_total > worker.drafted_total
        assert wait_empty(kv).requests.failed_total == 0
