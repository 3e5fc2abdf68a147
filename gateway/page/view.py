"""The known state of the service at one moment, and its one-sentence summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from kvforge.gateway.storage.totals import StorageTotals
from kvforge.protocol.messages import Health, RequestList, Stats

from .disconnected_workers import GONE, STARTING, DisconnectedWorker

GOOD, NOTICE, BAD = "good", "notice", "bad"
SILENT_S = 3.0  # without an answer; queries are sent once a second
CEILING = "tenant ceiling"
# The limits that `explain` names, in words.
WAITS_FOR = {
    "": "their turn",
    "workers": "a worker",
    "away": "a worker to come back",
    "sequences_max": "a sequence slot",
    "step_rows_max": "a row in the batch",
    "step": "a step that still uses their sequence",
    "kept": "requests ahead of them",
    "alone": "a request that runs alone",
    "blocks": "free blocks",
    "sibling": "a request that computes the same prompt",
    "grammar": "their grammar to be compiled",
    "host": "their sequence to come back from the host tier",
    "disk": "blocks from the disk tier",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """The longest-waiting request of a tenant.

    Attributes:
        tenant: The tenant.
        count: How many of its requests wait.
        limit: The limit that the request waits for.
    """

    tenant: str
    count: int
    limit: str


@dataclass(slots=True)
class ServiceState:
    """The state of the service, as one sample shows it.

    Attributes:
        running, pending: Requests, from the shared tables.
        absent: Lost workers.
        stats, health, listed: The last answers; None before the first.
        waiting: The longest-waiting requests of the tenants with the most waiting ones.
        stored: The totals of the storage; None before the first answer, or without a storage.
        gone_s: Seconds since the coordinator's process ended; None while it runs or cannot be observed.
        silent_s: Seconds since the oldest unanswered query, or since the coordinator's process runs again.
        recovering: The process runs again and has not answered since it was gone.
        problem: The error of the last query.
    """

    running: int = 0
    pending: int = 0
    absent: tuple[DisconnectedWorker, ...] = ()
    stats: Stats | None = None
    health: Health | None = None
    listed: RequestList | None = None
    waiting: tuple[Waiting, ...] = ()
    stored: StorageTotals | None = None
    gone_s: float | None = None
    silent_s: float = 0.0
    recovering: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary.

    Attributes:
        level: GOOD, NOTICE or BAD.
        sentence: The one sentence.
        notes: Further lines.
        stale: Everything else on the page is out of date.
    """

    level: str
    sentence: str
    notes: tuple[str, ...] = ()
    stale: bool = False


def summary(view: ServiceState) -> Summary:
    """Summarise the state in one sentence."""
    if view.gone_s is not None:
        away = f"The coordinator has been down for {_seconds(view.gone_s)}."
        kept = "Its state is in its journal: it recovers when it restarts, and this page reconnects."
        return Summary(BAD, away, (kept,), stale=True)
    if view.health is None or view.stats is None:
        if view.problem:
            return Summary(BAD, "No coordinator answers.", (view.problem, "This page retries automatically."))
        return Summary(NOTICE, "Looking for the coordinator …")
    if view.silent_s >= SILENT_S:
        silent = f"The coordinator has not answered for {_seconds(view.silent_s)}."
        return Summary(BAD, silent, (view.problem,), stale=True)
    if view.recovering:
        return Summary(NOTICE, "The coordinator has restarted and recovers its state.", stale=True)
    serving = _serving(view, view.health, _work(view, view.stats.requests.pending))
    return replace(serving, notes=(*serving.notes, *_stored(view.stored)))


def _serving(view: ServiceState, health: Health, work: str) -> Summary:
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


def _stored(totals: StorageTotals | None) -> tuple[str, ...]:
    if totals is None or (totals.up and not totals.documents):
        return ()
    if not totals.up:
        return ("The database of stored objects does not answer; see the gateway's log.",)
    size = f"{totals.size_bytes / 1e6:.1f} MB" if totals.size_bytes >= 1e5 else f"{totals.size_bytes / 1e3:.1f} kB"
    objects = "1 object" if totals.documents == 1 else f"{totals.documents} objects"
    return (f"Stored: {objects} of {size}, {totals.in_progress} in progress.",)


def _absences(absent: tuple[DisconnectedWorker, ...]) -> str:
    """Describe the missing workers: "w1 is starting again, 2 workers are gone"."""
    parts = []
    for state in (STARTING, GONE):
        names = [one.name for one in absent if one.state == state]
        if names:
            parts.append(f"{names[0]} is {state}" if len(names) == 1 else f"{len(names)} workers are {state}")
    return ", ".join(parts)


def _work(view: ServiceState, waiting: int) -> str:
    """Describe the load. `waiting` is how many requests waited when the reasons were queried."""
    running, pending = view.running, view.pending
    if not running and not pending:
        return "nothing runs and nothing waits"
    if not pending:
        return f"{running} running, nothing waits"
    counts: Counter[str] = Counter()
    for one in view.waiting:
        ceiling = f"room below tenant {one.tenant}'s ceiling"
        counts[ceiling if one.limit == CEILING else WAITS_FOR.get(one.limit, one.limit)] += one.count
    text = f"{running} running, {pending} waiting"
    if not counts:
        return text
    if len(counts) == 1 and counts.total() >= waiting:
        return f"{text} for {next(iter(counts))}"
    return f"{text}: {', '.join(f'{count} for {reason}' for reason, count in counts.most_common())}"


def _seconds(seconds: float) -> str:
    """Format a duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"
