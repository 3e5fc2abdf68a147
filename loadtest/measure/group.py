"""The measurements of a group of requests: all, one tenant, or one class."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..drive.outcome import ENDS
from .objective import Objective
from .outcome_columns import OutcomeColumns
from .percentiles import Distribution
from .span import Span

LATENCIES = {
    "ttft": "time to first token",
    "itl": "between tokens",
    "e2e": "end to end",
    "queue": "in the queue",
}

Document = dict[str, Any]


def latencies(requests: OutcomeColumns) -> dict[str, Distribution]:
    """Return the distributions by the names of LATENCIES.

    For a request that did not finish, the first token and the times between tokens count, its end does not.
    """
    found = {
        "ttft": requests.first_s,
        "itl": requests.gaps_s(),
        "e2e": requests.whole_s,
        "queue": requests.queue_s,
    }
    return {name: Distribution(values[~np.isnan(values)]) for name, values in found.items()}


def group(requests: OutcomeColumns, span: Span, objective: Objective) -> Document:
    """Measure the requests that were due in the span; throughput counts what happened within it, for any request."""
    due = requests.due_within(span)
    states = Counter(outcome.state for outcome in due.outcomes)
    return {
        "requests": {"due": len(due.outcomes), **{end: states[end] for end in ENDS}},
        "latency_ms": {name: found.summary_ms() for name, found in latencies(due).items()},
        "throughput": throughput(requests, span),
        "goodput": goodput(due, span, objective),
        "errors": errors(due),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in due.outcomes),
        "cached_tokens": sum(outcome.cached_tokens for outcome in due.outcomes),
    }


def throughput(requests: OutcomeColumns, span: Span) -> Document:
    """Return rates within the span: finished requests, prompts that got their first token, and output tokens."""
    seconds = span.seconds
    if not seconds:
        return dict.fromkeys(("requests_per_s", "input_tokens_per_s", "output_tokens_per_s"))
    ended_s, first_s = requests.ended_s(), requests.first_s + requests.due_s
    prompts = np.array([outcome.prompt_tokens for outcome in requests.outcomes], np.float64)
    tokens = int(np.count_nonzero(span.holds(requests.all_tokens_s())))
    return {
        "requests_per_s": float(np.count_nonzero(span.holds(ended_s)) / seconds),
        "input_tokens_per_s": float(prompts[span.holds(first_s)].sum() / seconds),
        "output_tokens_per_s": tokens / seconds,
    }


def goodput(due: OutcomeColumns, span: Span, objective: Objective) -> Document:
    """Return the requests that met the objective, per second and as a share.

    Without an objective, all finished requests count.
    """
    met = objective.met(due)
    good, offered = int(np.count_nonzero(met)), len(due.outcomes)
    tokens = sum(times.size for times, well in zip(due.tokens_s, met.tolist(), strict=True) if well)
    return {
        "requests": good,
        "share": good / offered if offered else None,
        "requests_per_s": good / span.seconds if span.seconds else None,
        "output_tokens_per_s": tokens / span.seconds if span.seconds else None,
    }


def errors(due: OutcomeColumns) -> list[Document]:
    """Count the errors by state and code, with the first message of each."""
    kinds: dict[tuple[str, str], Document] = {}
    for outcome in due.outcomes:
        if outcome.code:
            first = {"state": outcome.state, "code": outcome.code, "count": 0, "message": outcome.message}
            kinds.setdefault((outcome.state, outcome.code), first)["count"] += 1
    return [kinds[key] for key in sorted(kinds)]
