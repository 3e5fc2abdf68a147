"""Prepares sessions in advance, so that no request waits for its own preparation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from kvforge.loadtest.load.workload import Session, Workload

from .plan import Plan

AHEAD_S = 2.0
AHEAD_TOKENS_MAX = 4_000_000
AHEAD_SESSIONS_MAX = 20_000
# A session is prepared when nothing is due for this long, or earlier if few are left.
GAP_S = 0.001
FEW_S = 0.5
FEW = 32


@dataclass(frozen=True, slots=True)
class PreparedSession:
    """A prepared session. `due_s` is its arrival; -1 for as soon as there is a place."""

    index: int
    due_s: float
    session: Session
    tokens: int


class SessionPrefetcher:
    """The sessions of one process in order, prepared some time before they are taken.

    Attributes:
        start: The start of the run (time.monotonic).
    """

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self._workload = workload
        self.start = 0.0
        self._made: deque[PreparedSession] = deque()
        self._tokens = 0
        self._indices = self._coming(plan)
        self._next = next(self._indices, None)

    def _coming(self, plan: Plan) -> Iterator[tuple[int, float]]:
        """Yield the sessions to prepare: index and arrival."""
        arrivals, index, step = self._workload.arrivals, plan.index, plan.processes
        if arrivals is not None:
            for own in range(index, len(arrivals), step):
                yield own, float(arrivals[own])
            return
        while plan.sessions_max is None or index < plan.sessions_max:
            yield index, -1.0
            index += step

    @property
    def over(self) -> bool:
        """Whether no session is left."""
        return not self._made and self._next is None

    @property
    def due_s(self) -> float | None:
        """The arrival of the next session; None if there is none."""
        if self._made:
            return self._made[0].due_s
        return self._next[1] if self._next is not None else None

    def pop_session(self) -> PreparedSession:
        """Return the next session, which must exist."""
        if not self._made:
            self._make()
        coming = self._made.popleft()
        self._tokens -= coming.tokens
        return coming

    def rest(self) -> Iterator[tuple[int, float]]:
        """Yield the index and arrival of each remaining session; none for a closed loop, which simply ends."""
        yield from ((coming.index, coming.due_s) for coming in self._made if coming.due_s >= 0)
        while self._next is not None and self._next[1] >= 0:
            yield self._next
            self._next = next(self._indices, None)

    def fill(self) -> None:
        """Prepare as many sessions as the limits allow, before the start."""
        while not self._full:
            self._make()

    def top_up(self, due: float) -> None:
        """Prepare a session if few are left, and another one if nothing is due before `due` (time.monotonic).

        It is called for each session taken and some hundred times a second, which keeps up with any rate.
        """
        if self._few and not self._full:
            self._make()
        if not self._full and due - monotonic() > GAP_S:
            self._make()

    def _make(self) -> None:
        assert self._next is not None, "one is left"
        index, due_s = self._next
        session = self._workload.session(index)
        tokens = sum(len(turn.tokens) for turn in session.turns)
        self._made.append(PreparedSession(index, due_s, session, tokens))
        self._tokens += tokens
        self._next = next(self._indices, None)

    @property
    def _full(self) -> bool:
        made = self._made
        return (
            self._next is None
            or len(made) >= AHEAD_SESSIONS_MAX
            or self._tokens >= AHEAD_TOKENS_MAX
            or (bool(made) and made[-1].due_s - made[0].due_s > AHEAD_S)
            or (self._next[1] < 0 and len(made) >= 2 * FEW)
        )

    @property
    def _few(self) -> bool:
        made = self._made
        if not made or made[-1].due_s < 0:
            return len(made) < FEW
        return len(made) < FEW and made[-1].due_s + self.start - monotonic() < FEW_S
