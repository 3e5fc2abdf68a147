"""Wait records of blocked requests, written when the scheduler finds that a request is blocked.

A Wait names the limit that the request ran into, and the events that may lift it. The code that causes such an event
calls `wake`, and exactly the requests that wait for it are tried again, in queue order. `explain` reads the same
record. A request without a record has not been tried since an event woke it, or is queued behind blocked ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

Event = tuple[str, int]
PREFIX = "prefix"
TENANT_CEILING, SIBLING, GRAMMAR, DISK, HOST = "tenant ceiling", "sibling", "grammar", "disk", "host"

WORKER: Event = ("worker", 0)  # a worker that could hold the request became ready or returned
SLOT: Event = ("slot", 0)  # a sequence slot is free
FRONT: Event = ("front", 0)  # a blocked request was woken, started or ended: the room kept for it may be free


def blocks_of(epoch: int) -> Event:
    """Return the event that blocks of the group became available, by a release or by the end of a step."""
    return ("blocks", epoch)


def rows_of(epoch: int) -> Event:
    """Return the event that a row of the group ended, or that its request need not run alone any more."""
    return ("rows", epoch)


def prompt_of(request_id: int) -> Event:
    """Return the event that a request got its first token, so that its prompt is computed, or ended."""
    return ("prompt", request_id)


def trial_of(request_id: int) -> Event:
    """Return the event that a worker may know whether the request's grammar is usable."""
    return ("trial", request_id)


def load_of(epoch: int, load: int) -> Event:
    """Return the event that blocks of a prompt came from the disk tier of a group, or could not."""
    return (f"load {load}", epoch)


def patience_of(request_id: int) -> Event:
    """Return the event that a request has waited for the disk for as long as it may."""
    return ("patience", request_id)


def eviction_of(sequence_id: int) -> Event:
    """Return the event that a sequence gave up its blocks, and may move to another group."""
    return ("eviction", sequence_id)


def prefix_of(value: int) -> Event:
    """Return the event that a block with this chained hash was indexed."""
    return (PREFIX, value)


class Wait(msgspec.Struct, frozen=True):
    """Why a request does not run, or is stalled. A new worker ends every wait.

    Attributes:
        limit: workers, away, sequences_max, step_rows_max, alone, sibling, grammar, disk, step, kept, tenant ceiling or
            blocks.
        events: Events that may lift the limit.
        group: Epoch of the group with the smallest shortage, 0 for none.
        short: Blocks missing there.
        needed: Blocks needed there.
        problem: The text of the refusal.
        other: The request that it waits for.
    """

    limit: str
    events: tuple[Event, ...] = ()
    group: int = 0
    short: int = 0
    needed: int = 0
    problem: str = ""
    other: int = 0


class Waiter(Protocol):
    """A request that waits."""

    id: int
    wait: Wait | None


class Waits:
    """Waiting requests by event.

    Attributes:
        admission_due: Set when a request arrived or may continue; the scheduler clears it.
    """

    def __init__(self) -> None:
        self._by_event: dict[Event, dict[int, Waiter]] = {}
        self._prefixes = 0
        self.admission_due = False

    def put(self, request: Waiter, wait: Wait) -> None:
        """Record that the request waits for the first of the events."""
        assert request.wait is None
        request.wait = wait
        for event in wait.events:
            self._by_event.setdefault(event, {})[request.id] = request
            self._prefixes += event[0] == PREFIX

    @property
    def awaits_prefix(self) -> bool:
        """Whether any request waits for a block to be indexed."""
        return self._prefixes > 0

    def wake(self, event: Event) -> list[int]:
        """Wake the requests that wait for the event. Return their ids."""
        waiting = self._by_event.get(event)
        if not waiting:
            return []
        woken = dict(waiting)
        for request in woken.values():
            self.clear(request)
        return list(woken)

    def wake_all(self) -> None:
        """Wake all requests except those that wait for a sibling, because a worker came or went."""
        self.admission_due = True
        blocked = {request.id: request for waiting in self._by_event.values() for request in waiting.values()}
        for request in blocked.values():
            if request.wait is not None and request.wait.limit != SIBLING:
                self.clear(request)

    def clear(self, request: Waiter) -> None:
        """Remove the request's wait record, because it is tried again or no longer waits."""
        self.admission_due = True
        wait, request.wait = request.wait, None
        if wait is None:
            return
        for event in wait.events:
            waiting = self._by_event[event]
            del waiting[request.id]
            self._prefixes -= event[0] == PREFIX
            if not waiting:
                del self._by_event[event]
        self.wake(FRONT)

    def check_invariants(self, blocked: Sequence[Waiter]) -> None:
        """Check that exactly the records of blocked requests are listed under their events."""
        listed = {(event, number) for event, waiting in self._by_event.items() for number in waiting}
        assert listed == {(event, r.id) for r in blocked if r.wait for event in r.wait.events}, "a wait is not listed"
        assert all(self._by_event.values()), "an event without waiting requests"
