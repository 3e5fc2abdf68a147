"""A sentence about where the time of a request went."""

from __future__ import annotations

from kvforge.protocol.errors import Field

from ..requests.phases import NAMES
from ..requests.request import Request
from ..waits import DISK, GRAMMAR, HOST, SIBLING, TENANT_CEILING

QUEUED_FOR = {
    "": "its turn",
    "workers": "a worker",
    "away": "a worker to reconnect",
    "sequences_max": "a sequence slot",
    "step_rows_max": "a row",
    "step": "a step that still read its sequence",
    "kept": "requests before it, which had room reserved",
    "alone": "a request that runs alone",
    "blocks": "free blocks",
    TENANT_CEILING: "room below its tenant's ceiling",
    SIBLING: "the request that computed its prompt",
    GRAMMAR: "its grammar to be tried",
    HOST: "its sequence to come back from the host tier",
    DISK: "blocks from the disk tier",
}


def where_time_went(request: Request, now_us: int) -> tuple[str, dict[str, Field]]:
    """Return a sentence and facts about the time of a request up to `now_us`."""
    phases = request.phases
    spent = dict(zip(NAMES, phases.spent_by(now_us), strict=True))
    ways = {
        "queue": "waited {} in the queue for " + QUEUED_FOR[phases.queued_for],
        "prefill": "{} prefill",
        "preempted": f"preempted {_times(phases.preemptions)} for {{}} in all",
        "stalled": "stalled for {} for lack of blocks",
        "recovering": f"recovered {_times(phases.recoveries)} for {{}} in all"
        if phases.recoveries
        else "waited {} while there was no coordinator",
        "decode": "{} decoding",
    }
    parts = [way.format(duration(spent[phase])) for phase, way in ways.items() if spent[phase]]
    sentence = f"{duration(sum(spent.values()))} in all" + (f": {', '.join(parts)}" if parts else "")
    paused_us = phases.paused_by(now_us)
    if paused_us:
        sentence += f"; its stream was paused for {duration(paused_us)}"
    facts: dict[str, Field] = {f"{phase}_us": phase_us for phase, phase_us in spent.items()}
    facts |= {"paused_us": paused_us, "preemptions": phases.preemptions, "recoveries": phases.recoveries}
    return sentence, facts | {"queued_for": phases.queued_for}


def duration(us: int) -> str:
    """Format microseconds for people."""
    return f"{us / 1e6:.3g} s"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
