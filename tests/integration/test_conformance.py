"""A real model in real processes: the conformance prompts give transformers' tokens, and shaped answers are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvforge import Client, Request, SamplingParams, TextRequest
from tests.amount import examples
from tools.cluster.cluster import Cluster

pytestmark = pytest.mark.model

SAMPLE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_sample.json").read_text(encoding="utf-8"))
# All in `make test-all`. In `make test` tests/worker/step/test_conformance.py has a long prompt too, and this file
# and the gateway's the shorter ones; all of them have the first steps.
ALL_CASES: list[dict[str, Any]] = SAMPLE["cases"]
LONGEST = len(max(ALL_CASES, key=lambda case: len(case["prompt_tokens"]))["prompt_tokens"])
CASES = [case for case in ALL_CASES if len(case["prompt_tokens"]) <= examples(LONGEST)]
STEPS = examples(len(CASES[0]["tokens"]))
AGAIN = 8  # steps of a further round: a wrong cached prompt shows in the first ones
PREEMPTED = 32  # steps where the pools cannot hold all
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["Python", "C", "Rust"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


def check(case: dict[str, Any], tokens: tuple[int, ...], steps: int = STEPS) -> None:
    """Check that all steps came, and that those with a margin above the threshold match, up to the first near tie."""
    assert len(tokens) == steps
    for index, (got, want, margin) in enumerate(zip(tokens, case["tokens"], case["margin"], strict=False)):
        if margin < SAMPLE["min_margin"] and got != want:
            return
        assert got == want, f"{case['id']}: step {index} gave {got}, not {want} (margin {margin})"


def submit_all(kv: Client, steps: int, cache_salt: str = "") -> list[Request]:
    return [
        kv.submit(case["prompt_tokens"], max_tokens=steps, sampling=GREEDY, cache_salt=cache_salt) for case in CASES
    ]


def check_all(requests: list[Request], steps: int) -> set[int]:
    """Check all answers; return the ids of the requests."""
    for case, request in zip(CASES, requests, strict=True):
        check(case, request.result(300).tokens, steps)
    return {request.id for request in requests}


def test_all_prompts_at_once_and_one_alone(smollm2_cluster: Cluster) -> None:
    """The second round hits the prefix cache and must continue identically."""
    with smollm2_cluster.client() as kv:
        # Other tests of this cluster may have left prefixes of the prompts without a salt.
        check_all(submit_all(kv, STEPS, "own"), STEPS)
        hits = kv.stats().requests.cached_tokens_total
        check_all(submit_all(kv, AGAIN, "own"), AGAIN)
        assert kv.stats().requests.cached_tokens_total > hits
        case = CASES[0]
        check(
            case,
            kv.submit(case["prompt_tokens"], max_tokens=AGAIN, sampling=GREEDY, cache_salt="alone").result(120).tokens,
            AGAIN,
        )


def test_a_real_model_answers_as_a_schema_says(smollm2_cluster: Cluster) -> None:
    with smollm2_cluster.client() as kv:  # all at once: a step reads the weights once for all rows

        def asked(prompt: str, max_tokens: int, **sampling: Any) -> TextRequest:
            return kv.generate_stream(prompt, max_tokens=max_tokens, sampling=SamplingParams(**sampling))

        persons = [
            asked("Describe a programmer in one JSON object.", 120, json_schema=PERSON, **more)
            for more in (
                {"temperature": 0.0},
                {"temperature": 1.0, "seed": 1},
                {"temperature": 0.8, "seed": 2, "top_p": 0.9},
            )
        ]
        date = asked("When did the war end?", 30, regex=r"\d{4}-\d\d-\d\d", seed=1)
        sentence = 'start: ("yes" | "no") ", because " /[a-z ]{5,30}/ "."'
        because = asked("Is water wet?", 40, grammar=sentence, temperature=0.0)
        chosen = asked("Tell me a fact.", 60, json_object=True, temperature=0.0)
        for answer in (person.result(300) for person in persons):
            assert answer.finished.reason == "stop", answer.text
            jsonschema.validate(json.loads(answer.text), PERSON)
        dated = date.result(300)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", dated.text) and dated.finished.reason == "stop"
        assert re.fullmatch(r"(yes|no), because [a-z ]{5,30}\.", because.result(300).text)
        told = chosen.result(300)
        assert told.finished.reason == "length" or isinstance(json.loads(told.text), dict)


def test_preempted_forked_cached_and_split_over_two_workers(smollm2_path: Path) -> None:
    """Every prompt twice as samples of one request and once as a fork of a sequence, in pools that cannot hold all.

    Then all of them at once on both workers, with another salt and so without hits.
    """
    with Cluster(model=smollm2_path, blocks=40) as cluster:
        kv = cluster.start("w0", "w1")
        forks = []
        for case in CASES:
            prompt = case["prompt_tokens"]
            source = kv.create_sequence(prompt[: len(prompt) // 2], idle_ttl_s=300)
            forks += kv.fork(source)
        started = []
        with cluster.stopped("w0", "w1"):
            for case, fork in zip(CASES, forks, strict=True):
                prompt = case["prompt_tokens"]
                pair = kv.submit_samples(prompt, 2, max_tokens=PREEMPTED, sampling=GREEDY)
                rest = kv.submit(prompt[len(prompt) // 2 :], sequence=fork, max_tokens=PREEMPTED, sampling=GREEDY)
                started += [(case, request) for request in (*pair, rest)]
        for case, request in started:
            check(case, request.result(300).tokens, PREEMPTED)
        stats = kv.stats().requests
        assert stats.preemptions_total > 0
        assert stats.cached_tokens_total > 0
        assert stats.finished_total == 3 * len(CASES)
        assert {row.worker for row in kv.requests().requests} == {"w0", "w1"}
        with cluster.stopped("w0", "w1"):
            running = submit_all(kv, AGAIN, cache_salt="two")
        asked = check_all(running, AGAIN)
        assert {row.worker for row in kv.requests().requests if row.request_id in asked} == {"w0", "w1"}
