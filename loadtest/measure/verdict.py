"""Whether it was the server that was measured, or the driver: said by the driver's own lag."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..drive.outcome import FINISHED, Measured, Outcome
from ..load.workload import FloatArray
from .percentiles import Distribution
from .span import Span

LAG_MS_MAX = 1.0
LAG_SHARE_MAX = 0.01
CPU_SHARE_MAX = 0.9
LAGS = {
    "ticks": "the ticks of its clock",
    "turns": "its turns to requests that were due",
    "null": "its ticks at the null server before the run",
}


def verdict(measured: Measured, span: Span, latency_ms: dict[str, Any]) -> dict[str, Any]:
    """valid: False where the lag at p99 is above 1 ms, or above 1 % of the median end to end; why: the same in words.

    That is asked of each of LAGS that there is, over the whole run: a driver that is late in the warm-up is no better.
    notes: sentences that a reader must know as well; they do not make a run invalid. One of them: a lag above 1 % of
    the median time to first token, which a run of long answers can have while its end-to-end times are right.
    latency_ms: that of all requests of the span, as in `group`.
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
        f"the driver was late: {lag['p99']:.2f} ms at p99 in {LAGS[name]}, where {_limit(limit_ms, median_ms)}"
        for name, lag in lag_ms.items()
        if lag is not None and lag["p99"] > limit_ms
    ]
    if not any(span.start_s <= outcome.due_s <= span.end_s for outcome in outcomes):
        why.append(f"nothing was measured: no request was due between the end of the warm-up at {span.start_s:g} s and "
                   f"{span.end_s:g} s")  # fmt: skip
    elif lag_ms["ticks"] is None and lag_ms["turns"] is None:
        why.append("the driver's lag is not known: it sent nothing")
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
        return f"at most {LAG_MS_MAX:g} ms leaves a result valid"
    return f"at most {limit_ms:.2f} ms, 1 % of the median end to end, leaves a result valid"


def _notes(measured: Measured, lag_ms: dict[str, Any], latency_ms: dict[str, Any], cpu_share: float) -> Iterable[str]:
    if measured.interrupted:
        yield "the run was interrupted: this is what was measured until then"
    if lag_ms["null"] is None:
        yield "the driver was not proved against a null server before the run"
    first, worst = latency_ms["ttft"], max((lag["p99"] for lag in lag_ms.values() if lag is not None), default=0.0)
    if first and worst > LAG_SHARE_MAX * first["p50"]:
        share = worst / first["p50"]
        yield f"the driver's lag at p99 is {share:.1%} of the median time to first token, which contains it"
    if cpu_share > CPU_SHARE_MAX:
        yield f"a driver process used {cpu_share:.0%} of its core: give it more --processes"
    held = _held(measured.outcomes)
    if held:
        yield f"{held} requests had to wait for a place in the driver (--concurrency-max); their latencies contain it"
    unfinished = sum(outcome.state != FINISHED for outcome in measured.outcomes)
    if unfinished:
        planned = len(measured.outcomes)
        yield f"{unfinished} of {planned} requests did not finish: the end-to-end times are those of the others"
    if measured.before is not None and (measured.after is None or measured.after.boot != measured.before.boot):
        yield "the coordinator's counters are missing: it did not answer, or was started anew meanwhile"


def _held(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.sent_s - outcome.awake_s > LAG_MS_MAX / 1e3 for outcome in outcomes if outcome.sent_s >= 0)
