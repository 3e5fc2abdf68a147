"""Tables of step times: the shipped tables match the measurements, and errors in a user's table are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.loadtest.fleet.step_times import TABLES, load, names
from kvforge.protocol.errors import InvalidRequest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def _rows(count: int, starts: int, counts: int) -> tuple[Any, Any]:
    return np.full(count, starts, np.int32), np.full(count, counts, np.int32)


def test_the_measured_table_gives_the_steps_that_were_measured() -> None:
    table, found = load("h200-8b"), json.loads((RESULTS / "gpu_step.json").read_text())["results"]
    assert table.source == "measured"
    for batch, measured in found["runner"]["batches"].items():
        seconds = table.step_s(*_rows(int(batch), round(measured["context"]) - 1, 1))
        assert seconds == pytest.approx(measured["ms"] / 1e3, rel=0.01)
    # 256 prompts of 952 tokens in steps of 8,192: the client's wait, beside decodes of the first ones.
    prompts = sum((table.step_s(*_rows(8, 0, 952)) for _ in range(256 // 8)), 0.0)
    assert prompts == pytest.approx(found["served"]["256"]["until_all_decode_s"], rel=0.05)


def test_a_step_of_both_kinds_reads_the_weights_once() -> None:
    table = load("h200-8b")
    decodes, prompts = _rows(64, 1000, 1), _rows(2, 512, 1024)
    both = table.step_s(np.concatenate((decodes[0], prompts[0])), np.concatenate((decodes[1], prompts[1])))
    alone = table.step_s(*decodes), table.step_s(*prompts)
    assert max(alone) < both < sum(alone)
    pairs = 2 * (1024 * 512 + 1024 * 1025 // 2)
    assert both == pytest.approx(table.seconds(64 + 2048, 64 * 1001, pairs))


def test_between_and_beyond_the_measured_passes_time_is_a_line() -> None:
    table = load("h200-8b")
    low, high, last = (table.seconds(n) for n in (16, 64, 8192))
    assert table.seconds(40) == pytest.approx((low + high) / 2)
    assert table.seconds(1) < low < high
    assert table.seconds(2 * 8192 - 256) == pytest.approx(2 * last - table.seconds(256))
    assert table.seconds(0) == 0.0


def test_every_table_that_ships_has_room_for_a_context_and_says_where_it_is_from() -> None:
    assert names() == ["h200-70b", "h200-8b"]
    for name in names():
        table = load(name)
        assert table.name == name and len(table.origin) > 100
        assert table.blocks(16) * 16 > table.context_tokens_max
    assert load("h200-70b").source == "modelled"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pass_ms": [1.0]}, "pass_ms has 1 items, but tokens has 5"),
        ({"tokens": [1, 16, 16, 256, 8192]}, "tokens must be ascending"),
        ({"pass_ms": [5, 4, 4, 7, 9]}, "pass_ms must not decrease"),
        ({"source": "guessed"}, "source must be one of"),
        ({"context_ns": -1.0}, r"\$.context_ns"),
        ({"pair_ns": float("inf")}, r"\$.pair_ns"),
        ({"pass_ms": [1, 2, 3, 4, float("inf")]}, r"\$.pass_ms"),
        ({"kv_bytes": 3}, "unknown field `kv_bytes`"),
        ({"weight_bytes": 140_000_000_000}, "weight_bytes leaves no room"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps(json.loads((TABLES / "h200-8b.json").read_text()) | changes))
    with pytest.raises(InvalidRequest, match=f"--no-model: .*{words}"):
        load(str(file))


def test_a_name_that_is_nowhere_gets_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="h200-70b, h200-8b"):
        load("h100-8b")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InvalidRequest, match="not a table of step times"):
        load(str(tmp_path / "broken.json"))
