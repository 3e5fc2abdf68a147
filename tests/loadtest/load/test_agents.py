"""Sessions of an agent: turns that contain the real answer, think times, subagents, and broken traces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.loadtest.load.agents import common
from kvforge.loadtest.load.build import LoadOptions, build
from kvforge.loadtest.load.infinite import InfiniteCache
from kvforge.loadtest.load.workload import Session, prompts
from kvforge.protocol.errors import InvalidRequest


def _request(t: float, tokens: int, out: int, runs: list[list[int]], think_time: float = 0.0) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_runs": runs, "think_time": think_time}


SESSION = {
    "id": "one",
    "block_size": 64,
    "requests": [
        _request(0, 150, 20, [[1, 2]]),
        _request(9, 300, 30, [[1, 4]], 5.0),
        {"t": 12.0, "type": "subagent", "requests": [_request(t, 130, 8, [[1, 1], [90, 1]]) for t in (0, 3)]},
        _request(20, 290, 40, [[1, 3], [50, 1]], 7.0),
        _request(30, 300, 10, [[1, 3], [50, 1]], 8.0),
    ],
}  # fmt: skip


def _file(folder: Path, *sessions: dict[str, Any]) -> str:
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return str(path)


def _prompts(session: Session, shorter: int = 0) -> list[np.ndarray]:
    """Return the prompts with answers that are in no trace."""
    return prompts(
        session,
        [np.full(max(0, turn.output_tokens - shorter), -turn.output_tokens, np.int32) for turn in session.turns],
    )


def test_a_turn_keeps_the_prompt_and_the_answer_before_and_adds_what_is_new(tmp_path: Path) -> None:
    load = build(LoadOptions(trace=_file(tmp_path, SESSION), closed=1))
    assert (len(load), load.requests) == (2, 6)
    main = load.session(0)
    assert main.kind == "agent" and [turn.think_s for turn in main.turns] == [0, 5, 7, 8]
    first, second, third, fourth = _prompts(main)
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [150, 300, 290, 300]
    assert np.array_equal(second[:150], first) and (second[150:170] == -20).all()
    # The third prompt has a new fourth block: the agent changed its earlier output.
    assert [turn.kept for turn in main.turns] == [0, 170, 192, 299]
    assert np.array_equal(third[:192], second[:192]) and (third[192:256] != second[192:256]).mean() > 0.99
    # An answer longer than its place in the next prompt is cut to the trace's length.
    assert np.array_equal(fourth[:290], third) and (fourth[290:299] == -40).all()
    assert len(_prompts(main, shorter=15)[1]) == 285


def test_a_subagent_is_a_session_that_starts_when_it_did_and_shares_blocks(tmp_path: Path) -> None:
    path = _file(tmp_path, SESSION, SESSION | {"requests": [_request(0, 150, 20, [[1, 2]])]})
    load = build(LoadOptions(trace=path, arrivals="fixed:0.125", requests=4))
    assert load.arrivals is not None and load.arrivals.tolist() == [0, 8, 12, 16]
    assert [load.session(index).kind for index in range(4)] == ["agent", "agent", "subagent", "agent"]
    main, other, sub, again = (_prompts(load.session(index)) for index in range(4))
    assert np.array_equal(sub[0][:64], main[0][:64]) and not np.array_equal(sub[0][64:128], main[0][64:128])
    # The same ids in another session, or in a repetition of the session, are other tokens.
    assert (other[0][:64] != main[0][:64]).mean() > 0.9 and (again[0] != main[0]).mean() > 0.9
    slower = build(LoadOptions(trace=path, arrivals="fixed:0.125", requests=1, think_scale=0.1, duration_s=5))
    assert [turn.think_s for turn in slower.session(0).turns] == pytest.approx([0, 0.5, 0.7, 0.8])
    assert len(slower) == 1


@pytest.mark.parametrize("scale", [0.3, 0.02])
def test_scaled_sessions_keep_their_share_and_fit(tmp_path: Path, scale: float) -> None:
    load = build(LoadOptions(trace=_file(tmp_path, SESSION), closed=1, length_scale=scale, context_max=30))
    made = _prompts(load.session(0))
    assert [len(prompt) for prompt in made] == [min(30 - turn.output_tokens, max(1, int(n * scale + 0.5)))
        for n, turn in zip((150, 300, 290, 300), load.session(0).turns, strict=True)]  # fmt: skip
    assert load.shortened == {0.3: 6, 0.02: 0}[scale]


def test_the_sample_has_the_hits_that_its_ids_tell() -> None:
    # Lengths are scaled so that each block of 64 tokens is one token.
    load = build(LoadOptions(trace="claude-code", closed=1, length_scale=1 / 64, vocab=1 << 30))
    cache, hit, total = InfiniteCache(1), 0, 0
    for index in range(len(load)):
        made = _prompts(load.session(index))
        total += sum(map(len, made))
        hit += sum(int(np.argmin(np.append(a[: len(b)] == b[: len(a)], False))) for a, b in pairwise(made))
        for prompt in made:
            cache.look_up(prompt)
    assert cache.prompt_tokens == total
    # Most hits are on the previous turn; the bound includes earlier turns too.
    assert hit / total <= cache.share == pytest.approx(hit / total, abs=0.01)
    assert cache.share > 0.9


def test_common_runs() -> None:
    assert common([(1, 5)], [(1, 5)]) == 5
    assert common([(1, 3), (9, 4)], [(1, 3), (9, 2), (20, 1)]) == 5
    assert common([(1, 5)], [(1, 2), (3, 2), (7, 1)]) == 4
    assert common([], [(1, 2)]) == 0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"requests": [_request(0, 150, 20, [[1, 3]])]}, "3 blocks of 64 do not match 150 tokens"),
        ({"requests": [_request(0, 0, 20, [])]}, "no prompt"),
        ({"requests": [_request(0, 64, -1, [[1, 1]])]}, r"requests\[0\].out"),
        ({"requests": "none"}, "Expected `array`"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        build(LoadOptions(trace=f"claude-code:{_file(tmp_path, SESSION, SESSION | changed)}"))
    assert refused.value.field == "trace" and "sessions.jsonl, line 2:" in str(refused.value)
