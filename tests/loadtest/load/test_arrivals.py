"""Arrival times depend on the seed only."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.loadtest.load.arrivals import REQUESTS_MAX, Arrivals
from kvforge.protocol.errors import InvalidRequest


@pytest.mark.parametrize("text", ["poisson:20", "gamma:20,2.5", "weibull:20,0.5", "burst:20,3", "fixed:20"])
def test_the_same_seed_gives_the_same_times_however_many_are_asked_for(text: str) -> None:
    process = Arrivals.parse(text)
    many = process.times(10_000, seed=7)
    assert np.array_equal(process.times(10, seed=7), many[:10])
    assert (np.diff(many) >= 0).all() and many.size == 10_000
    within = process.times(duration_s=200, seed=7)
    assert np.array_equal(within, many[many < 200])
    assert text == "fixed:20" or not np.array_equal(process.times(10, seed=8), many[:10])


@pytest.mark.parametrize(
    ("text", "cv"),
    [("poisson:50", 1), ("gamma:50,3", 3), ("weibull:50,2", 2), ("weibull:50,0.4", 0.4), ("weibull:50,0.01", 0.01)],
)
def test_gaps_have_the_mean_and_the_variation_asked_for(text: str, cv: float) -> None:
    gaps = np.diff(Arrivals.parse(text).times(100_000, seed=1))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_fixed_intervals_and_bursts() -> None:
    assert np.allclose(Arrivals.parse("fixed:4").times(3, seed=0), [0, 0.25, 0.5])
    bursts = Arrivals.parse("burst:100,3").times(9_999, seed=2)
    assert bursts[-1] == pytest.approx(100, rel=0.1)
    assert np.unique(bursts).size == 3_333


@pytest.mark.parametrize(
    "text",
    ["poisson", "poisson:x", "poisson:0", "poisson:nan", "gamma:1", "gamma:1,0", "burst:1,0", "burst:1,1.5", "odd:1"],
)
def test_what_is_no_process_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Arrivals.parse(text)
    assert refused.value.field == "arrivals"


@pytest.mark.parametrize(
    ("field", "rate", "count", "duration_s"),
    [
        ("requests", 1, None, None),
        ("requests", 1, 0, None),
        ("requests", 1, REQUESTS_MAX + 1, None),
        ("duration", 1, None, 1e-9),
        ("duration", 1, None, -1),
        ("duration", 1e6, None, 60),
    ],
)
def test_no_arrivals_or_too_many_are_refused(
    field: str, rate: float, count: int | None, duration_s: float | None
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Arrivals("poisson", rate).times(count, duration_s, seed=0)
    assert refused.value.field == field
