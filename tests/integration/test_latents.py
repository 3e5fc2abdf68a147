"""Two ranks serve attention over latents as transformers computes it: cached, forked, preempted, and after a death."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from kvforge import SamplingParams
from tests.worker.loading.random_models import DESCRIBED, save
from tools.cluster.cluster import Cluster

from .shared import wait_empty

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PREFIX, TOKENS, REQUESTS = list(range(3, 24)), 24, 6
NAMES = ("w0", "w1")


@torch.inference_mode()
def say(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return the tokens that transformers generates, without a cache, for prompts of one length."""
    torch.set_num_threads(1)  # others would spin beside the cluster
    tokens = torch.tensor(prompts)
    for _ in range(TOKENS):
        found = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1)
        tokens = torch.cat((tokens, found[:, None]), 1)
    return [tuple(row) for row in tokens[:, len(prompts[0]) :].tolist()]


def test_latents_through_hits_forks_preemption_and_a_killed_rank(tmp_path: Path) -> None:
    """behaviours 15, 28, 35."""
    model_type, fields = DESCRIBED["deepseek_v3"]
    folder = save(tmp_path / "model", model_type, {**fields, "max_position_embeddings": 256})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    prompts = [[*PREFIX, 30 + number, 31] for number in range(REQUESTS)]
    want = say(model, prompts)
    with Cluster(ranks=2, model=folder, blocks=40, coordinator="[cache]\nblock_size = 4\n") as cluster:
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
        running = [kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt=str(prompt)) for prompt in prompts]
        assert [request.result(60).tokens for request in running] == want
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
