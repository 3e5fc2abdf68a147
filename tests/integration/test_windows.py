"""Models with layers that keep a window give transformers' tokens: cached, forked, preempted, and after deaths."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers

from kvforge import Request, SamplingParams
from tests import fresh
from tests.worker.loading.random_models import save
from tests.worker.step.test_windows import COMMON, MODELS, WINDOW
from tools.cluster.cluster import Cluster

from .drafting_cluster import NO_DRAFTS
from .shared import wait_empty
from .undisturbed import Answers, say

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CASES = [*((name, 1, True) for name in MODELS), ("gpt_oss", 2, True), ("gpt_oss", 1, False), ("gpt_oss", 2, False)]
PREFIX, TOKENS, REQUESTS = [3 + 7 * place % 90 for place in range(70)], 48, 5
TOLERANCE = 1e-4  # of a log-probability


class Checker:
    """Compares answers with transformers' own, and their bits with those of the first answer of as many tokens."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, ...], tuple[float, ...]] = {}

    def check(self, request: Request, prompt: list[int], want: Answers, begin: int = 0, end: int = TOKENS) -> int:
        """Compare the tokens [begin, end) behind a prompt; return how many tokens of the prompt were cached."""
        answer = request.result(60)
        assert answer.tokens == tuple(token for token, _ in want[begin:end])
        logprobs = [logprob for _, logprob in want[begin:end]]
        assert max(abs(got - logprob) for got, logprob in zip(answer.logprobs, logprobs, strict=True)) < TOLERANCE
        assert answer.logprobs == self._bits.setdefault(tuple(prompt), answer.logprobs)[begin:end]
        return answer.cached_tokens


def pages_of(fields: dict[str, Any]) -> int:
    """Return the pages of a block of the layers with a window."""
    kinds = fields["layer_types"]
    full = kinds.count("full_attention")
    return -(-(len(kinds) - full) // full)


@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize(("name", "ranks", "drafts"), fresh.of_the_day(CASES, 3))
def test_windows_through_hits_forks_rewinds_preemption_and_deaths(
    name: str, ranks: int, drafts: bool, tmp_path: Path
) -> None:
    """behaviours 15, 28, 35."""
    model_type, fields = MODELS[name]
    folder = save(tmp_path / "model", model_type, {**fields, **COMMON, "max_position_embeddings": 256})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    prompts = [[*PREFIX, 30 + number, 31] for number in range(REQUESTS)]
    want = say(model, prompts, TOKENS)
    pages, names = pages_of(fields), [f"w{rank}" for rank in range(ranks)]
    check, blocks = Checker().check, REQUESTS * (5 + 3 * pages) + pages + 4
    experts = "expert_parallel = true\n" if name == "gpt_oss" and ranks > 1 else ""  # no plan cuts its experts
    schedule = "" if drafts else NO_DRAFTS
    with Cluster(model=folder, blocks=blocks, ranks=ranks, worker=experts, coordinator=schedule) as cluster:
        kv = cluster.start(*names)
        for worker in kv.health().workers:
            assert f"layers keep the KV of {WINDOW} tokens" in worker.kernels["windows"]
        cached = []
        for number in (0, 0, 1, 2):
            request = kv.submit(prompts[number], max_tokens=TOKENS, sampling=GREEDY)
            cached.append(check(request, prompts[number], want[number]))
        assert cached[0] == 0 and min(cached[1:]) >= 64, "a hit needs the last blocks of the window alone"
        source = kv.create_sequence(prompts[0])
        check(kv.submit(sequence=source, max_tokens=7, sampling=GREEDY), prompts[0], want[0], 0, 7)
        (fork,) = kv.fork(source)
        both = [kv.submit(sequence=one, max_tokens=TOKENS - 7, sampling=GREEDY) for one in (source, fork)]
        for request in both:
            check(request, prompts[0], want[0], 7)
        kv.rewind(fork, len(prompts[0]) + 3)  # its window went on
        check(kv.submit(sequence=fork, max_tokens=TOKENS - 3, sampling=GREEDY), prompts[0], want[0], 3)
        kv.remove([source, fork])
        # The pool has room for five prompts and not for their answers: one that comes late would wait for the others.
        with cluster.stopped(*names):
            running = [
                kv.submit(each, max_tokens=TOKENS, sampling=GREEDY, cache_salt=f"{each[-2]}") for each in prompts
            ]
            assert kv.stats().requests.accepted_total == len(cached) + 4 + REQUESTS
        for request, prompt, answer in zip(running, prompts, want, strict=True):
            check(request, prompt, answer)
        # Drafts may end one before the others need its blocks. With more pages, the pool has room for all.
        if pages == 1 and not drafts:
            assert kv.stats().requests.preemptions_total > 0, "the pool holds fewer than these five at their ends"
        for victim in (names[-1], "coordinator"):
            running = [kv.submit(each, max_tokens=TOKENS, sampling=GREEDY, cache_salt=victim) for each in prompts]
            next(iter(running[0]))
            cluster.kill(victim)
            if victim == "coordinator":
                cluster.start_coordinator()
            else:
                for rank in names[:-1]:
                    assert cluster.end(rank) != 0, "its supervisor must start it again"
                for rank in names:
                    cluster.start_worker(rank)
            for request, prompt, answer in zip(running, prompts, want, strict=True):
                check(request, prompt, answer)
        assert wait_empty(kv).requests.failed_total == 0


@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
def test_bits_of_windows_in_random_company(tmp_path: Path) -> None:
    """Prompts of any length with common beginnings, in a pool with little room, have the bits of an empty cache."""
    random = Random(7)
    model_type, fields = MODELS["gemma3"]
    folder = save(tmp_path / "model", model_type, {**fields, **COMMON, "max_position_embeddings": 1024})
    shared = [[random.randrange(3, 90) for _ in range(count)] for count in (17, 64, 200, 590)]
    prompts = []
    for _ in range(60):
        beginning = random.choice(shared)[: random.choice((8, 16, 33, 64, 600))]
        prompts.append([*beginning, *(random.randrange(3, 90) for _ in range(1 + int(100 * random.random() ** 2)))])
    with Cluster(model=folder, blocks=400) as cluster:
        kv = cluster.start("w0")

        def answer(number: int, salt: str) -> Request:
            sampling = SamplingParams(temperature=number % 2, ignore_eos=True, seed=number)
            return kv.submit(prompts[number], max_tokens=5 + number % 40, sampling=sampling, cache_salt=salt)

        alone = [answer(number, f"{number}").result(60) for number in range(len(prompts))]
        for turn in range(2):
            order = random.sample(range(len(prompts)), len(prompts))
            company = {number: answer(number, f"shared {turn}") for number in order}
            found = {number: request.result(120) for number, request in company.items()}
            for number, want in enumerate(alone):
                assert found[number].tokens == want.tokens
                assert found[number].logprobs == want.logprobs
            assert sum(each.cached_tokens for each in found.values()) > 500
        assert wait_empty(kv).requests.failed_total == 0
