"""Whether the run measured the server or the driver, judged by the driver's own lag."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..drive.outcome import FINISHED, Outcome, RunResult
from ..load.workload import FloatArray
from .percentiles import Distribution
from .span import Span

LAG_MS_MAX = 1.0
LAG_SHARE_MAX = 0.01
CPU_SHARE_MAX = 0.9
LAGS = {
    "ticks": "clock ticks",
    "turns": "handling due requests",
    "null": "the run against the null server",
}


def verdict(measured: RunResult, span: Span, latency_ms: dict[str, Any]) -> dict[str, Any]:
    """Judge a run.

    A run is invalid if the lag at p99 exceeds 1 ms or 1 % of the median end-to-end latency. This applies to each of
    LAGS over the whole run, warm-up included.

    Notes do not make a run invalid. One of these reports a lag above 1 % of the median time to first token, which
    happens with long answers while end-to-end times are right.

    Args:
        measured: The results of the run.
        span: The measured span.
        latency_ms: The latencies of all requests of the span, as in `group`.

    Returns:
        `verdict` of the document: `valid`, `why` (the reasons if invalid), `notes` and the numbers.
    """
    outcomes = measured.outcomes
    median_ms = latency_ms["e2e"]["p50"] if latency_ms["e2e"] else None
    limit_ms = LAG_MS_MAX if median_ms is None else min(LAG_MS_MAX, LAG_SHARE_MAX * median_ms)
    lags = {
        "ticks": _of([driver.late_s for driver in measured.drivers]),
        "turns": Distribution(np.array([o.awake_s - o.due_s for o in outcomes if o.awake_s >= 0], np.float64)),
        "null": _of([measured.null_late_s]),
    }
    lag_ms = {name: lag.summary_ms() for name, lag in lags.items()}
    why = [
        f"the driver was late: {lag['p99']:.2f} ms at p99 in {LAGS[name]} ({_limit(limit_ms, median_ms)})"
        for name, lag in lag_ms.items()
        if lag is not None and lag["p99"] > limit_ms
    ]
    if not any(span.start_s <= outcome.due_s <= span.end_s for outcome in outcomes):
        why.append(f"nothing was measured: no request was due between the end of the warm-up at {span.start_s:g} s and "
                   f"{span.end_s:g} s")  # fmt: skip
    elif lag_ms["ticks"] is None and lag_ms["turns"] is None:
        why.append("the driver's lag is unknown: it sent nothing")
    cpu_share = max((driver.cpu_s / max(driver.wall_s, 1e-9) for driver in measured.drivers), default=0.0)
    return {
        "valid": not why,
        "why": why,
        "notes": [*_notes(measured, lag_ms, latency_ms, cpu_share)],
        "limit_ms": limit_ms,
        "lag_ms": lag_ms,
        "drivers": len(measured.drivers),
        "cpu_share_max": cpu_share,
    }


def _of(parts: Sequence[array[float]]) -> Distribution:
    seconds: FloatArray = np.concatenate([np.zeros(0), *(np.array(part, np.float64) for part in parts)])
    return Distribution(seconds)


def _limit(limit_ms: float, median_ms: float | None) -> str:
    if median_ms is None or limit_ms == LAG_MS_MAX:
        return f"the limit is {LAG_MS_MAX:g} ms"
    return f"the limit is {limit_ms:.2f} ms, 1 % of the median end to end"


def _notes(measured: RunResult, lag_ms: dict[str, Any], latency_ms: dict[str, Any], cpu_share: float) -> Iterable[str]:
    if measured.interrupted:
        yield "the run was interrupted: the result covers the time until then"
    if lag_ms["null"] is None:
        yield "the driver was not tested against a null server before the run"
    first, worst = latency_ms["ttft"], max((lag["p99"] for lag in lag_ms.values() if lag is not None), default=0.0)
    if first and worst > LAG_SHARE_MAX * first["p50"]:
        share = worst / first["p50"]
        yield f"the driver's lag at p99 is {share:.1%} of the median time to first token, which includes it"
    if cpu_share > CPU_SHARE_MAX:
        yield f"a driver process used {cpu_share:.0%} of its core: increase --processes"
    held = _held(measured.outcomes)
    if held:
        yield f"{held} requests waited in the driver because of --concurrency-max; their latencies include the wait"
    unfinished = sum(outcome.state != FINISHED for outcome in measured.outcomes)
    if unfinished:
        planned = len(measured.outcomes)
        yield f"{unfinished} of {planned} requests did not finish: end-to-end times exclude them"
    if measured.before is not None and (measured.after is None or measured.after.boot != measured.before.boot):
        yield "the coordinator's counters are missing: it did not answer, or restarted without its journal"


def _held(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.sent_s - outcome.awake_s > LAG_MS_MAX / 1e3 for outcome in outcomes if outcome.sent_s >= 0)
