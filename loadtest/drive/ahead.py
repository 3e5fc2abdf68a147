"""Makes sessions ahead of their time, so that making one is not what its request waits for."""

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
# A session is made when nothing is due for so long; sooner only where few are left.
GAP_S = 0.001
FEW_S = 0.5
FEW = 32


@dataclass(frozen=True, slots=True)
class Coming:
    """A session that is to begin. due_s: its arrival; -1: as soon as there is a place."""

    index: int
    due_s: float
    session: Session
    tokens: int


class Ahead:
    """The sessions of one process in their order, made some time before they are taken.

    start: when the run begins, on time.monotonic.
    """

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self._workload = workload
        self.start = 0.0
        self._made: deque[Coming] = deque()
        self._tokens = 0
        self._indices = self._coming(plan)
        self._next = next(self._indices, None)

    def _coming(self, plan: Plan) -> Iterator[tuple[int, float]]:
        """What is still to be made: a session's number, and when it is due."""
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
        """No session is left."""
        return not self._made and self._next is None

    @property
    def due_s(self) -> float | None:
        """When the next one is due; None: there is none."""
        if self._made:
            return self._made[0].due_s
        return self._next[1] if self._next is not None else None

    def take(self) -> Coming:
        """The next session: there must be one."""
        if not self._made:
            self._make()
        coming = self._made.popleft()
        self._tokens -= coming.tokens
        return coming

    def rest(self) -> Iterator[tuple[int, float]]:
        """The number and arrival of each that was not taken; none of a closed loop, which ends where it ends."""
        yield from ((coming.index, coming.due_s) for coming in self._made if coming.due_s >= 0)
        while self._next is not None and self._next[1] >= 0:
            yield self._next
            self._next = next(self._indices, None)

    def fill(self) -> None:
        """As many as there is room for: before the start."""
        while not self._full:
            self._make()

    def top_up(self, due: float) -> None:
        """Makes one where few are left, and one more where nothing is `due` (on time.monotonic) for a while.

        Called for each that is taken and some hundred times a second, which keeps up with any rate.
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
        self._made.append(Coming(index, due_s, session, tokens))
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
