"""What is known of the service at one moment, and the sentence that says whether all is well."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvforge.protocol.messages import Health, RequestList, Stats

from .absent import GONE, STARTING, Absent

GOOD, NOTICE, BAD = "good", "notice", "bad"
SILENT_S = 3.0  # without an answer: a coordinator is asked about once a second
CEILING = "tenant ceiling"
# What `explain` calls the limits that a request waits for, for people.
WAITS_FOR = {
    "": "their turn",
    "workers": "a worker",
    "away": "a worker to come back",
    "sequences_max": "a sequence slot",
    "step_rows_max": "a place in the steps",
    "step": "a step that still reads their sequence",
    "kept": "requests before them",
    "alone": "a request that runs alone",
    "blocks": "free blocks",
    "sibling": "a request that computes the same prompt",
    "grammar": "their grammar to be tried",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request of a tenant that waits longest: what for, and how many of the tenant's wait."""

    tenant: str
    count: int
    limit: str


@dataclass(slots=True)
class View:
    """running, pending: requests, as the tables say it now. absent: workers that were lost. stats, health, listed: the
    last answers; None before the first. waiting: of the tenants with the most that wait. gone_s: since the
    coordinator's process ended; None: it runs, or that cannot be seen from here. silent_s: since the oldest question
    without an answer. problem: what came instead.
    """

    running: int = 0
    pending: int = 0
    absent: tuple[Absent, ...] = ()
    stats: Stats | None = None
    health: Health | None = None
    listed: RequestList | None = None
    waiting: tuple[Waiting, ...] = ()
    gone_s: float | None = None
    silent_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """level: GOOD, NOTICE or BAD. notes: what else is worth a line. stale: all else that is shown is of before."""

    level: str
    sentence: str
    notes: tuple[str, ...] = ()
    stale: bool = False


def summary(view: View) -> Summary:
    """The whole in a sentence."""
    if view.gone_s is not None:
        away = f"The coordinator is gone, for {_seconds(view.gone_s)}."
        kept = "What it was told is in its journal: started again, it goes on, and so does this page."
        return Summary(BAD, away, (kept,), stale=True)
    if view.health is None or view.stats is None:
        if view.problem:
            return Summary(BAD, "No coordinator answers.", (view.problem, "This page looks again by itself."))
        return Summary(NOTICE, "Looking for the coordinator …")
    if view.silent_s >= SILENT_S:
        silent = f"The coordinator has not answered for {_seconds(view.silent_s)}."
        return Summary(BAD, silent, (view.problem,), stale=True)
    return _serving(view, view.health, _work(view, view.stats.requests.pending))


def _serving(view: View, health: Health, work: str) -> Summary:
    gone = tuple(f"{one.name} is {one.state}: {one.how}" for one in view.absent)
    loading = tuple(
        f"{worker.title} is {worker.state}: {worker.phase} {worker.progress:.0%}".replace(":  ", ": ")
        for worker in health.workers
        if worker.state != "ready"
    )
    if health.draining:
        return Summary(NOTICE, f"Draining, no new requests: {work}.", gone + loading)
    if not health.ready:
        comes = bool(loading) or any(one.state == STARTING for one in view.absent)
        return Summary(NOTICE if comes else BAD, f"Not ready: {health.reason}.", gone + loading)
    if gone:
        return Summary(NOTICE, f"{_absences(view.absent)}; {work}.", gone + loading)
    if view.pending:
        return Summary(NOTICE, f"{work}.", loading)
    return Summary(GOOD, f"All is well: {work}.", loading)


def _absences(absent: tuple[Absent, ...]) -> str:
    """Describe the missing workers: "w1 is starting again, 2 workers are gone"."""
    parts = []
    for state in (STARTING, GONE):
        names = [one.name for one in absent if one.state == state]
        if names:
            parts.append(f"{names[0]} is {state}" if len(names) == 1 else f"{len(names)} workers are {state}")
    return ", ".join(parts)


def _work(view: View, told: int) -> str:
    """told: how many waited when it was asked what for."""
    running, pending = view.running, view.pending
    if not running and not pending:
        return "nothing runs and nothing waits"
    if not pending:
        return f"{running} running, nothing waits"
    counts: Counter[str] = Counter()
    for one in view.waiting:
        ceiling = f"room below tenant {one.tenant}'s ceiling"
        counts[ceiling if one.limit == CEILING else WAITS_FOR.get(one.limit, one.limit)] += one.count
    said = f"{running} running, {pending} waiting"
    if not counts:
        return said
    if len(counts) == 1 and counts.total() >= told:
        return f"{said} for {next(iter(counts))}"
    return f"{said}: {', '.join(f'{count} for {reason}' for reason, count in counts.most_common())}"


def _seconds(seconds: float) -> str:
    """A time that has passed, as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"
