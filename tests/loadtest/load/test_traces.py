"""Traces of single requests: shipped samples, whole files, their contents and refusals."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from kvforge.loadtest.load.build import LoadOptions, build
from kvforge.loadtest.load.infinite import infinite_share
from kvforge.loadtest.load.recorded import mooncake, spread_ticks
from kvforge.loadtest.load.traces import NAMES, find
from kvforge.loadtest.load.workload import prompts
from kvforge.protocol.errors import InvalidRequest

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:00:00.0000001,374,44\r\n2023-11-16 18:00:02.5,396,1\r\n"
)
MOONCAKE = """{"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 900, "output_length": 5, "hash_ids": [0, 7]}
{"timestamp": 3000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}
"""


def _file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


def _tokens(options: LoadOptions) -> list[np.ndarray]:
    load = build(options)
    return [load.session(index).turns[0].tokens for index in range(len(load))]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_shipped_sample_gives_a_minute_of_load(name: str) -> None:
    load = build(
        LoadOptions(trace=name, duration_s=60, length_scale=0.01, rate_scale=0.1 if "m-small" in name else 1.0)
    )
    assert load.arrivals is not None and 0 < len(load) == len(load.arrivals)
    assert load.arrivals[0] >= 0 and load.arrivals[-1] < 60 and (np.diff(load.arrivals) >= 0).all()
    for index in (0, len(load) - 1):
        session = load.session(index)
        made = prompts(session, [np.zeros(turn.output_tokens, np.int32) for turn in session.turns])
        assert all(len(prompt) and turn.output_tokens for prompt, turn in zip(made, session.turns, strict=True))


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_whole_file_of_azure(tmp_path: Path, name: str) -> None:
    path = _file(tmp_path, name, AZURE)
    for trace in (path, f"azure:{path}"):
        load = build(LoadOptions(trace=trace, rate_scale=0.5, length_scale=0.5))
        assert load.arrivals is not None and load.arrivals.tolist() == pytest.approx([0, 5])
        turns = [load.session(index).turns[0] for index in range(2)]
        assert [(len(turn.tokens), turn.output_tokens) for turn in turns] == [(187, 22), (198, 1)]


def test_a_trace_is_cut_by_requests_and_duration_and_begins_again_under_another_process(tmp_path: Path) -> None:
    path = _file(tmp_path, "trace.csv", AZURE)
    assert len(build(LoadOptions(trace=path, requests=1))) == len(build(LoadOptions(trace=path, duration_s=2))) == 1
    load = build(LoadOptions(trace=path, arrivals="fixed:1", requests=5, context_max=400))
    assert [len(load.session(index).turns[0].tokens) for index in range(5)] == [356, 396, 356, 396, 356]
    assert (load.requests, load.shortened) == (5, 3)
    assert (
        len(build(LoadOptions(trace=path, closed=2))) == 2
        and len(build(LoadOptions(trace=path, closed=2, requests=7))) == 7
    )


def test_the_same_block_id_is_the_same_tokens(tmp_path: Path) -> None:
    path = _file(tmp_path, "trace.jsonl", MOONCAKE)
    first, second, third, fourth = _tokens(LoadOptions(trace=path))
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1300, 1024, 900, 1500]
    assert np.array_equal(first[:1024], second) and np.array_equal(first, fourth[:1300])
    assert np.array_equal(first[:512], third[:512]) and (first[512:900] != third[512:]).mean() > 0.99
    load = build(LoadOptions(trace=path, closed=1, requests=8))
    assert (load.session(4).turns[0].tokens != first).mean() > 0.99


@pytest.mark.parametrize("scale", [0.37, 0.01, 0.001])
def test_shared_prefixes_stay_shared_when_lengths_are_scaled(tmp_path: Path, scale: float) -> None:
    whole = _tokens(LoadOptions(trace=_file(tmp_path, "trace.jsonl", MOONCAKE), length_scale=scale))
    assert [len(prompt) for prompt in whole] == [max(1, int(n * scale + 0.5)) for n in (1300, 1024, 900, 1500)]
    first, second, _, fourth = whole
    assert np.array_equal(first[: len(second)], second) and np.array_equal(first, fourth[: len(first)])


@pytest.mark.parametrize("name", ["mooncake", "mooncake-synthetic"])
def test_hits_of_the_tokens_are_those_of_the_recorded_ids(name: str) -> None:
    made = _tokens(LoadOptions(trace=name, length_scale=1 / 64, vocab=1 << 30))
    seen: set[int] = set()
    hit = total = 0
    with find(name) as trace:
        rows = mooncake(trace.file, trace.lines(), seed=0)
    assert rows.inputs is not None
    for ids, length in zip(rows.blocks, rows.inputs.tolist(), strict=True):
        known = [block in seen for block in ids.tolist()[: length // 512]]
        hit += 512 * (known.index(False) if False in known else len(known))
        total += length
        seen.update(ids.tolist())
    # A block of 512 tokens is one of 8, and the last one, which is partial, is rounded up or down.
    assert infinite_share(made, 8) == pytest.approx(hit / total, abs=0.001) and hit / total > 0.1


def test_arrivals_in_ticks_are_spread_inside_their_tick() -> None:
    ticks = np.repeat([0.0, 3.0, 6.0, 15.0], [40, 30, 50, 60])
    spread = spread_ticks(ticks, seed=1)
    assert (np.diff(spread) >= 0).all() and (spread >= ticks).all() and (spread < ticks + 3).all()
    assert np.diff(spread)[:39].max() < 1
    assert spread_ticks(np.arange(10.0), seed=1).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("name", "text", "line", "problem"),
    [
        ("a.csv", AZURE + "2023-11-16 18:00:03,12\n", 4, "ContextTokens"),
        ("a.csv", AZURE + "yesterday,12,3\n", 4, "yesterday"),
        ("a.csv", AZURE + "2023-11-16 18:00:03,0,3\n", 4, "0 tokens"),
        ("m.jsonl", MOONCAKE + '{"timestamp": 1}\n', 5, "input_length"),
        ("m.jsonl", MOONCAKE + "nothing\n", 5, "malformed"),
        ("m.jsonl", MOONCAKE.replace("[0, 7]", "[0]"), 3, "1 hash_ids"),
        ("m.jsonl", MOONCAKE.replace("3000", "-1"), 3, "timestamp"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, name: str, text: str, line: int, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        build(LoadOptions(trace=_file(tmp_path, name, text)))
    assert refused.value.field == "trace" and f"{name}, line {line}:" in str(refused.value)


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "d.csv.gz"
    damaged.write_bytes(gzip.compress(AZURE.encode())[:-12])
    for trace in (
        "nowhere",
        _file(tmp_path, "empty.csv", ""),
        _file(tmp_path, "other.csv", "a,b,c\n"),
        _file(tmp_path, "header.csv", AZURE.splitlines()[0]),
        str(damaged),
    ):
        with pytest.raises(InvalidRequest) as refused:
            build(LoadOptions(trace=trace))
        assert refused.value.field == "trace"


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("input", {"trace": "conversation", "input": "5"}),
        ("output", {"trace": "mooncake", "output": "5"}),
        ("prompts", {"trace": "mooncake", "prompts": "sonnet"}),
        ("prefix", {"trace": "claude-code", "prefix": 5}),
        ("prompts", {"trace": "conversation", "prompts": "gsm8k"}),
        ("prompts", {"arrivals": "fixed:1", "requests": 1, "prompts": "limericks"}),
        ("prefix", {"arrivals": "fixed:1", "requests": 1, "prompts": "mt-bench", "prefix": 1}),
        ("duration", {"trace": "servegen-mm-image"}),
        ("duration", {"trace": "servegen-m-small", "duration_s": 6000, "rate_scale": 2.0}),
        ("think-scale", {"trace": "claude-code", "think_scale": -1.0}),
    ],
)
def test_options_that_a_trace_decides_are_refused_by_name(field: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build(LoadOptions(**options))  # type: ignore[arg-type]
    assert refused.value.field == field
