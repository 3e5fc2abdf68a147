"""The same options give the same load; impossible values are refused by the option's name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvforge.loadtest.load.build import CLOSED_SESSIONS, LoadOptions, build
from kvforge.protocol.errors import InvalidRequest

POISSON = LoadOptions(
    arrivals="poisson:5", requests=40, input="10:99", output="2:8", prefix=4, tenant="a:0.7,b:0.3", seed=3
)


def test_another_process_builds_the_same_load_from_json() -> None:
    program = (
        "import json,sys; from kvforge.loadtest.load.build import *; "
        "load = build(LoadOptions(**json.loads(sys.argv[1])));"
        "s = load.session(7); print(load.arrivals[7], s.tenant, s.turns[0].output_tokens, s.turns[0].tokens.tolist())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, json.dumps(dataclasses.asdict(POISSON))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    load = build(POISSON)
    session = load.session(7)
    assert load.arrivals is not None and len(load) == load.requests == len(load.arrivals) == 40
    (turn,) = session.turns
    assert told.strip() == f"{load.arrivals[7]} {session.tenant} {turn.output_tokens} {turn.tokens.tolist()}"


def test_prompts_have_their_lengths_their_prefix_and_nothing_else_in_common() -> None:
    load = build(dataclasses.replace(POISSON, requests=400, vocab=1000))
    tokens = [load.session(index).turns[0].tokens for index in range(400)]
    assert {10, 99} <= {len(prompt) for prompt in tokens} <= set(range(10, 100))
    assert len({tuple(prompt[:4]) for prompt in tokens}) == 1 and len({tuple(prompt[4:]) for prompt in tokens}) == 400
    drawn = np.concatenate([prompt[4:] for prompt in tokens])
    assert drawn.dtype == np.int32 and drawn.min() == 0 and drawn.max() == 999
    assert drawn.mean() == pytest.approx(499.5, rel=0.02)
    tenants = [load.session(index).tenant for index in range(400)]
    assert set(tenants) == {"a", "b"} and tenants.count("a") == pytest.approx(280, abs=40)


def test_scales_and_the_context() -> None:
    plain, half = build(POISSON), build(dataclasses.replace(POISSON, rate_scale=2.0, length_scale=0.5))
    assert plain.arrivals is not None and half.arrivals is not None
    assert np.allclose(half.arrivals * 2, plain.arrivals)
    for index in range(40):
        assert len(half.session(index).turns[0].tokens) == (len(plain.session(index).turns[0].tokens) + 1) // 2
    small = build(dataclasses.replace(POISSON, context_max=50))
    turns = [small.session(index).turns[0] for index in range(40)]
    assert max(len(turn.tokens) + turn.output_tokens for turn in turns) == 50
    uncut = [plain.session(index).turns[0] for index in range(40)]
    assert small.shortened == sum(len(turn.tokens) + turn.output_tokens > 50 for turn in uncut) > 0
    assert plain.shortened == 0
    faster = build(LoadOptions(arrivals="fixed:10", duration_s=2, rate_scale=3.0))
    assert faster.arrivals is not None and len(faster) == 60 and faster.arrivals[-1] < 2


def test_a_closed_loop_begins_again_with_fresh_tokens() -> None:
    load = build(LoadOptions(closed=4, input="50:90"))
    assert load.arrivals is None and len(load) == CLOSED_SESSIONS
    first, again = load.session(1).turns[0], load.session(1 + CLOSED_SESSIONS).turns[0]
    assert len(first.tokens) == len(again.tokens) and not np.array_equal(first.tokens, again.tokens)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("arrivals", {"arrivals": ""}),
        ("arrivals", {"arrivals": "often"}),
        ("closed", {"closed": 3}),
        ("requests", {"requests": 0}),
        ("duration", {"duration_s": float("inf")}),
        ("rate-scale", {"rate_scale": 0.0}),
        ("length-scale", {"length_scale": -1.0}),
        ("input", {"input": "short"}),
        ("output", {"output": "0"}),
        ("prefix", {"prefix": -1}),
        ("vocab", {"vocab": 0}),
        ("seed", {"seed": -1}),
        ("tenant", {"tenant": "a:0"}),
        ("tenant", {"tenant": "a,a"}),
        ("tenant", {"tenant": "a:1,"}),
        ("context-max", {"context_max": 1}),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build(dataclasses.replace(POISSON, **changed))
    assert refused.value.field == field
