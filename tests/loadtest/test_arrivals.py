"""Arrival times follow from the seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.protocol.errors import InvalidRequest
from loadtest.arrivals import REQUESTS_MAX, arrival_times


def test_the_same_seed_gives_the_same_times_however_many_are_asked_for() -> None:
    many = arrival_times(20, count=1000, seed=7)
    assert np.array_equal(arrival_times(20, count=10, seed=7), many[:10])
    assert not np.array_equal(arrival_times(20, count=10, seed=8), many[:10])
    assert (np.diff(many) >= 0).all() and many[0] > 0


def test_poisson_gaps_are_exponential_with_the_rate_asked_for() -> None:
    gaps = np.diff(arrival_times(50, count=20_000, seed=1))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    assert np.mean(gaps > 1 / 50) == pytest.approx(np.exp(-1), abs=0.02)


def test_a_duration_bounds_the_last_arrival() -> None:
    times = arrival_times(100, duration_s=10, seed=3)
    assert times[-1] < 10
    assert times.size == pytest.approx(1000, rel=0.2)
    longer = arrival_times(100, duration_s=20, seed=3)
    assert np.array_equal(longer[longer < 10], times)
    assert arrival_times(100, count=5, duration_s=10, seed=3).size == 5


def test_fixed_intervals_and_bursts() -> None:
    assert np.allclose(arrival_times(4, count=3, pattern="fixed"), [0, 0.25, 0.5])
    assert np.allclose(arrival_times(4, count=5, pattern="fixed", burst=2), [0, 0, 0.5, 0.5, 1.0])
    assert arrival_times(100, count=9_999, burst=3, seed=2)[-1] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("rate", {"rate_per_s": 0, "count": 1}),
        ("rate", {"rate_per_s": float("nan"), "count": 1}),
        ("requests", {"rate_per_s": 1}),
        ("requests", {"rate_per_s": 1, "count": 0}),
        ("requests", {"rate_per_s": 1, "count": REQUESTS_MAX + 1}),
        ("burst", {"rate_per_s": 1, "count": 1, "burst": 0}),
        ("arrivals", {"rate_per_s": 1, "count": 1, "pattern": "odd"}),
        ("duration", {"rate_per_s": 1, "duration_s": 1e-9}),
        ("duration", {"rate_per_s": 1e6, "duration_s": 60}),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        arrival_times(**options)  # type: ignore[arg-type]
    assert refused.value.field == field
