"""Requests drawn from ServeGen's profiles match the clients' rate, burstiness, lengths and classes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvforge.loadtest.load.build import LoadOptions, build
from kvforge.protocol.errors import InvalidRequest

RATES = """chunk,timestamp_s,rate_rps,cv,dist,arg1,arg2
0,600,2,0.5,Gamma,1,1
0,1200,0,0,,0,0
1,600,1,4,Weibull,1,1
1,1200,3,1,Gamma,1,1
"""
LENGTHS = """{"chunk":0,"windows":{"0":{"input_tokens":"{10: 0.5, 30: 0.5}","output_tokens":"{3: 1.0}"}}}
{"chunk":1,"windows":{"0":{"input_tokens":"{70: 1}","output_tokens":"{4: 1}"},"1200":LATER}}
""".replace("LATER", '{"input_tokens":"{90: 1}","output_tokens":"{5: 1}"}')


def _file(folder: Path, rates: str = RATES, lengths: str = LENGTHS) -> str:
    (folder / "own_rates.csv").write_text(rates)
    if lengths:
        (folder / "own_lengths.jsonl").write_text(lengths)
    return str(folder / "own_rates.csv")


def test_each_client_has_its_rate_burstiness_and_lengths_in_each_window(tmp_path: Path) -> None:
    load = build(LoadOptions(trace=_file(tmp_path), duration_s=1200))
    assert load.arrivals is not None
    sessions = [load.session(index) for index in range(len(load))]
    kinds = np.array([session.kind for session in sessions])
    of_client = {kind: load.arrivals[kinds == kind] for kind in ("client-0", "client-1")}
    assert of_client["client-0"].size == 1200 and of_client["client-0"].max() < 600
    assert Counter((of_client["client-1"] // 600).tolist()) == {0: 600, 1: 1800}
    gaps = np.diff(of_client["client-0"])
    assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.1)
    bursts = np.diff(of_client["client-1"][:600])
    assert bursts.std() / bursts.mean() > 2
    lengths = {
        (session.kind, at_s >= 600, len(session.turns[0].tokens), session.turns[0].output_tokens)
        for session, at_s in zip(sessions, load.arrivals, strict=True)
    }
    assert lengths == {
        ("client-0", False, 10, 3),
        ("client-0", False, 30, 3),
        ("client-1", False, 70, 4),
        ("client-1", True, 90, 5),
    }


def test_fewer_of_them_are_the_first(tmp_path: Path) -> None:
    path = _file(tmp_path)
    whole, half = build(LoadOptions(trace=path, duration_s=900)), build(LoadOptions(trace=path, requests=500))
    assert whole.arrivals is not None and half.arrivals is not None
    assert np.array_equal(half.arrivals, whole.arrivals[:500])
    fast = build(LoadOptions(trace=path, duration_s=100, rate_scale=9.0))
    assert fast.arrivals is not None and np.allclose(fast.arrivals * 9, whole.arrivals)


def test_rates_without_lengths_take_those_of_the_options(tmp_path: Path) -> None:
    load = build(LoadOptions(trace=_file(tmp_path, lengths=""), requests=9, input="11", output="2"))
    assert {(len(load.session(index).turns[0].tokens)) for index in range(9)} == {11}
    assert len(build(LoadOptions(trace=_file(tmp_path), closed=3, requests=7))) == 7


@pytest.mark.parametrize(
    ("rates", "lengths", "problem"),
    [
        (RATES + "1,1800,3,1,Pareto,1,1\n", LENGTHS, "own_rates.csv, line 6: .*Gamma, Weibull"),
        (RATES + "1,1800,-3,1,Gamma,1,1\n", LENGTHS, "own_rates.csv, line 6: .*above 0"),
        (RATES + "1,1800\n", LENGTHS, "own_rates.csv, line 6: "),
        (RATES.splitlines()[0] + "\n", LENGTHS, "no window with traffic"),
        (RATES, LENGTHS.replace("{70: 1}", "{70: -1}"), "own_lengths.jsonl, line 2: .*70: -1"),
        (RATES, LENGTHS.splitlines()[0] + "\n", "no lengths of client 1"),
        (RATES, "[]\n", "own_lengths.jsonl, line 1: "),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, rates: str, lengths: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        build(LoadOptions(trace=_file(tmp_path, rates, lengths), duration_s=1200))
    assert refused.value.field == "trace"
