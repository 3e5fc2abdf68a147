"""Sampling with all parameters in real processes: a worker crash changes no token and loses no log-probability."""

from __future__ import annotations

import pytest

from kvforge import Client, InvalidRequest, Request, SamplingParams
from kvforge.client import exchanges
from kvforge.client.blocking.waiting import drive
from kvforge.protocol.messages import Stats
from tools.cluster.cluster import Cluster

COUNT = 150
EVERYTHING = SamplingParams(
    temperature=1.1,
    seed=5,
    top_k=40,
    top_p=0.95,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias=((3, 4.0), (9, float("-inf"))),
    logprobs=3,
    ignore_eos=True,
)


def finish_at(kv: Client, request: Request, tokens: int) -> None:
    """Send the message of text clients at a stop string."""
    drive(kv._calls.call(exchanges.finish_at(request.id, tokens)))


def test_everything_on_survives_a_workers_death_and_a_batch() -> None:
    prompt = [5, 9, 31, 7, 7, 2, 88, 14, 3]
    with Cluster() as cluster:
        kv = cluster.start("w0")
        alone = kv.submit(prompt, max_tokens=COUNT, sampling=EVERYTHING).result(60)
        assert 9 not in alone.tokens
        assert [len(top) for top in alone.top_logprobs] == [3] * COUNT
        request = kv.submit(prompt, max_tokens=COUNT, sampling=EVERYTHING)
        beside = [
            kv.submit([i, 2], max_tokens=COUNT, sampling=SamplingParams(seed=i, ignore_eos=True)) for i in range(3)
        ]
        next(iter(request))
        cluster.kill("w0")
        cluster.start_worker("w0")
        done = request.result(60)
        assert done.tokens == alone.tokens
        assert [[token for token, _ in top] for top in done.top_logprobs] == [
            [token for token, _ in top] for top in alone.top_logprobs
        ]
        for other in beside:
            assert other.result(60).top_logprobs == ((),) * COUNT

        cut = kv.submit(prompt, max_tokens=1500, sampling=EVERYTHING)
        for _ in zip(range(20), cut, strict=False):
            pass
        finish_at(kv, cut, 12)
        ended = cut.result(60)
        assert (ended.reason, ended.tokens, len(ended.top_logprobs)) == ("stop", alone.tokens[:12], 12)
        finish_at(kv, cut, 12)  # the same answer again
        assert kv.status(cut.id).generated_tokens == 12
        with pytest.raises(InvalidRequest, match=r"sampling\.logit_bias"):
            kv.submit([1], sampling=SamplingParams(logit_bias=((1 << 30, 1.0),)))
        stats: Stats = kv.stats()
        assert (stats.requests.running, stats.requests.pending) == (0, 0)
