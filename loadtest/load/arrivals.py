"""Arrival times of sessions. All are drawn before the first is sent, so the server cannot influence them."""

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
    """An arrival process.

    Attributes:
        kind: fixed (equal gaps), poisson (independent exponential gaps), gamma or weibull (gaps of that distribution),
            or burst (groups that arrive together, as a Poisson process).
        rate: The average rate per second.
        cv: The coefficient of variation of the gaps, for gamma and weibull; 1 is exponential, more is bursty.
        burst: The size of a group.
    """

    kind: str
    rate: float
    cv: float = 1.0
    burst: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InvalidRequest("arrivals", f"invalid rate {self.rate:g} (must be above 0)")
        if not CV_MIN <= self.cv <= CV_MAX:
            raise InvalidRequest("arrivals", f"invalid CV {self.cv:g} (must be {CV_MIN:g} to {CV_MAX:g})")
        if not 1 <= self.burst <= REQUESTS_MAX:
            raise InvalidRequest("arrivals", f"invalid burst size {self.burst} (must be 1 to {REQUESTS_MAX})")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse one of FORMS. Raises InvalidRequest."""
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
        raise InvalidRequest("arrivals", f"invalid arrivals {text!r} (expected {FORMS}, with R in sessions per second)")

    def times(self, count: int | None = None, duration_s: float | None = None, *, seed: int) -> FloatArray:
        """Draw the arrivals. A longer run of the same seed begins with the same arrivals.

        Args:
            count: The maximum number of arrivals. At least one of count and duration_s is required.
            duration_s: No arrival at or after it.
            seed: The seed.

        Returns:
            Seconds from the start of the run, [n] float64, ascending; 1 <= n <= REQUESTS_MAX.

        Raises:
            InvalidRequest: There would be no arrivals, or too many.
        """
        if count is None and duration_s is None:
            raise InvalidRequest("requests", "is missing: give --requests, --duration or both")
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
            if self.kind == "fixed":  # products do not accumulate rounding errors, sums would
                chunks.append(np.arange(drawn, drawn + _CHUNK) / self.rate)
            else:  # whole chunks, so that a longer run starts with the same sums
                chunks.append(last_s + np.cumsum(self.gaps(rng, _CHUNK)))
            drawn, last_s = drawn + _CHUNK, float(chunks[-1][-1])
        times: FloatArray = np.repeat(np.concatenate(chunks)[:groups_wanted], self.burst)[:wanted]
        times = times[times < end_s]
        if times.size > REQUESTS_MAX:
            raise InvalidRequest("duration", f"of {end_s:g} s at this rate exceeds {REQUESTS_MAX} requests")
        if not times.size:
            raise InvalidRequest("duration", f"of {end_s:g} s ends before the first arrival")
        return times

    def gaps(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draw the seconds between arrivals (of groups), [count] float64."""
        mean_s = self.burst / self.rate
        if self.kind == "gamma":
            return rng.gamma(self.cv**-2, mean_s * self.cv**2, count)
        if self.kind == "weibull":
            shape = weibull_shape(self.cv)
            return rng.weibull(shape, count) * (mean_s / math.gamma(1 + 1 / shape))
        return rng.exponential(mean_s, count)


def weibull_shape(cv: float) -> float:
    """Return the shape (0.05 to 2000) of the Weibull distribution with this coefficient of variation."""
    low, high = 0.05, 2000.0
    for _ in range(60):
        shape = math.sqrt(low * high)
        # cv² + 1 = Γ(1 + 2/k) / Γ(1 + 1/k)², which decreases in k.
        log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
        low, high = (shape, high) if log_ratio > math.log1p(cv * cv) else (low, shape)
    return math.sqrt(low * high)
