"""The run over time, in slices of a round length: throughput, and the latency of requests due in each slice."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..load.workload import FloatArray
from .group import latencies
from .outcome_columns import OutcomeColumns
from .span import Span

SLICES_MAX = 80
LENGTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
TIMES = ("ttft", "itl", "e2e")


def series(requests: OutcomeColumns, wall_s: float) -> dict[str, Any]:
    """Return a value for each slice of the whole run, warm-up and drain included.

    `at_s` is the middle of each slice. offered, finished, input_tokens and output_tokens are per second. TIME_p50_ms
    and TIME_p99_ms are those of the requests due in the slice; None if there are none.
    """
    length_s = next((length for length in LENGTHS_S if wall_s / length <= SLICES_MAX), LENGTHS_S[-1])
    count = min(SLICES_MAX, max(1, int(np.ceil(wall_s / length_s))))
    edges = np.arange(count + 1) * length_s
    prompts = np.array([outcome.prompt_tokens for outcome in requests.outcomes], np.float64)

    def rate(times_s: FloatArray, weights: FloatArray | None = None) -> list[float]:
        there = ~np.isnan(times_s)
        counted = np.histogram(times_s[there], edges, weights=None if weights is None else weights[there])[0]
        return [float(value) for value in counted / length_s]

    found: dict[str, Any] = {
        "slice_s": length_s,
        "at_s": [float(middle) for middle in edges[:-1] + length_s / 2],
        "offered": rate(requests.due_s),
        "finished": rate(requests.ended_s()),
        "input_tokens": rate(requests.first_s + requests.due_s, prompts),
        "output_tokens": rate(requests.all_tokens_s()),
    }
    for start_s in edges[:-1].tolist():
        times = latencies(requests.due_within(Span(start_s, start_s + length_s, closed=False)))
        for name in TIMES:
            p50, p99 = times[name].percentiles_ms(50, 99)
            found.setdefault(f"{name}_p50_ms", []).append(p50)
            found.setdefault(f"{name}_p99_ms", []).append(p99)
    return found
