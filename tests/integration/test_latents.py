"""Two ranks serve attention over latents as transformers computes it: cached, forked, preempted, and after a death."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from kvforge import SamplingParams
from tests.worker.loading.random_models import DESCRIBED, save
from tools.cluster.cluster import Cluster

from .drafting_cluster import NO_DRAFTS
from .shared import wait_empty
from .undisturbed import say, tokens_of

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PREFIX, TOKENS, REQUESTS = list(range(3, 24)), 24, 6
NAMES = ("w0", "w1")


@pytest.mark.parametrize("drafts", [False, True])
def test_latents_through_hits_forks_preemption_and_a_killed_rank(drafts: bool, tmp_path: Path) -> None:
    """behaviours 15, 28, 35."""
    model_type, fields = DESCRIBED["deepseek_v3"]
    folder = save(tmp_path / "model", model_type, {**fields, "max_position_embeddings": 256})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    prompts = [[*PREFIX, 30 + number, 31] for number in range(REQUESTS)]
    want = tokens_of(say(model, prompts, TOKENS))
    coordinator = f"{'' if drafts else NO_DRAFTS}[cache]\nblock_size = 4\n"
    with Cluster(ranks=2, model=folder, blocks=40, coordinator=coordinator) as cluster:
        kv = cluster.start(*NAMES)
        assert kv.health().model.kv_layout == "latents"  # type: ignore[union-attr]
        for prompt, tokens in zip(prompts[:2], want, strict=False):
            first = kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY).result(60)
            assert first.tokens == tokens
        assert first.cached_tokens == 20, "the second request finds the latents of the first"
        source = kv.create_sequence(prompts[0])
        assert kv.submit(sequence=source, max_tokens=7, sampling=GREEDY).result(60).tokens == want[0][:7]
        (fork,) = kv.fork(source)
        both = [kv.submit(sequence=one, max_tokens=TOKENS - 7, sampling=GREEDY) for one in (source, fork)]
        assert [request.result(60).tokens for request in both] == 2 * [want[0][7:]], "the last block is copied"
        # The pool has room for five prompts and not for their answers: one that comes late would wait for the others.
        with cluster.stopped(*NAMES):
            running = [
                kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt=str(prompt)) for prompt in prompts
            ]
            assert kv.stats().requests.accepted_total == 5 + REQUESTS
        assert [request.result(60).tokens for request in running] == want
        if not drafts:  # which may end one before the others need its blocks
            assert kv.stats().requests.preemptions_total > 0, "40 blocks hold fewer than these six"
        running = [kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt="again") for prompt in prompts]
        next(iter(running[0]))
        cluster.kill("w1")
        assert cluster.end("w0") != 0, "its supervisor must start it again"
        for name in NAMES:
            cluster.start_worker(name)
        assert [request.result(60).tokens for request in running] == want
        kv.remove([source, fork])
        assert wait_empty(kv).requests.failed_total == 0
