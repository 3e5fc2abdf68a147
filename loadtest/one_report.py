"""From what was measured to numbers: one document for programs, and the same as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import QueueFull
from kvforge.protocol.messages import ModelInfo, Stats

from .driver import ENDS, FINISHED, TIMED_OUT, Depth, Measured, Outcome
from .machine import machine, table, versions

PERCENTILES = (50, 90, 95, 99)
# A generator this late at the 99th percentile measures itself. The event loop's own timers are good to about 1 ms.
SLIP_MS_MAX = 20.0
CPU_SHARE_MAX = 0.9
LATENCIES = {
    "time_to_first_token": "time to first token",
    "inter_token": "between tokens",
    "per_output_token": "per token after the first",
    "end_to_end": "end to end",
    "acceptance": "until accepted",
}

Values = npt.NDArray[np.float64]
Document = dict[str, Any]


def summary(values: Values) -> dict[str, float | int] | None:
    """count, mean, p50, p90, p95, p99, max of [n] float64, in its unit; None of nothing.

    A percentile is by nearest rank: the smallest value with at least that share at or below it, so one that was seen.
    """
    if not values.size:
        return None
    ranked = np.sort(values)
    found: dict[str, float | int] = {"count": int(values.size), "mean": float(values.mean())}
    for percent in PERCENTILES:
        found[f"p{percent}"] = float(ranked[max(0, -(-percent * ranked.size // 100) - 1)])
    found["max"] = float(ranked[-1])
    return found


def latencies_ms(outcomes: Iterable[Outcome]) -> dict[str, dict[str, float | int] | None]:
    """Summaries in milliseconds. All but the times between tokens count from the intended arrival.

    Of a request that did not finish, the first token and the times between tokens count if they came; its end does not.
    per_output_token: of each finished request of at least two tokens, the mean time between its tokens.
    """
    first: list[float] = []
    gaps: list[Values] = [np.zeros(0)]
    mean_gap: list[float] = []
    whole: list[float] = []
    accepted: list[float] = []
    for outcome in outcomes:
        times = np.frombuffer(outcome.tokens_s, np.float64) if outcome.tokens_s else np.zeros(0)
        if outcome.accepted_s >= 0:
            accepted.append(outcome.accepted_s - outcome.due_s)
        if times.size:
            first.append(float(times[0]) - outcome.due_s)
            gaps.append(np.diff(times))
        if outcome.state == FINISHED:
            whole.append(outcome.ended_s - outcome.due_s)
            if times.size > 1:
                mean_gap.append(float(times[-1] - times[0]) / (times.size - 1))
    found = {
        "time_to_first_token": first,
        "inter_token": np.concatenate(gaps),
        "per_output_token": mean_gap,
        "end_to_end": whole,
        "acceptance": accepted,
    }
    return {name: summary(np.asarray(values, np.float64) * 1e3) for name, values in found.items()}


def counts(outcomes: Iterable[Outcome]) -> Document:
    """How many requests came to each end; every planned one is in exactly one of them."""
    found = Counter(outcome.state for outcome in outcomes)
    assert set(found) <= set(ENDS), f"a request is still in {set(found) - set(ENDS)} after the run"
    return {"planned": sum(found.values()), **{end: found[end] for end in ENDS}}


def throughput(measured: Measured) -> Document:
    """Per second of the run. Total tokens: the prompts of finished requests, and every token that came."""
    seconds = max(measured.wall_s, 1e-9)
    finished = [outcome for outcome in measured.outcomes if outcome.state == FINISHED]
    generated = sum(len(outcome.tokens_s) for outcome in measured.outcomes)
    prompts = sum(outcome.prompt_tokens for outcome in finished)
    return {
        "requests_per_s": len(finished) / seconds,
        "output_tokens_per_s": generated / seconds,
        "total_tokens_per_s": (generated + prompts) / seconds,
        "output_tokens": generated,
        "prompt_tokens": prompts,
    }


def coordinator(before: Stats | None, after: Stats | None, depths: list[Depth]) -> Document:
    """What the coordinator's counters say of the time of the run, other clients' requests included.

    counters: the growth of every counter of RequestStats; None where it did not answer or was started anew meanwhile.
    """
    queue = {
        name: {"mean": float(np.mean(values)), "max": max(values)}
        if (values := [getattr(d, name) for d in depths])
        else None
        for name in ("pending", "running")
    }
    found: Document = {"samples": len(depths), **queue, "counters": None, "prefix_queried_tokens": None}
    found |= {"prefix_hit_tokens": None, "preemptions": None, "steps": None}
    if before is None or after is None or before.boot != after.boot:
        return found
    then, now = msgspec.to_builtins(before.requests), msgspec.to_builtins(after.requests)
    counters = {name: now[name] - then.get(name, 0) for name in now if name.endswith("_total")}
    found["counters"] = counters
    # A coordinator that does not count them is not one that had none.
    found["preemptions"] = counters.get("preemptions_total")
    found["prefix_queried_tokens"] = _growth(before, after, "tenants", "prefix_queried_tokens_total")
    found["prefix_hit_tokens"] = _growth(before, after, "tenants", "prefix_hit_tokens_total")
    found["steps"] = _growth(before, after, "pools", "steps")
    return found


def _growth(before: Stats, after: Stats, group: str, name: str) -> int:
    then, now = (sum(int(getattr(row, name)) for row in getattr(stats, group)) for stats in (before, after))
    return now - then


def generator(measured: Measured) -> Document:
    """How late this program itself was. bottleneck: what was measured is partly this program."""
    sent = [outcome for outcome in measured.outcomes if outcome.awake_s >= 0]
    slip_ms = summary(np.array([outcome.awake_s - outcome.due_s for outcome in sent]) * 1e3)
    held = sum(outcome.sent_s - outcome.awake_s > SLIP_MS_MAX / 1e3 for outcome in sent if outcome.sent_s >= 0)
    cpu_share = measured.cpu_s / max(measured.wall_s, 1e-9)
    late = slip_ms is not None and slip_ms["p99"] > SLIP_MS_MAX
    return {
        "slip_ms": slip_ms,
        "held_back": held,
        "cpu_share": cpu_share,
        "bottleneck": late or cpu_share > CPU_SHARE_MAX,
    }


def document(workload: Document, model: ModelInfo | None, measured: Measured) -> Document:
    """Everything, ready for JSON. workload: what was asked for."""
    errors = Counter(outcome.code for outcome in measured.outcomes if outcome.code)
    found: Document = {
        "title": "kvforge load test",
        "machine": machine(),
        "versions": versions(),
        "model": {"name": model.name, "fingerprint": model.fingerprint} if model is not None else None,
        "workload": workload,
        "interrupted": measured.interrupted,
        "seconds": measured.wall_s,
        "requests": counts(measured.outcomes),
        "errors": dict(sorted(errors.items())),
        "queue_full": errors[QueueFull.code],
        "latency_ms": latencies_ms(measured.outcomes),
        "throughput": throughput(measured),
        "cached_prompt_tokens": sum(outcome.cached_tokens for outcome in measured.outcomes),
        "coordinator": coordinator(measured.before, measured.after, measured.depths),
        "generator": generator(measured),
    }
    return found | {"warnings": warnings(found)}


def warnings(found: Document) -> list[str]:
    """What a reader of the numbers must know, as sentences."""
    sentences = []
    slip, late = found["generator"]["slip_ms"], found["requests"][TIMED_OUT]
    if found["generator"]["bottleneck"]:
        sentences.append(
            f"the generator was the bottleneck: it was {slip['p99'] if slip else 0:.0f} ms late at p99 and used "
            f"{found['generator']['cpu_share']:.0%} of one core; ask for less, or give it a core of its own"
        )
    if found["generator"]["held_back"]:
        sentences.append(f"{found['generator']['held_back']} requests had to wait for --concurrency-max")
    if late:
        sentences.append(f"{late} requests ran out of time: the end-to-end times are those of the luckier ones")
    if found["coordinator"]["counters"] is None:
        sentences.append("the coordinator's counters are missing: it did not answer, or was started anew meanwhile")
    return sentences


def text(found: Document) -> str:
    """The document as tables."""
    workload, requests, speed = found["workload"], found["requests"], found["throughput"]
    ends = [f"{requests[end]} {end.replace('_', ' ')}" for end in ENDS if requests[end]]
    lines = [
        ", ".join(f"{key} {value}" for key, value in found["machine"].items()),
        ", ".join(f"{key} {value}" for key, value in found["versions"].items()),
        ", ".join(f"{key} {value}" for key, value in workload.items() if value is not None),
        "",
        f"{requests['planned']} requests in {found['seconds']:.2f} s: {', '.join(ends)}"
        + (" (interrupted)" if found["interrupted"] else ""),
        f"{speed['requests_per_s']:.2f} requests/s finished, {speed['output_tokens_per_s']:.1f} output tokens/s, "
        f"{speed['total_tokens_per_s']:.1f} tokens/s with their prompts",
    ]
    if found["errors"]:
        lines.append("errors: " + ", ".join(f"{code} {count}" for code, count in found["errors"].items()))
    head = ("ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max", "count")
    named = {LATENCIES[name]: row for name, row in found["latency_ms"].items()}
    named["generator late by"] = found["generator"]["slip_ms"]
    rows = [
        [name, *(f"{row[column]:.2f}" for column in head[1:-1]), row["count"]] for name, row in named.items() if row
    ]
    lines += ["", table(head, rows) if rows else "nothing was measured"]
    lines += ["", f"generator: {found['generator']['cpu_share']:.0%} of one core"]
    lines += _coordinator_lines(found["coordinator"])
    lines += [f"warning: {sentence}" for sentence in found["warnings"]]
    return "\n".join(lines)


def _coordinator_lines(found: Document) -> list[str]:
    lines = []
    if found["pending"] is not None:
        depth = [f"{name} {found[name]['mean']:.1f} mean, {found[name]['max']} max" for name in ("pending", "running")]
        lines.append(f"coordinator, {found['samples']} samples: {'; '.join(depth)}")
    counters = found["counters"]
    if counters is None:
        return lines
    preempted = found["preemptions"] if found["preemptions"] is not None else "not counted"
    computed, again = counters.get("computed_tokens_total", 0), counters.get("recomputed_tokens_total", 0)
    share = f" ({again / computed:.1%} of {computed} computed)" if computed else ""
    lines.append(f"preemptions: {preempted}; tokens computed again: {again}{share}; steps: {found['steps']}")
    hit, asked = found["prefix_hit_tokens"], found["prefix_queried_tokens"]
    lines.append(f"prefix cache: {hit} of {asked} tokens" + (f" ({hit / asked:.1%})" if asked else ""))
    return lines
