"""The event loop of one driver process: sends each request when it is due, whatever the server does.

There are no tasks and nothing blocks: a heap of times with one precise timer (`clock`), and callbacks from the target.

Invariants: turns of a session are sequential. Every turn that was due has one `Outcome`, and so has every other turn of
a session that began (UNSENT, never due). A session that never began is one UNSENT outcome.

The clock also ticks, and the lateness of each tick reveals stalls of the loop. Ticks that fall into a stall count too,
each with its own lateness.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from kvforge.loadtest.load import workload as load
from kvforge.loadtest.load.workload import NO_TOKENS, Turn, Workload
from kvforge.protocol.messages import Int32Array

from .clock import Clock
from .outcome import FINISHED, RUNNING, DriverStats, Outcome
from .plan import Plan
from .prefetch import PreparedSession, SessionPrefetcher
from .progress import Progress
from .target import Target, TargetRequest

TICK_S = 0.005


class _RunningSession:
    """A session in progress.

    Attributes:
        outcome: The outcome of the current turn; None until it is due.
        held: The token ids of the session so far.
    """

    __slots__ = ("cancel", "coming", "held", "history", "outcome", "prompt", "text", "turn")

    def __init__(self, coming: PreparedSession) -> None:
        self.coming = coming
        self.turn = 0
        self.held: Int32Array = NO_TOKENS
        self.history: tuple[tuple[str, str], ...] = ()
        self.outcome: Outcome | None = None
        self.cancel: Callable[[], None] | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the prompt of the turn, as early as possible: when the previous turn ends."""
        turn = self.coming.session.turns[self.turn]
        self.prompt = load.prompt(turn, self.held)
        # Text cannot be truncated to a number of tokens, so a turn that keeps only a part has no text.
        self.text = turn.text if turn.kept == 0 or self.history else ""

    @property
    def followed(self) -> bool:
        """Whether the next turn includes the answer to this one."""
        turns = self.coming.session.turns
        return self.turn + 1 < len(turns) and turns[self.turn + 1].kept != 0

    def follow(self, outcome: Outcome) -> Turn | None:
        """Advance past a finished turn. Return the next turn; None after the last."""
        turns = self.coming.session.turns
        if self.turn + 1 == len(turns):
            return None
        self.held = np.concatenate((self.prompt, np.array(outcome.tokens, np.int32)))
        self.turn += 1
        self.outcome = None
        exchange = ((self.text, outcome.answer),)
        self.history = self.history + exchange if turns[self.turn].kept == load.ALL and self.text else ()
        self._prepare()
        return turns[self.turn]


class Engine:
    """One process's share of a run. The constructor prepares the first sessions, so that the run can begin at once."""

    def __init__(self, workload: Workload, target: Target, plan: Plan) -> None:
        self._target, self._plan = target, plan
        self._prefetcher = SessionPrefetcher(workload, plan)
        self._prefetcher.fill()
        self._open = workload.arrivals is not None
        self._outcomes: list[Outcome] = []
        self._late_s = array("d")
        self._ends: Counter[str] = Counter()
        self._tokens = 0
        self._under_way: dict[_RunningSession, None] = {}
        self._under_way_max = plan.part(plan.concurrency_max)
        self._waiting: deque[_RunningSession] = deque()  # due, waiting because of `concurrency_max`
        self._arrived: deque[_RunningSession] = deque()  # due, waiting because of `closed`
        self._plays: dict[_RunningSession, None] = {}  # sessions in progress
        self._places = plan.places() if plan.closed else None
        self._clients = plan.part(plan.clients)
        self._over = False

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return Progress(
            due=len(self._outcomes), under_way=len(self._under_way), ends=dict(self._ends), output_tokens=self._tokens
        )

    async def run(self, start: float, stop: asyncio.Event) -> tuple[list[Outcome], DriverStats]:
        """Run from `start` (time.monotonic) to the last end. Once `stop` is set, cancel what is in flight."""
        loop = asyncio.get_running_loop()
        self._start = self._prefetcher.start = start
        self._done = loop.create_future()
        self._clock = Clock()
        loop.set_exception_handler(self._broken)
        stopping = asyncio.create_task(stop.wait())
        # The data lives until the end and cycles are few: garbage collection would only stall the loop.
        gc.collect()
        gc.disable()
        cpu_s = time.process_time()
        try:
            self._clock.at(start, self._begin)
            await asyncio.wait({stopping, self._done}, return_when=asyncio.FIRST_COMPLETED)
            self._end()
            if self._done.done():
                self._done.result()
        finally:
            self._clock.close()
            stopping.cancel()
            gc.enable()
            loop.set_exception_handler(None)
        wall_s = max(0.0, monotonic() - start)
        return self._outcomes, DriverStats(late_s=self._late_s, cpu_s=time.process_time() - cpu_s, wall_s=wall_s)

    # ------------------------------------------------------------------------------------------------ what is due

    def _begin(self) -> None:
        self._tick(self._start)
        if self._open:
            self._next_arrival()
        else:
            for _ in range(self._places or 0):
                self._fill_place(0.0)
        self._check_over()

    def _tick(self, due: float) -> None:
        now = monotonic()
        while due <= now:
            self._late_s.append(now - due)
            due += TICK_S
        self._prefetcher.top_up(self._next_due())
        self._clock.at(due, partial(self._tick, due))

    def _next_due(self) -> float:
        due_s = self._prefetcher.due_s if self._open else None
        return min(self._clock.next_at, self._start + due_s if due_s is not None else float("inf"))

    def _next_arrival(self) -> None:
        if (due_s := self._prefetcher.due_s) is not None:
            self._clock.at(self._start + due_s, self._arrive)

    def _arrive(self) -> None:
        """Start the session that arrives, and others that are due by now."""
        while True:
            play = self._new_play(self._prefetcher.pop_session())
            if self._places is None or len(self._plays) - len(self._arrived) <= self._places:
                self._due(play, play.coming.due_s)
            else:
                self._arrived.append(play)
                self._turn_to(play, play.coming.due_s)
            due_s = self._prefetcher.due_s
            if due_s is None or self._start + due_s > monotonic():
                break
        self._next_arrival()
        self._prefetcher.top_up(self._next_due())

    def _fill_place(self, free_s: float) -> None:
        """Start the next session of a closed loop without arrivals."""
        if self._prefetcher.over or self._too_late(free_s):
            return
        self._due(self._new_play(self._prefetcher.pop_session()), free_s)

    def _too_late(self, due_s: float) -> bool:
        """Return whether the load has ended by then."""
        return self._plan.duration_s is not None and due_s >= self._plan.duration_s

    def _new_play(self, coming: PreparedSession) -> _RunningSession:
        play = _RunningSession(coming)
        self._plays[play] = None
        return play

    # ----------------------------------------------------------------------------------------------- one request

    def _due(self, play: _RunningSession, due_s: float) -> None:
        self._turn_to(play, due_s)
        self._place(play)

    def _turn_to(self, play: _RunningSession, due_s: float) -> None:
        """Create the outcome of a request that is due."""
        coming, turn = play.coming, play.coming.session.turns[play.turn]
        play.outcome = Outcome(
            session=coming.index,
            turn=play.turn,
            due_s=due_s,
            tenant=coming.session.tenant,
            kind=coming.session.kind,
            awake_s=monotonic() - self._start,
            prompt_tokens=len(play.prompt),
            asked_tokens=turn.output_tokens,
        )
        self._outcomes.append(play.outcome)

    def _place(self, play: _RunningSession) -> None:
        if len(self._under_way) >= self._under_way_max:
            self._waiting.append(play)
        else:
            self._send(play)

    def _send(self, play: _RunningSession) -> None:
        outcome, plan = play.outcome, self._plan
        assert outcome is not None, "it is due"
        outcome.state = RUNNING
        ask = TargetRequest(
            prompt=play.prompt,
            output_tokens=outcome.asked_tokens,
            text=play.text,
            history=play.history,
            followed=play.followed,
            tenant=outcome.tenant,
            temperature=plan.temperature,
            seed=plan.draw(outcome.session, outcome.turn),
            client=(outcome.session // plan.processes) % self._clients,
            until=self._start + outcome.due_s + plan.timeout_s,
        )
        self._under_way[play] = None
        outcome.sent_s = monotonic() - self._start
        cancel = self._target.send(ask, outcome, self._start, partial(self._ended, play))
        if play in self._under_way:
            play.cancel = cancel

    def _ended(self, play: _RunningSession, outcome: Outcome) -> None:
        """Handle the end of a request."""
        del self._under_way[play]
        play.cancel = None
        self._ends[outcome.state] += 1
        self._tokens += len(outcome.tokens_s)
        if self._over:
            return
        turn = play.follow(outcome) if outcome.state == FINISHED else None
        if turn is not None and not self._too_late(outcome.ended_s + turn.think_s):
            due_s = outcome.ended_s + turn.think_s
            self._clock.at(self._start + due_s, partial(self._due, play, due_s))
        else:
            self._leave(play)
            if self._arrived:
                self._place(self._arrived.popleft())
            elif not self._open:
                self._clock.at(self._start + outcome.ended_s, partial(self._fill_place, outcome.ended_s))
            # Check after the callbacks above, which may start the next session.
            self._clock.at(self._start + outcome.ended_s, self._check_over)
        while self._waiting and len(self._under_way) < self._under_way_max:
            self._send(self._waiting.popleft())

    def _leave(self, play: _RunningSession) -> None:
        """End a session; turns that it did not reach are UNSENT."""
        session = play.coming.session
        del self._plays[play]
        for number in range(play.turn + (play.outcome is not None), len(session.turns)):
            self._unsent(play.coming.index, number, -1.0, session.tenant, session.kind)

    def _unsent(self, index: int, turn: int, due_s: float, tenant: str = "default", kind: str = "") -> None:
        self._outcomes.append(Outcome(session=index, turn=turn, due_s=due_s, tenant=tenant, kind=kind))

    # --------------------------------------------------------------------------------------------------- the end

    def _check_over(self) -> None:
        if not self._plays and (self._prefetcher.over or not self._open) and not self._done.done():
            self._done.set_result(None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail the run after an exception in a callback: it would be worthless and might never end."""
        error = context.get("exception")
        if not self._done.done():
            self._done.set_exception(error or RuntimeError(context["message"]))
        else:
            loop.default_exception_handler(context)

    def _end(self) -> None:
        """Cancel what is in flight and record what was planned but not sent."""
        self._over = True
        for play in tuple(self._plays):
            if play.cancel is not None:
                play.cancel()
            self._leave(play)
        for index, due_s in self._prefetcher.rest():
            self._unsent(index, 0, due_s)
