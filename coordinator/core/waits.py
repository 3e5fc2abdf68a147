"""What each blocked request waits for: written down where it is decided.

A Wait names the limit that a request ran into, and the events that may lift it. Whoever makes such an event happen says
so with `wake`, and exactly those that wait for it are tried again, in the order of the queue; `explain` reads the same
record. Who has no record has not been tried since something changed for it, or waits behind those that have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

Event = tuple[str, int]
PREFIX = "prefix"
TENANT_CEILING, SIBLING, GRAMMAR = "tenant ceiling", "sibling", "grammar"

WORKER: Event = ("worker", 0)  # one that could hold the request is ready, or back
SLOT: Event = ("slot", 0)  # a slot for a sequence is free
FRONT: Event = ("front", 0)  # a blocked request is woken, starts or ends: what was kept for it may be had


def blocks_of(epoch: int) -> Event:
    """Blocks of the group can be had: they came back, or the last step that kept them from being taken is over."""
    return ("blocks", epoch)


def rows_of(epoch: int) -> Event:
    """A row of the group ended, or the one that had to run alone is past that point."""
    return ("rows", epoch)


def prompt_of(request_id: int) -> Event:
    """The request has its first token, so that its prompt is computed; or it ended."""
    return ("prompt", request_id)


def trial_of(request_id: int) -> Event:
    """Its worker may know by now whether the request's grammar can be used."""
    return ("trial", request_id)


def eviction_of(sequence_id: int) -> Event:
    """The sequence gave up its blocks, so that it may go to another group."""
    return ("eviction", sequence_id)


def prefix_of(value: int) -> Event:
    """A block with this chained hash is indexed."""
    return (PREFIX, value)


class Wait(msgspec.Struct, frozen=True):
    """Why a request does not run, or stands still. A new worker ends every wait.

    limit: workers, away, sequences_max, step_rows_max, alone, sibling, grammar, step, kept, tenant ceiling or blocks.
    group: epoch of the one that lacks least, 0 for none. short: blocks missing there, of those needed; problem: the
    refusal in words. other: the request that it waits for.
    """

    limit: str
    events: tuple[Event, ...] = ()
    group: int = 0
    short: int = 0
    needed: int = 0
    problem: str = ""
    other: int = 0


class Waiter(Protocol):
    """Whoever waits: a request."""

    id: int
    wait: Wait | None


class Waits:
    """Who waits for what. stirred: somebody may go on, or came, since this was set to False."""

    def __init__(self) -> None:
        self._by_event: dict[Event, dict[int, Waiter]] = {}
        self._prefixes = 0
        self.stirred = False

    def put(self, request: Waiter, wait: Wait) -> None:
        """The request waits for the first of the events."""
        assert request.wait is None
        request.wait = wait
        for event in wait.events:
            self._by_event.setdefault(event, {})[request.id] = request
            self._prefixes += event[0] == PREFIX

    @property
    def awaits_prefix(self) -> bool:
        """Whether anybody waits for a block to be indexed."""
        return self._prefixes > 0

    def wake(self, event: Event) -> list[int]:
        """It happened. Returns the ids of those who waited for it."""
        waiting = self._by_event.get(event)
        if not waiting:
            return []
        woken = dict(waiting)
        for request in woken.values():
            self.clear(request)
        return list(woken)

    def wake_all(self) -> None:
        """A worker came or went: everything may be different, but for those that wait for a sibling."""
        self.stirred = True
        blocked = {request.id: request for waiting in self._by_event.values() for request in waiting.values()}
        for request in blocked.values():
            if request.wait is not None and request.wait.limit != SIBLING:
                self.clear(request)

    def clear(self, request: Waiter) -> None:
        """The request is tried again, or does not wait any more."""
        self.stirred = True
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
        """Every record is listed under its events, and nothing else is."""
        listed = {(event, number) for event, waiting in self._by_event.items() for number in waiting}
        assert listed == {(event, r.id) for r in blocked if r.wait for event in r.wait.events}, "a wait is not listed"
        assert all(self._by_event.values()), "an event that nobody waits for"
