"""Requests of mixed shape, each the same in every process, and a client that submits them until it is killed."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

from kvforge import Client, SamplingParams

SHAPES = 48
VOCABULARY = 256
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "stop_tokens": tuple(range(3, 256, 17))},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "min_p": 0.02, "presence_penalty": 0.5, "logit_bias": ((7, 2.0), (9, -100.0))},
)


@dataclass(frozen=True)
class Shape:
    """One kind of request: its parameters and its tenant."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    tenant: str
    priority: int


def shapes() -> list[Shape]:
    """Return prompts from one token to many blocks, some with a common prefix; answers of 1 to 48 tokens; all sampling
    parameters."""
    draw = random.Random(7)
    common = [draw.randrange(3, VOCABULARY) for _ in range(100)]
    made = []
    for i in range(SHAPES):
        own = [draw.randrange(3, VOCABULARY) for _ in range(draw.choice((1, 3, 17, 40, 150)))]
        shared = common[: draw.choice((0, 0, 16, 37, 100))]
        made.append(
            Shape(
                prompt=(*shared, *own),
                max_tokens=draw.choice((1, 4, 16, 48)),
                sampling=SamplingParams(seed=1000 + i, ignore_eos=bool(i % 3), **SAMPLINGS[i % len(SAMPLINGS)]),
                tenant=draw.choice(("a", "a", "b", "c")),
                priority=draw.choice((0, 0, 0, -2, 3)),
            )
        )
    return made


def until_killed(endpoint: str, seed: int) -> None:
    """Submit requests and read some without end; print a line after the first token."""
    draw = random.Random(seed)
    kinds = shapes()
    with Client(endpoint) as kv:
        told = False
        while True:
            chosen = [draw.choice(kinds) for _ in range(6)]
            running = [
                kv.submit(s.prompt, max_tokens=s.max_tokens, sampling=s.sampling, tenant=s.tenant, retry_s=60)
                for s in chosen
            ]
            for _ in running[0]:
                if not told:
                    print("streaming", flush=True)
                    told = True
            for request in running[:3]:
                request.result()


if __name__ == "__main__":
    until_killed(sys.argv[1], int(sys.argv[2]))
