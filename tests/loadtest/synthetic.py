"""Synthetic runs: seeded outcomes of a hypothetical server with a queue."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np

from kvforge.loadtest.drive.outcome import FAILED, FINISHED, TIMED_OUT, DriverStats, Outcome, RunResult, Sample
from kvforge.loadtest.measure.document import Context
from kvforge.protocol.messages import PoolStats, RequestStats, Stats, TenantStats, Timings


def zeros(kind: type[msgspec.Struct], **values: Any) -> Any:
    """Return a structure with all numbers 0 except the given ones."""
    empty = {field.name: "" if field.type is str else 0 for field in msgspec.structs.fields(kind)}
    return kind(**{**empty, **values})


def stats(scale: int, boot: str = "b", **requests: int) -> Stats:
    return Stats(
        rid=1,
        boot=boot,
        uptime_us=0,
        clients=1,
        sequences=0,
        requests=zeros(RequestStats, **requests),
        pools=(zeros(PoolStats, worker="w0", steps=300 * scale), zeros(PoolStats, worker="w1", steps=100 * scale)),
        tenants=(
            zeros(
                TenantStats, tenant="a", prefix_queried_tokens_total=1000 * scale, prefix_hit_tokens_total=400 * scale
            ),
        ),
    )


def finished(due_s: float, *tokens_s: float, **values: Any) -> Outcome:
    """Return a request with tokens at these times, sent when it was due."""
    given = {"awake_s": due_s, "sent_s": due_s, "accepted_s": due_s, "ended_s": tokens_s[-1], "prompt_tokens": 10}
    times = {"session": 0, "tokens_s": array("d", tokens_s), "asked_tokens": len(tokens_s)}
    return Outcome(due_s=due_s, state=FINISHED, **{**given, **times, **values})


def run(*, rate: float = 20.0, duration_s: float = 30.0, seed: int = 0, lag_s: float = 50e-6) -> RunResult:
    """Return a run with exponential arrivals; the server carries 30 requests a second; one in 40 fails."""
    draws = np.random.default_rng(seed)
    due_s = np.cumsum(draws.exponential(1 / rate, max(2, int(rate * duration_s))))
    busy = min(0.97, rate / 30)
    outcomes = [_outcome(draws, index, float(due), busy, lag_s) for index, due in enumerate(due_s)]
    wall_s = max(outcome.ended_s for outcome in outcomes) + 0.1
    return RunResult(
        outcomes=outcomes,
        samples=[_sample(draws, at_s, wall_s, busy) for at_s in np.arange(0, wall_s, 0.25).tolist()],
        before=stats(1),
        after=stats(3, computed_tokens_total=90_000, recomputed_tokens_total=1_800, preemptions_total=12),
        drivers=[DriverStats(late_s=array("d", draws.exponential(lag_s / 4, 500)), cpu_s=0.2 * wall_s, wall_s=wall_s)],
        null_late_s=array("d", draws.exponential(lag_s / 4, 500)),
        wall_s=wall_s,
    )


def _outcome(draws: np.random.Generator, index: int, due_s: float, busy: float, lag_s: float) -> Outcome:
    agent = index % 3 == 0
    count = int(draws.integers(30, 120) if agent else draws.integers(5, 40))
    sent_s = due_s + float(draws.exponential(lag_s / 4))
    queue_s = float(draws.exponential(0.02 / (1 - busy)))
    first_s = sent_s + queue_s + float(draws.lognormal(-3.2, 0.4))
    tokens_s = first_s + np.concatenate(([0.0], np.cumsum(draws.lognormal(-4, 0.3, count - 1) / (1.2 - busy))))
    outcome = finished(
        due_s,
        *tokens_s.tolist(),
        session=index,
        tenant="alpha" if index % 4 else "<b>beta</b>",
        kind="agent" if agent else "chat",
        awake_s=sent_s,
        sent_s=sent_s,
        prompt_tokens=int(draws.integers(50, 900)),
        request_id=1000 + index,
        timings=_timings(queue_s, first_s - sent_s, float(tokens_s[-1]) - sent_s, preempted=not index % 7),
    )
    outcome.cached_tokens = outcome.prompt_tokens // 3
    if index % 40 == 39:
        late = index % 80 == 79
        outcome.state, outcome.code = (TIMED_OUT, "deadline_exceeded") if late else (FAILED, "worker_error")
        outcome.message = "the worker <w0> has gone"
    return outcome


def _timings(queue_s: float, first_s: float, ended_s: float, *, preempted: bool) -> Timings:
    """Return timings as a coordinator reports them: one in seven paused for a third of the time after its first
    token."""
    after_us = int((ended_s - first_s) * 1e6)
    again_us = after_us // 3 if preempted else 0
    return Timings(
        first_scheduled_us=int(queue_s * 1e6),
        first_token_us=int(first_s * 1e6),
        ended_us=int(ended_s * 1e6),
        queue_us=int(queue_s * 1e6),
        prefill_us=int((first_s - queue_s) * 1e6),
        decode_us=after_us - again_us,
        preempted_us=again_us,
    )


def _sample(draws: np.random.Generator, at_s: float, wall_s: float, busy: float) -> Sample:
    fill = busy * min(1.0, 4 * at_s / wall_s, 8 * (1 - at_s / wall_s) + 0.1)
    referenced = int(700 * fill + draws.integers(0, 60))
    cached = int((1000 - referenced) * min(0.7, at_s / wall_s * 2))
    return Sample(
        at_s=at_s,
        pending=int(draws.poisson(8 * busy * fill)),
        running=int(draws.poisson(20 * fill)),
        referenced=referenced,
        cached=cached,
        quarantined=4,
        free=1000 - referenced - cached - 4,
    )


STATES = ("queue", "prefill", "decode", "preempted", "queue", "prefill", "decode", "paused", "decode", "recovering")


def tail(measured: RunResult, count: int = 10) -> list[dict[str, Any]]:
    """Return the slowest requests, each with segments that fill its time."""
    slowest = sorted(measured.outcomes, key=lambda outcome: outcome.due_s - outcome.ended_s)[:count]
    found = []
    for rank, outcome in enumerate(slowest):
        edges = np.linspace(outcome.due_s, outcome.ended_s, 4 + rank % 7).tolist()
        segments = [
            {"state": state, "from_s": low, "to_s": high}
            for state, low, high in zip(STATES, edges[:-1], edges[1:], strict=False)
        ]
        found.append(
            {
                "request_id": outcome.request_id,
                "session": outcome.session,
                "turn": outcome.turn,
                "tenant": outcome.tenant,
                "kind": outcome.kind,
                "due_s": outcome.due_s,
                "latency_ms": (outcome.ended_s - outcome.due_s) * 1e3,
                "sentence": f"request {outcome.request_id} waited for blocks that <others> held",
                "segments": segments,
            }
        )
    return found


def context(measured: RunResult, **values: Any) -> Context:
    """Return a context with a fixed machine and versions, so that reports are the same everywhere."""
    given: dict[str, Any] = {
        "options": {"rate": 20.0, "prompts": "<script>alert(1)</script>", "slo": "ttft=500ms"},
        "seed": 7,
        "warmup_s": 2.0,
        "model": {"name": "demo & co", "fingerprint": "f00d"},
        "infinite": (100_000, 61_000),
        "tail": tail(measured),
        "chaos": {
            "kept": True,
            "sentences": ["the promise was kept: nothing was lost", "worker w0 was killed at 5.0 s"],
            "faults": 1,
            "kills": [{"name": "worker", "at_s": 5.0, "pid": 7, "ready_s": 6.2, "problem": ""}],
        },
        "machine": {"processor": "a processor", "cores": 2, "memory_gib": 8, "system": "Linux"},
        "versions": {"python": "3.11", "kvforge": "0.1.0"},
    }
    return Context(**{**given, **values})
