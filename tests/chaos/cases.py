"""What is asked of the model in a chaos run, and what it answers: computed once, undisturbed, before anything dies.

A request is known again by its `max_tokens` alone: no two turns of all cases have the same. So what the coordinator
tells of a request that no client lived to write down can be compared, too.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from kvforge import Client, Sampling

CASES = 24
SHARED_TOKENS = 48  # of the prompts of every second case: prefixes that are found cached
VOCABULARY = range(3, 250)
TOGETHER = 4
SAMPLES_MAX = 3  # answers that one command asks for
FOLLOW_TOKENS = 4
ANSWERS_S = 120.0


@dataclass(frozen=True)
class Case:
    """A prompt and how its answer is drawn; follow: what a second turn adds to both."""

    number: int
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    max_tokens: int
    follow: tuple[int, ...]
    follow_max_tokens: int

    def drawn(self, index: int = 0) -> Sampling:
        """Of the answer `index` of several, which have seeds that follow each other."""
        sampling = dict(self.sampling)
        if "seed" in sampling:
            sampling["seed"] += index
        return Sampling(**sampling)


@dataclass(frozen=True)
class Answer:
    """The known end of a request."""

    tokens: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Known:
    """A case with its answers: one for each of the seeds that follow each other, and that of the second turn."""

    case: Case
    answers: tuple[Answer, ...]
    second: Answer

    def as_json(self) -> dict[str, Any]:
        """For a client process."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Known:
        """What `as_json` gave."""
        case = value["case"]
        made = Case(**{**case, "prompt": tuple(case["prompt"]), "follow": tuple(case["follow"])})
        return cls(made, tuple(_answer(each) for each in value["answers"]), _answer(value["second"]))


def _answer(value: dict[str, Any]) -> Answer:
    return Answer(tuple(value["tokens"]), value["reason"])


def draw(seed: int) -> list[Case]:
    """The cases of a seed: greedy and drawn answers, short and long, half of them over a common beginning."""
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
    """Has everything computed once, a few cases side by side."""
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
