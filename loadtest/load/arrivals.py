"""When sessions arrive: decided before the first one is sent, so that nothing the server does can move them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvforge.protocol.errors import InvalidRequest

from .draws import ARRIVALS, FloatArray

REQUESTS_MAX = 1_000_000
FORMS = "poisson:R, fixed:R, gamma:R,CV, weibull:R,CV, burst:R,N"
CV_MIN, CV_MAX = 0.001, 1000.0
_CHUNK = 4096


@dataclass(frozen=True)
class Arrivals:
    """A process of arrivals. rate: on average, a second.

    fixed: equal gaps. poisson: independent exponential gaps. gamma, weibull: gaps of that distribution whose standard
    deviation is `cv` times their mean (1: exponential; above: bursts). burst: so many arrive together, poisson, at the
    same average rate.
    """

    kind: str
    rate: float
    cv: float = 1.0
    burst: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InvalidRequest("arrivals", f"{self.rate:g} a second: the rate must be above 0")
        if not CV_MIN <= self.cv <= CV_MAX:
            raise InvalidRequest("arrivals", f"gaps that vary by {self.cv:g}: give CV from {CV_MIN:g} to {CV_MAX:g}")
        if not 1 <= self.burst <= REQUESTS_MAX:
            raise InvalidRequest("arrivals", f"bursts of {self.burst}: give 1 to {REQUESTS_MAX}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From one of FORMS. Raises InvalidRequest."""
        kind, _, numbers = text.partition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
            if kind in ("poisson", "fixed") and len(values) == 1:
                return cls(kind, values[0])
            if kind in ("gamma", "weibull") and len(values) == 2:
                return cls(kind, values[0], cv=values[1])
            if kind == "burst" and len(values) == 2 and values[1].is_integer():
                return cls(kind, values[0], burst=int(values[1]))
        except ValueError:
            pass
        raise InvalidRequest("arrivals", f"{text!r} is none of {FORMS} (R: sessions a second)")

    def times(self, count: int | None = None, duration_s: float | None = None, *, seed: int) -> FloatArray:
        """Seconds from the start of the run, [n] float64, rising; 1 <= n <= REQUESTS_MAX.

        At most `count` arrivals, none at or after `duration_s`; at least one of the two is given. The arrivals of a
        seed do not depend on how many are asked for. Raises InvalidRequest.
        """
        if count is None and duration_s is None:
            raise InvalidRequest("requests", "give a number of requests, a duration, or both")
        wanted = REQUESTS_MAX + 1 if count is None else count
        end_s = math.inf if duration_s is None else duration_s
        if count is not None and not 1 <= count <= REQUESTS_MAX:
            raise InvalidRequest("requests", f"is {count}; it must be 1 to {REQUESTS_MAX}")
        if not end_s > 0:
            raise InvalidRequest("duration", f"is {end_s:g}; it must be above 0 seconds")
        groups_wanted = -(-wanted // self.burst)
        rng = np.random.default_rng((seed, ARRIVALS))
        chunks: list[FloatArray] = []
        drawn, last_s = 0, 0.0
        while drawn < groups_wanted and last_s < end_s:
            if self.kind == "fixed":  # products, where sums of gaps would drift
                chunks.append(np.arange(drawn, drawn + _CHUNK) / self.rate)
            else:  # whole chunks, so that a longer run begins with the same sums
                chunks.append(last_s + np.cumsum(self.gaps(rng, _CHUNK)))
            drawn, last_s = drawn + _CHUNK, float(chunks[-1][-1])
        times: FloatArray = np.repeat(np.concatenate(chunks)[:groups_wanted], self.burst)[:wanted]
        times = times[times < end_s]
        if times.size > REQUESTS_MAX:
            raise InvalidRequest("duration", f"of {end_s:g} s at this rate is more than {REQUESTS_MAX} requests")
        if not times.size:
            raise InvalidRequest("duration", f"of {end_s:g} s ends before the first arrival")
        return times

    def gaps(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Seconds between arrivals (of bursts), [count] float64."""
        mean_s = self.burst / self.rate
        if self.kind == "gamma":
            return rng.gamma(self.cv**-2, mean_s * self.cv**2, count)
        if self.kind == "weibull":
            shape = weibull_shape(self.cv)
            return rng.weibull(shape, count) * (mean_s / math.gamma(1 + 1 / shape))
        return rng.exponential(mean_s, count)


def weibull_shape(cv: float) -> float:
    """The shape (0.05 to 2000) of the Weibull distribution whose coefficient of variation this is."""
    low, high = 0.05, 2000.0
    for _ in range(60):
        shape = math.sqrt(low * high)
        # cv² + 1 = Γ(1 + 2/k) / Γ(1 + 1/k)², which falls as k rises.
        log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
        low, high = (shape, high) if log_ratio > math.log1p(cv * cv) else (low, shape)
    return math.sqrt(low * high)
