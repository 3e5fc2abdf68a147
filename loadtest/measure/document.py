"""All measurements of a run as one JSON document: result.json, the source of every table and picture.

Schema, format 1. Times are in seconds (`_s`) since the start of the run, latencies in milliseconds (`_ms`) from the
intended arrival; null means not available.

    format, title
    verdict     valid, why, notes, limit_ms, lag_ms {ticks, turns, null}, drivers, cpu_share_max    (`verdict`)
    options, seed, machine, versions, model                                       as given
    objective   {ttft, itl, e2e} in ms: the stated bounds
    span        start_s, end_s, seconds: the measured part; wall_s: the whole run; interrupted
    percentiles how they were computed
    all         requests {due, finished, ...}, latency_ms {ttft, itl, e2e, queue: {count, mean, p50, ..., max}},
                throughput, goodput, errors [{state, code, count, message}], prompt_tokens, cached_tokens    (`group`)
    tenants, kinds                                            the same by name; empty if there is only one
    curves      {ttft, itl, e2e}: [[ms, share at or below], ...]
    windows     count, seconds, confidence, intervals {NAME: {mean, half, values}}    (`windows`)
    series      the run over time    (`series`)
    server      totals, preemptions, recomputed_share, steps    (`server.counters`)
    prefix      said_by, queried_tokens, hit_tokens, share, infinite {prompt_tokens, hit_tokens, share}
    occupancy   columns, samples, pending, running and each state of blocks: {mean, max}
    why         {all, p90, p99}: time by phase, for all and for the slowest requests    (`tail.breakdown`)
    tail        the slowest requests: [{request_id, session, turn, tenant, kind, due_s, latency_ms, sentence,
                phases_ms, segments [{state, from_s, to_s}]}]    (`tail.slowest`)
    chaos       the effect of faults: {kept, sentences, kills [{name, at_s, ready_s}], ...}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..drive.outcome import RunResult
from ..machine import machine, versions
from .group import Document, group, latencies
from .objective import Objective
from .outcome_columns import OutcomeColumns
from .percentiles import stated
from .series import TIMES, series
from .server import counters, occupancy, prefix
from .span import Span, measured_span
from .tail import breakdown
from .verdict import verdict
from .windows import windows

FORMAT = 1
TITLE = "kvforge load test"
WINDOWS = 5
GROUPS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs of a document besides `RunResult`.

    Attributes:
        options: The options of the command by name.
        seed: The seed.
        objective: The service level objective.
        warmup_s: The seconds that are not measured.
        windows: The number of windows.
        model: Name and fingerprint of the model; None if unknown.
        infinite: (prompt tokens, hits of an unlimited cache) of the workload.
        tail: `tail` of the document.
        chaos: `chaos` of the document.
        notes: Further notes for the reader.
        machine: The machine.
        versions: The versions of packages.
    """

    options: Mapping[str, Any]
    seed: int = 0
    objective: Objective = field(default_factory=Objective)
    warmup_s: float = 0.0
    windows: int = WINDOWS
    model: Mapping[str, Any] | None = None
    infinite: tuple[int, int] | None = None
    tail: Sequence[Mapping[str, Any]] = ()
    chaos: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)


def document(measured: RunResult, context: Context) -> Document:
    """Build the document. Raises Unavailable if the extra `loadtest` is missing."""
    span = measured_span(measured.outcomes, context.warmup_s, measured.wall_s)
    requests = OutcomeColumns.of(measured.outcomes)
    whole = group(requests, span, context.objective)
    due = requests.due_within(span)
    times = latencies(due)
    judged = verdict(measured, span, whole["latency_ms"])
    judged["notes"] += context.notes
    return {
        "format": FORMAT,
        "title": TITLE,
        "verdict": judged,
        "options": dict(context.options),
        "seed": context.seed,
        "machine": dict(context.machine),
        "versions": dict(context.versions),
        "model": dict(context.model) if context.model is not None else None,
        "objective": context.objective.stated_ms(),
        "span": {
            "start_s": span.start_s,
            "end_s": span.end_s,
            "seconds": span.seconds,
            "wall_s": measured.wall_s,
            "interrupted": measured.interrupted,
        },
        "percentiles": stated(),
        "all": whole,
        "tenants": _by(requests, [outcome.tenant for outcome in measured.outcomes], span, context.objective),
        "kinds": _by(requests, [outcome.kind for outcome in measured.outcomes], span, context.objective),
        "curves": {name: [[ms, share] for ms, share in times[name].curve_ms()] for name in TIMES},
        "windows": windows(requests, span, context.windows, context.objective),
        "series": series(requests, measured.wall_s),
        "server": counters(measured.before, measured.after),
        "prefix": prefix(measured, context.infinite),
        "occupancy": occupancy(measured.samples, span),
        "why": breakdown(due.outcomes),
        "tail": [dict(request) for request in context.tail],
        "chaos": dict(context.chaos) if context.chaos is not None else None,
    }


def _by(requests: OutcomeColumns, names: Sequence[str], span: Span, objective: Objective) -> Document:
    """Return a group for each of the 100 most frequent names; none if there is only one."""
    found = Counter(names)
    if len(found) < 2:
        return {}
    column = np.array(names)
    chosen = sorted(name for name, _ in found.most_common(GROUPS_MAX))
    return {name: group(requests.where(column == name), span, objective) for name in chosen}
