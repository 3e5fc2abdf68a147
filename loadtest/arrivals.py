"""When requests arrive: decided before the first one is sent, so that nothing the server does can move them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import InvalidRequest

FloatArray = npt.NDArray[np.float64]
PATTERNS = ("poisson", "fixed")
REQUESTS_MAX = 1_000_000
# Keeps the draws of one seed apart from those of the prompts.
STREAM = 0


def arrival_times(
    rate_per_s: float,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    pattern: str = "poisson",
    burst: int = 1,
) -> FloatArray:
    """Seconds from the start of the run, [n] float64, rising; n <= REQUESTS_MAX.

    At most `count` arrivals, none at or after `duration_s`; at least one of the two is given. `poisson`: independent
    exponential gaps; `fixed`: equal gaps. burst: so many arrive together, at the same average rate. The arrivals of a
    seed do not depend on how many are asked for. Raises InvalidRequest naming the argument.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise InvalidRequest("rate", f"is {rate_per_s:g}; it must be above 0 requests a second")
    if pattern not in PATTERNS:
        raise InvalidRequest("arrivals", f"is {pattern!r}; it must be one of {', '.join(PATTERNS)}")
    if burst < 1:
        raise InvalidRequest("burst", f"is {burst}; it must be at least 1")
    if count is None and duration_s is None:
        raise InvalidRequest("requests", "give a number of requests, a duration, or both")
    if count is not None and not 1 <= count <= REQUESTS_MAX:
        raise InvalidRequest("requests", f"is {count}; it must be 1 to {REQUESTS_MAX}")
    drawn = count if count is not None else _enough(rate_per_s, duration_s or 0.0, burst)
    groups = -(-drawn // burst)
    mean_gap_s = burst / rate_per_s
    starts: FloatArray = np.arange(groups, dtype=np.float64) * mean_gap_s
    if pattern == "poisson":
        starts = np.cumsum(np.random.default_rng((seed, STREAM)).exponential(mean_gap_s, groups))
    times: FloatArray = np.repeat(starts, burst)[:drawn]
    if duration_s is None:
        return times
    times = times[times < duration_s]
    if times.size > REQUESTS_MAX or (count is None and drawn > REQUESTS_MAX):
        raise InvalidRequest("duration", f"at this rate is more than {REQUESTS_MAX} requests")
    if not times.size:
        raise InvalidRequest("duration", f"of {duration_s:g} s ends before the first arrival")
    return times


def _enough(rate_per_s: float, duration_s: float, burst: int) -> int:
    """More arrivals than any draw puts into the duration: ten standard deviations above the mean."""
    groups = rate_per_s * duration_s / burst
    return min(int(burst * (groups + 10 * math.sqrt(groups) + 10)), 2 * REQUESTS_MAX)
