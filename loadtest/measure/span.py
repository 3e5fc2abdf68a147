"""Which part of a run is measured: from the end of the warm-up to the last arrival, so that the drain is none of it."""

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
    """Seconds since the start of the run; its end belongs to it only where it is closed."""

    start_s: float
    end_s: float
    closed: bool = True

    @property
    def seconds(self) -> float:
        return max(0.0, self.end_s - self.start_s)

    def windows(self, count: int) -> list[Span]:
        """The span in `count` parts of the same length."""
        edges = np.linspace(self.start_s, self.end_s, count + 1).tolist()
        parts = [Span(low, high, closed=False) for low, high in pairwise(edges)]
        return [*parts[:-1], replace(parts[-1], closed=self.closed)]

    def holds(self, times_s: FloatArray) -> BoolArray:
        """[times] bool: which lie in it; NaN does not."""
        return (times_s >= self.start_s) & ((times_s <= self.end_s) if self.closed else (times_s < self.end_s))


def measured_span(outcomes: Sequence[Outcome], warmup_s: float, wall_s: float) -> Span:
    """From the warm-up to the last moment at which a request was due, or to the end of a run that was broken off.

    Where all were due in one instant there is nothing but a drain, and it reaches to the end of the run. An end before
    the start: the warm-up has outlasted the arrivals.
    """
    due_s = [outcome.due_s for outcome in outcomes if outcome.due_s <= wall_s]
    if not due_s:
        return Span(warmup_s, warmup_s)
    if min(due_s) == max(due_s):
        return Span(warmup_s, wall_s)
    return Span(warmup_s, max(due_s))
