"""Measurements by the server: the growth of its counters, its blocks over time, and prefix hits.

The counters cover the whole run, warm-up and drain included, and the requests of all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvforge import Stats

from ..drive.outcome import RunResult, Sample
from .span import Span

SAMPLES_MAX = 1000
BLOCKS = ("referenced", "cached", "free", "quarantined")
COLUMNS = ("at_s", "pending", "running", *BLOCKS)

Document = dict[str, Any]


def counters(before: Stats | None, after: Stats | None) -> Document | None:
    """Return the growth of each total; None without counters, or if the coordinator restarted without its journal.

    recomputed_share is the share of recomputed tokens among all computed tokens.
    """
    if before is None or after is None or before.boot != after.boot:
        return None
    then, now = msgspec.to_builtins(before.requests), msgspec.to_builtins(after.requests)
    totals = {name: now[name] - then.get(name, 0) for name in now if name.endswith("_total")}
    computed, again = totals["computed_tokens_total"], totals["recomputed_tokens_total"]
    return {
        "totals": totals,
        "preemptions": totals["preemptions_total"],
        "recomputed_share": again / computed if computed else None,
        "steps": _growth(before, after, "pools", "worker", "steps"),
    }


def prefix(measured: RunResult, infinite: tuple[int, int] | None) -> Document:
    """Return the hits of the prefix cache, as the coordinator counts them, or else from the answers.

    Args:
        measured: The results of the run.
        infinite: (tokens of all prompts, hits of an unlimited cache).
    """
    before, after = measured.before, measured.after
    hit = sum(outcome.cached_tokens for outcome in measured.outcomes)
    queried = sum(outcome.prompt_tokens for outcome in measured.outcomes if outcome.tokens_s)
    said_by = "answers"
    if before is not None and after is not None and before.boot == after.boot:
        said_by = "coordinator"
        hit = _growth(before, after, "tenants", "tenant", "prefix_hit_tokens_total")
        queried = _growth(before, after, "tenants", "tenant", "prefix_queried_tokens_total")
    found: Document = {"said_by": said_by, "queried_tokens": queried, "hit_tokens": hit, "share": _share(hit, queried)}
    if infinite is not None:
        prompts, best = infinite
        found["infinite"] = {"prompt_tokens": prompts, "hit_tokens": best, "share": _share(best, prompts)}
    return found


def occupancy(samples: Sequence[Sample], span: Span) -> Document:
    """Return at most SAMPLES_MAX samples of the whole run, a list for each of COLUMNS, and mean and max in the span."""
    rows = np.array([[getattr(sample, name) for name in COLUMNS] for sample in samples], np.float64)
    rows = rows.reshape(-1, len(COLUMNS))
    thinned = rows[:: max(1, -(-len(rows) // SAMPLES_MAX))]
    within = rows[span.holds(rows[:, 0])]
    found: Document = {"columns": dict(zip(COLUMNS, thinned.T.round(6).tolist(), strict=True)), "samples": len(within)}
    for index, name in enumerate(COLUMNS[1:], 1):
        values = within[:, index]
        found[name] = {"mean": float(values.mean()), "max": float(values.max())} if len(within) else None
    return found


def _growth(before: Stats, after: Stats, group: str, key: str, name: str) -> int:
    """Return the growth of a count over all rows of a group. A new row starts at 0; a removed row adds nothing."""
    then = {getattr(row, key): int(getattr(row, name)) for row in getattr(before, group)}
    rows = [(int(getattr(row, name)), then.get(getattr(row, key), 0)) for row in getattr(after, group)]
    # A restarted worker counts its steps from 0.
    return sum(now - old if now >= old else now for now, old in rows)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
