"""Models with recurrent states give the tokens of transformers: cached, forked, preempted, and after deaths."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from kvforge import SamplingParams
from tests import fresh
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE, save
from tools.cluster.cluster import Cluster

from .drafting_cluster import NO_DRAFTS, DraftingCluster
from .shared import wait_empty
from .undisturbed import say, tokens_of

pytestmark = [NEEDS_CACHE, pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PREFIX, TOKENS, REQUESTS = [3 + 7 * place % 90 for place in range(70)], 48, 5


def test_states_through_hits_forks_rewinds_preemption_and_deaths(tmp_path: Path) -> None:
    """behaviours 15, 28, 35. Decode steps run from graphs: on a CPU the function itself, with rows of padding."""
    _check("qwen3_next", 2, tmp_path, graphs="on")


@pytest.mark.parametrize(
    ("name", "pages", "ranks"),
    fresh.of_the_day(
        [
            ("falcon_h1", 2, 1),
            ("falcon_mamba", 18, 1),
            ("granite", 4, 1),
            ("jamba", 2, 1),
            ("kimi_linear", 6, 1),
            ("kimi_linear", 3, 2),
            ("mamba", 18, 1),
            ("mamba2", 20, 1),
            ("minimax", 3, 1),
            ("qwen3_next", 2, 2),
            ("recurrent_gemma", 2, 1),
        ],
        3,
    ),
)
def test_the_same_with_other_families(name: str, pages: int, ranks: int, tmp_path: Path) -> None:
    _check(name, pages, tmp_path, ranks)


@pytest.mark.parametrize(
    ("name", "pages", "ranks"),
    [
        ("qwen3_next", 2, 2),
        pytest.param("granite", 4, 1, marks=pytest.mark.soak),
        pytest.param("qwen3_next", 2, 1, marks=pytest.mark.soak),  # as one of two ranks
    ],
)
def test_the_same_with_drafts(name: str, pages: int, ranks: int, tmp_path: Path) -> None:
    """Deaths, preemptions and rewinds find the states behind accepted drafts alone.

    Decode steps run from graphs: on a CPU the function itself, with rows of padding.
    """
    _check(name, pages, tmp_path, ranks, graphs="on", drafts=True)


def _check(name: str, pages: int, tmp_path: Path, ranks: int = 1, graphs: str = "auto", drafts: bool = False) -> None:
    names = [f"w{rank}" for rank in range(ranks)]
    model_type, fields = HYBRIDS[name]
    folder = save(tmp_path / "model", model_type, {**fields, "max_position_embeddings": 256})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    prompts = [[*PREFIX, 30 + number, 31] for number in range(REQUESTS)]
    want = tokens_of(say(model, prompts, TOKENS))
    at_begin = REQUESTS * (6 + pages)  # with a block of room; an answer ends with 8 blocks of KV
    worker, kind = f'graphs = "{graphs}"\ndraft_states = 16\n', DraftingCluster if drafts else Cluster
    schedule = "[schedule]\ndrafts_max = 4\n" if drafts else NO_DRAFTS
    with kind(model=folder, blocks=at_begin + 2, ranks=ranks, worker=worker, coordinator=schedule) as cluster:
        kv = cluster.start(*names)
        cached, bits = [], []
        for number in (0, 0, 1, 2):
            answer = kv.submit(prompts[number], max_tokens=TOKENS, sampling=GREEDY).result(60)
            assert answer.tokens == want[number]
            cached.append(answer.cached_tokens)
            bits.append(answer.logprobs)
        assert cached == [0, 64, 64, 64], "a hit ends at a checkpoint"
        assert bits[0] == bits[1]
        assert (kv.health().workers[0].accepted_total > 0) == drafts
        source = kv.create_sequence(prompts[0])
        assert kv.submit(sequence=source, max_tokens=7, sampling=GREEDY).result(60).tokens == want[0][:7]
        (fork,) = kv.fork(source)
        both = [kv.submit(sequence=one, max_tokens=TOKENS - 7, sampling=GREEDY) for one in (source, fork)]
        assert [request.result(60).tokens for request in both] == 2 * [want[0][7:]]
        assert [request.result(60).logprobs for request in both] == 2 * [bits[0][7:]]
        kv.rewind(fork, len(prompts[0]) + 3)
        again = kv.submit(sequence=fork, max_tokens=TOKENS - 3, sampling=GREEDY).result(60)
        assert again.tokens == want[0][3:], "a state does not go back, and is computed again"
        assert again.logprobs == bits[0][3:]
        kv.remove([source, fork])
        # The pool has room for five prompts and not for their answers: one that comes late would wait for the others.
        with cluster.stopped(*names):
            running = [
                kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt=f"{prompt[-2]}") for prompt in prompts
            ]
            assert kv.stats().requests.accepted_total == len(cached) + 4 + REQUESTS
        assert [request.result(60).tokens for request in running] == want
        assert kv.stats().requests.preemptions_total > 0, "the pool holds fewer than these five at their ends"
        for victim in (names[-1], "coordinator"):
            running = [kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt=victim) for prompt in prompts]
            next(iter(running[0]))
            cluster.kill(victim)
            if victim == "coordinator":
                cluster.start_coordinator()
            else:
                for rank in names[:-1]:
                    assert cluster.end(rank) != 0, "its supervisor must start it again"
                for rank in names:
                    cluster.start_worker(rank)
            answers = [request.result(60) for request in running]
            assert [answer.tokens for answer in answers] == want
            assert answers[0].logprobs == bits[0]
        assert wait_empty(kv).requests.failed_total == 0
