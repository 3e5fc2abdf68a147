"""Structured answers in real processes are the same and valid, whatever crashes or is preempted."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from kvforge import Client, InvalidRequest, Request, SamplingParams
from kvforge.protocol.errors import KvforgeError
from tests.worker.characters import EOS, encoded, text_of, write_characters
from tools.cluster.cluster import Cluster

from .midway import stopped_midway
from .shared import Shared

PROMPT = [5, 9, 31, 7, 7, 2, 88, 14, 3]
PAIRS = 70
TOKENS = 2 * PAIRS + 1
WAIT_S = 600.0  # a hang ends there; on a busy machine the answers may take minutes
REGEX = f"([a-f][0-9]){{{PAIRS}}}"
SHAPES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2},
)


def shaped(**more: Any) -> SamplingParams:
    return SamplingParams(regex=REGEX, **more)


def submitted(kv: Client) -> list[Request]:
    return [kv.submit(PROMPT, max_tokens=200, sampling=shaped(**more)) for more in SHAPES]


def test_a_shaped_answer_survives_kills_preemption_and_has_company() -> None:
    with Cluster(blocks=40) as cluster:
        write_characters(cluster.model)
        kv = cluster.start("w0")
        alone = [kv.submit(PROMPT, max_tokens=200, sampling=shaped(**more)).result(WAIT_S) for more in SHAPES]
        for answer in alone:
            assert (answer.reason, answer.tokens[-1], len(answer.tokens)) == ("stop", EOS, TOKENS)
            assert re.fullmatch(REGEX, text_of(list(answer.tokens)))
        assert len({answer.tokens for answer in alone}) == len(alone)

        free = kv.submit([1, 2], max_tokens=150, sampling=SamplingParams(seed=9, ignore_eos=True)).result(WAIT_S)

        def with_company() -> list[Request]:
            beside = kv.submit([1, 2], max_tokens=150, sampling=SamplingParams(seed=9, ignore_eos=True))
            return [beside, *submitted(kv)]

        beside, *running = stopped_midway(cluster, kv, with_company, TOKENS, "w0")
        cluster.kill("w0")
        cluster.start_worker("w0")
        assert [request.result(WAIT_S).tokens for request in running] == [answer.tokens for answer in alone]
        assert beside.result(WAIT_S).tokens == free.tokens

        running = stopped_midway(cluster, kv, lambda: submitted(kv), TOKENS, "w0")
        cluster.kill("coordinator")
        cluster.start_coordinator()
        cluster.signal("w0", signal.SIGCONT)
        assert [request.result(WAIT_S).tokens for request in running] == [answer.tokens for answer in alone]

        with cluster.stopped("w0"):
            crowd = [submitted(kv) for _ in range(4)]  # 12 rows need 10 blocks each in a pool of 40
        answers = [[request.result(WAIT_S).tokens for request in each] for each in crowd]
        assert answers == [[answer.tokens for answer in alone]] * len(crowd)
        assert kv.stats().requests.preemptions_total > 0


def test_samples_and_forks_have_matchers_of_their_own() -> None:
    with Cluster() as cluster:
        write_characters(cluster.model)
        kv = cluster.start("w0")
        samples = kv.submit_samples(PROMPT, 4, max_tokens=200, sampling=shaped(temperature=1.0, seed=4))
        several = [request.result(WAIT_S) for request in samples]
        assert all(re.fullmatch(REGEX, text_of(list(answer.tokens))) for answer in several)
        assert len({answer.tokens for answer in several}) == 4
        for request, answer in zip(samples, several, strict=True):
            again = kv.submit(PROMPT, max_tokens=200, sampling=shaped(temperature=1.0, seed=request.seed))
            assert again.result(WAIT_S).tokens == answer.tokens

        whole = kv.submit([*PROMPT, *encoded("ab")], max_tokens=200, sampling=shaped(temperature=0.0)).result(WAIT_S)
        trunk = kv.create_sequence(PROMPT)
        kv.append(trunk, encoded("ab"))
        (branch,) = kv.fork(trunk)
        for sequence in (trunk, branch):  # the grammar starts with the request, independent of earlier tokens
            forked = kv.submit(sequence=sequence, max_tokens=200, sampling=shaped(temperature=0.0)).result(WAIT_S)
            assert forked.tokens == whole.tokens
        cut = kv.submit(PROMPT, max_tokens=7, sampling=shaped(temperature=0.0)).result(WAIT_S)
        assert (cut.reason, len(cut.tokens)) == ("length", 7)


def test_what_cannot_be_served_fails_alone_and_is_told(shared: Shared) -> None:
    kv = shared.kv  # its model has no tokenizer
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        kv.submit(PROMPT, sampling=SamplingParams(json_schema={"uniqueItems": True}))
    beside = kv.submit(PROMPT, max_tokens=50, sampling=SamplingParams(seed=1, ignore_eos=True))
    with pytest.raises(KvforgeError, match=r"sampling\.json_object: cannot be served: .* tokenizer"):
        kv.submit(PROMPT, sampling=SamplingParams(json_object=True)).result(WAIT_S)
    assert len(beside.result(WAIT_S).tokens) == 50
