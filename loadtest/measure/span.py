"""The measured part of a run: from the end of the warm-up to the last arrival, without the drain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..drive.outcome import Outcome
from ..load.workload import FloatArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the start of the run. Its end is included if it is closed."""

    start_s: float
    end_s: float
    closed: bool = True

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return max(0.0, self.end_s - self.start_s)

    def windows(self, count: int) -> list[Span]:
        """Split the span into `count` parts of equal length."""
        edges = np.linspace(self.start_s, self.end_s, count + 1).tolist()
        parts = [Span(low, high, closed=False) for low, high in pairwise(edges)]
        return [*parts[:-1], replace(parts[-1], closed=self.closed)]

    def holds(self, times_s: FloatArray) -> BoolArray:
        """Return which times lie in it, [times] bool; NaN does not."""
        return (times_s >= self.start_s) & ((times_s <= self.end_s) if self.closed else (times_s < self.end_s))


def measured_span(outcomes: Sequence[Outcome], warmup_s: float, wall_s: float) -> Span:
    """Return the span from the warm-up to the last arrival, or to the end of an interrupted run.

    If all requests were due at the same instant, the span extends to the end of the run. If the warm-up outlasts the
    arrivals, the end is before the start.
    """
    due_s = [outcome.due_s for outcome in outcomes if outcome.due_s <= wall_s]
    if not due_s:
        return Span(warmup_s, warmup_s)
    if min(due_s) == max(due_s):
        return Span(warmup_s, wall_s)
    return Span(warmup_s, max(due_s))
