"""Log-probabilities of prompts in real processes: transformers' own, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from kvforge import AsyncClient, Client, InvalidRequest, SamplingParams
from kvforge.client.results import ScoredToken
from tests.gateway.served import Gateway
from tools.cluster.cluster import Cluster

CONFIG = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
CHUNKS = "[schedule]\nstep_tokens_max = 24\n"
PROMPT = [(7 * i * i + 3 * i + 5) % 211 for i in range(150)]
WIDTH = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in float32, as transformers saves it."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("scored")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    """Log-probabilities behind each token of the prompt, by transformers alone: [tokens, vocab]."""
    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        return reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with Cluster(model=model, coordinator=CHUNKS) as cluster:
        cluster.start("w0")
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Client:
    return cluster.client()


def check(found: tuple[ScoredToken, ...], expected: torch.Tensor, width: int) -> None:
    assert [token.position for token in found] == list(range(1, len(PROMPT)))
    assert [token.token_id for token in found] == PROMPT[1:]
    for token in found:
        row = expected[token.position - 1]
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)
        assert token.rank == 1 + int((row > row[token.token_id]).sum())
        top = row.topk(width)
        assert [token_id for token_id, _ in token.top_logprobs] == top.indices.tolist()
        assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(top.values.tolist(), abs=2e-4)


def test_they_are_transformers_own_before_and_after_the_prompt_is_cached(kv: Client, expected: torch.Tensor) -> None:
    first = kv.score(PROMPT, top_logprobs=WIDTH)
    check(first, expected, WIDTH)
    plain = kv.submit(PROMPT, max_tokens=2).result()
    assert plain.cached_tokens > 0, "the scored prompt is cached for others"
    assert kv.score(PROMPT, top_logprobs=WIDTH) == first
    assert [(token.logprob, token.rank) for token in kv.score(PROMPT)] == [(t.logprob, t.rank) for t in first]


def test_no_bit_depends_on_company(kv: Client) -> None:
    alone = kv.score(PROMPT, top_logprobs=2)
    sampling = SamplingParams(temperature=0, prompt_logprobs=2, ignore_eos=True)
    beside = [kv.submit([i, 2, *PROMPT[i:]], max_tokens=40, sampling=SamplingParams(seed=i)) for i in range(4)]
    scored = [kv.submit(PROMPT[i:], max_tokens=i % 3, sampling=sampling) for i in range(4)]
    assert scored[0].result(60).prompt_logprobs == alone
    for i, request in enumerate(scored):
        assert len(request.result(60).prompt_logprobs) == len(PROMPT) - i - 1
        assert len(request.tokens) == i % 3
    for request in beside:
        request.result(60)


def test_the_asyncio_client_scores_too(cluster: Cluster, kv: Client) -> None:
    async def score() -> tuple[ScoredToken, ...]:
        async with AsyncClient(cluster.endpoint) as client:
            return await client.score(PROMPT, top_logprobs=1)

    assert asyncio.run(score()) == kv.score(PROMPT, top_logprobs=1)


def test_a_context_of_its_own_is_filled(kv: Client) -> None:
    assert len(kv.score([3] * 512)) == 511
    with pytest.raises(InvalidRequest, match="prompt"):
        kv.score([3] * 513)


def test_deaths_change_nothing(cluster: Cluster, kv: Client, expected: torch.Tensor) -> None:
    """The worker dies in the middle of one prompt, and the coordinator with its journal in the middle of the next."""
    sampling = SamplingParams(temperature=0, prompt_logprobs=WIDTH)
    for victim in ("w0", "coordinator"):
        requests = [kv.submit(PROMPT, max_tokens=0, sampling=sampling) for _ in range(6)]
        cluster.kill(victim)
        cluster.start_worker("w0") if victim == "w0" else cluster.start_coordinator()
        for request in requests:
            check(request.result(60).prompt_logprobs, expected, WIDTH)


def test_over_http_a_batch_of_token_ids(cluster: Cluster, expected: torch.Tensor, tmp_path: Path) -> None:
    """As lm-evaluation-harness asks for loglikelihoods; the model has no tokenizer, so nothing is echoed as text."""
    body: dict[str, Any] = {
        "prompt": [PROMPT, PROMPT[:20]],
        "temperature": 0,
        "max_tokens": 0,
        "prompt_logprobs": 1,
        "seed": 1234,
    }
    with Gateway(cluster.runtime, tmp_path) as gateway, httpx.Client(timeout=60) as http:
        response = http.post(f"{gateway.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    for choice, prompt in zip(response.json()["choices"], body["prompt"], strict=True):
        assert choice["finish_reason"] == "length" and choice["token_ids"] == []
        first, *entries = choice["prompt_logprobs"]
        assert first is None
        for at, (token, entry) in enumerate(zip(prompt[1:], entries, strict=True)):
            assert entry[str(token)]["logprob"] == pytest.approx(float(expected[at][token]), abs=2e-4)
            best = min(entry.values(), key=lambda value: value["rank"])
            assert best == {
                "logprob": pytest.approx(float(expected[at].max()), abs=2e-4),
                "rank": 1,
                "decoded_token": None,
            }


def test_two_ranks_share_the_vocabulary(model: Path, expected: torch.Tensor) -> None:
    with Cluster(model=model, coordinator=CHUNKS, ranks=2) as cluster:
        kv = cluster.start("w0", "w1")
        check(kv.score(PROMPT, top_logprobs=WIDTH), expected, WIDTH)
