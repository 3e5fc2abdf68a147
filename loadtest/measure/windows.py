"""Confidence intervals: the same measurements in successive windows of the run, and the error of their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .group import goodput, latencies, throughput
from .objective import Objective
from .outcome_columns import OutcomeColumns
from .span import Span

CONFIDENCE = 0.95
# Student's t: half the width of a 95 % interval in standard errors, for 1 to 30 degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
SUMMARIES = ("mean", "p50", "p99")
TIMES = ("ttft", "itl", "e2e")


def student95(degrees: int) -> float:
    """Return Student's t for a two-sided 95 % interval; beyond the table, an expansion around the normal one."""
    assert degrees >= 1
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.4 / degrees


def interval(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return {mean, half, values} of a 95 % confidence interval, mean ± half; None with fewer than two values.

    Windows without a value are skipped. Neighbouring windows are assumed independent. A steadily growing queue violates
    that: `half` is then too small, as the values show.
    """
    there = [value for value in values if value is not None]
    if len(there) < 2:
        return None
    half = student95(len(there) - 1) * float(np.std(there, ddof=1)) / math.sqrt(len(there))
    return {"mean": float(np.mean(there)), "half": half, "values": list(values)}


def windows(requests: OutcomeColumns, span: Span, count: int, objective: Objective) -> dict[str, Any]:
    """Return intervals over `count` windows: mean, p50 and p99 of each latency, and rates.

    A latency belongs to the window in which its request was due.
    """
    found: dict[str, list[float | None]] = {}

    def note(name: str, value: float | None) -> None:
        found.setdefault(name, []).append(value)

    for window in span.windows(count) if span.seconds else []:
        due = requests.due_within(window)
        times = latencies(due)
        for time in TIMES:
            summary = times[time].summary_ms() or {}
            for name in SUMMARIES:
                note(f"{time}_{name}_ms", summary.get(name))
        for name, value in throughput(requests, window).items():
            note(name, value)
        note("goodput_per_s", goodput(due, window, objective)["requests_per_s"])
    return {
        "count": count,
        "seconds": span.seconds / count,
        "confidence": CONFIDENCE,
        "intervals": {name: interval(values) for name, values in found.items()},
    }
