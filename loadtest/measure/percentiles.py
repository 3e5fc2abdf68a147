"""Percentiles by the package `hdrhistogram`, with buckets of 0.1 % width."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvforge.process.installation import install_command
from kvforge.protocol.errors import Unavailable

from ..load.workload import FloatArray

LOWEST_US = 1
HIGHEST_US = 86_400_000_000  # a day, the limit of any request
DIGITS = 3
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
CURVE_POINTS_MAX = 200

Summary = dict[str, float | int]


@dataclass(frozen=True)
class Distribution:
    """A distribution of [n] seconds. Negative values, from clock skew, count as 0."""

    seconds: FloatArray

    @cached_property
    def _histogram(self) -> tuple[Any, list[int], npt.NDArray[np.int64]]:
        """The histogram, a value of each used bucket, ascending, and the count of values up to each bucket's end."""
        try:
            from hdrh.histogram import HdrHistogram
        except ImportError as error:
            problem = f"percentiles need the extra `loadtest` ({error}): {install_command('loadtest')}"
            raise Unavailable(problem) from error
        histogram = HdrHistogram(LOWEST_US, HIGHEST_US, DIGITS)
        micros = np.clip(np.rint(self.seconds * 1e6), 0, HIGHEST_US).astype(np.int64)
        # Record each bucket once with its count: a run has millions of tokens, a histogram thousands of buckets.
        bits = histogram.sub_bucket_count.bit_length() - 1
        below = np.maximum(np.frexp(micros)[1] - bits, 0)
        values, counts = np.unique((micros >> below) << below, return_counts=True)
        used = values.tolist()
        for value, count in zip(used, counts.tolist(), strict=True):
            histogram.record_value(value, count)
        return histogram, used, np.cumsum(counts)

    def percentiles_ms(self, *percents: float) -> list[float | None]:
        """Return percentiles in ms: the upper end of the bucket, at most the maximum; None if empty."""
        if not self.seconds.size:
            return [None] * len(percents)
        histogram, used, upto = self._histogram
        highest_ms = max(0.0, float(self.seconds.max())) * 1e3
        # The package's own search walks over all buckets in Python, most without a value.
        wanted = np.array([histogram.get_target_count_at_percentile(percent) for percent in percents])
        ends = [histogram.get_highest_equivalent_value(used[at]) for at in np.searchsorted(upto, wanted).tolist()]
        return [min(end / 1e3, highest_ms) for end in ends]

    def summary_ms(self) -> Summary | None:
        """Return count, mean, p50, p90, p95, p99, p99.9 and max in ms; None if empty. Mean and max are exact."""
        if not self.seconds.size:
            return None
        found: Summary = {"count": int(self.seconds.size), "mean": float(self.seconds.mean()) * 1e3}
        for percent, value in zip(PERCENTILES, self.percentiles_ms(*PERCENTILES), strict=True):
            assert value is not None
            found[name(percent)] = value
        found["max"] = float(self.seconds.max()) * 1e3
        return found

    def curve_ms(self) -> list[tuple[float, float]]:
        """Return (ms, share at or below), ascending, at most CURVE_POINTS_MAX points, denser in the tail."""
        if not self.seconds.size:
            return []
        # Half of the points are below the median, the others approach a share of 1 geometrically.
        tail = 1 - np.geomspace(0.5, 1 / max(2, self.seconds.size), CURVE_POINTS_MAX // 2)
        shares = np.unique(np.round(np.concatenate((np.linspace(0.005, 0.5, CURVE_POINTS_MAX // 2), tail)), 6)).tolist()
        values = self.percentiles_ms(*(100 * share for share in shares))
        return [(value, share) for value, share in zip(values, shares, strict=True) if value is not None]


def name(percent: float) -> str:
    """Return the name of a percentile: p50, p99.9."""
    return f"p{percent:g}"


def stated() -> dict[str, str | int]:
    """Describe how percentiles are computed, for the document."""
    return {"package": "hdrhistogram", "lowest_us": LOWEST_US, "highest_us": HIGHEST_US, "digits": DIGITS}
