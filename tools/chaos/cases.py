"""Test cases of a chaos run: prompts, and their answers, computed once before the first process fault.

`max_tokens` identifies a request: no two turns of all cases share a value. The ledger can therefore also check a
request that no surviving client recorded.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from kvforge import Client, SamplingParams

CASES = 24
SHARED_TOKENS = 48  # length of the prompt prefix that every second case shares, for prefix cache hits
VOCABULARY = range(3, 250)
TOGETHER = 4
SAMPLES_MAX = 3  # maximum answers of one command (n)
FOLLOW_TOKENS = 4
ANSWERS_S = 120.0


@dataclass(frozen=True)
class Case:
    """A prompt with its sampling parameters; `follow` holds the prompt tokens of a second turn."""

    number: int
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    max_tokens: int
    follow: tuple[int, ...]
    follow_max_tokens: int

    def drawn(self, index: int = 0) -> SamplingParams:
        """Return the sampling parameters of answer `index`; the answers of one command have consecutive seeds."""
        sampling = dict(self.sampling)
        if "seed" in sampling:
            sampling["seed"] += index
        return SamplingParams(**sampling)


@dataclass(frozen=True)
class Answer:
    """The expected tokens and finish reason of a request."""

    tokens: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Known:
    """A case with its expected answers: one per consecutive seed, and the answer of the second turn."""

    case: Case
    answers: tuple[Answer, ...]
    second: Answer

    def as_json(self) -> dict[str, Any]:
        """Return a JSON value for a client process."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Known:
        """Return the case that `as_json` encoded."""
        case = value["case"]
        made = Case(**{**case, "prompt": tuple(case["prompt"]), "follow": tuple(case["follow"])})
        return cls(made, tuple(_answer(each) for each in value["answers"]), _answer(value["second"]))


def _answer(value: dict[str, Any]) -> Answer:
    return Answer(tuple(value["tokens"]), value["reason"])


def draw(seed: int) -> list[Case]:
    """Return the cases of a seed: greedy and sampled, short and long; every second one has the shared prefix."""
    rng = random.Random(f"cases {seed}")
    tokens = list(VOCABULARY)
    shared = rng.choices(tokens, k=SHARED_TOKENS)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "ignore_eos": True},
        {"temperature": 1.2, "repetition_penalty": 1.2, "logprobs": 2, "ignore_eos": True},
    ]
    cases = []
    for number in range(CASES):
        sampling = dict(samplings[number % len(samplings)])
        if sampling["temperature"]:
            sampling["seed"] = rng.getrandbits(32)
        prompt = (shared if number % 2 else []) + rng.choices(tokens, k=rng.randint(4, 60))
        follow = tuple(rng.choices(tokens, k=FOLLOW_TOKENS))
        cases.append(Case(number, tuple(prompt), sampling, 8 + 6 * number, follow, 9 + 2 * number))
    return cases


def answered(kv: Client, cases: list[Case]) -> list[Known]:
    """Compute the answers of all cases once, a few cases at a time."""
    return [known for at in range(0, CASES, TOGETHER) for known in _answered(kv, cases[at : at + TOGETHER])]


def _answered(kv: Client, cases: list[Case]) -> list[Known]:
    firsts = [
        [kv.submit(case.prompt, max_tokens=case.max_tokens, sampling=case.drawn(i)) for i in range(SAMPLES_MAX)]
        for case in cases
    ]
    sequences = [kv.create_sequence(case.prompt) for case in cases]
    turns = [
        kv.submit(sequence=sequence, max_tokens=case.max_tokens, sampling=case.drawn())
        for case, sequence in zip(cases, sequences, strict=True)
    ]
    for turn in turns:
        turn.result(ANSWERS_S)
    seconds = [
        kv.submit(case.follow, sequence=sequence, max_tokens=case.follow_max_tokens, sampling=case.drawn())
        for case, sequence in zip(cases, sequences, strict=True)
    ]
    known = []
    for case, requests, second in zip(cases, firsts, seconds, strict=True):
        answers = tuple(Answer(done.tokens, done.reason) for done in (each.result(ANSWERS_S) for each in requests))
        done = second.result(ANSWERS_S)
        known.append(Known(case, answers, Answer(done.tokens, done.reason)))
    kv.remove(sequences)
    return known
