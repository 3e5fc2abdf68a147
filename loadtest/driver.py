"""Sends what was planned when it was planned, and notes what happened to each request.

Kept here: every planned request ends as exactly one `Outcome` state, whatever happens; all times are seconds since the
start of the run on the event loop's monotonic clock; arrivals are never moved by how the server does.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

from kvforge import AsyncClient, AsyncRequest, Health, Sampling, Stats
from kvforge.protocol.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvforgeError,
    NotReady,
)

from .arrivals import FloatArray
from .prompts import Prompts

UNSENT, RUNNING, FINISHED, REFUSED, FAILED, TIMED_OUT, INTERRUPTED = (
    "unsent",
    "running",
    "finished",
    "refused",
    "failed",
    "timed_out",
    "interrupted",
)
ENDS = (FINISHED, REFUSED, FAILED, TIMED_OUT, INTERRUPTED, UNSENT)
# What the coordinator refuses a request with at the door; anything else that goes wrong is a failure.
DOOR = (CapacityExceeded, InvalidRequest, Draining, NotReady)

READY_S = 10.0
ASK_S = 5.0
SAMPLE_S = 0.25
SAMPLES_MAX = 1024


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. arrivals: [n] seconds from the start, rising. timeout_s: from the intended arrival to the end.

    concurrency_max: requests under way at once; those beyond it are sent later, and are charged for the wait.
    """

    arrivals: FloatArray
    prompts: Prompts
    tenant: str = "default"
    temperature: float = 0.0
    timeout_s: float = 600.0
    concurrency_max: int = 10_000


@dataclass(slots=True)
class Outcome:
    """One planned request. Times are seconds since the start of the run; -1 where it never happened.

    due_s: when it was meant to arrive. awake_s: when the generator turned to it (later than due_s: the generator was
    late). sent_s: when it was submitted (later than awake_s: it waited for `concurrency_max`). tokens_s: when each
    token came. code: the error's wire code where it did not finish.
    """

    due_s: float
    state: str = UNSENT
    code: str = ""
    awake_s: float = -1.0
    sent_s: float = -1.0
    accepted_s: float = -1.0
    ended_s: float = -1.0
    prompt_tokens: int = 0
    asked_tokens: int = 0
    cached_tokens: int = 0
    tokens_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class Depth:
    """The coordinator's queue at one moment."""

    pending: int
    running: int


@dataclass(kw_only=True)
class Measured:
    """All that a run has found. before, after: the coordinator's counters; None where it did not answer.

    wall_s, cpu_s: of this process, from the start to the last end.
    """

    outcomes: list[Outcome]
    depths: list[Depth] = field(default_factory=list)
    before: Stats | None = None
    after: Stats | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    interrupted: bool = False


class Driver:
    """Connections to one coordinator, to be entered, and the runs made over them.

    endpoint: as for `kvforge.Client`. Entering raises what `AsyncClient.wait_ready` raises.
    """

    def __init__(self, endpoint: str | None, *, connections: int = 1, timeout_s: float = 600.0) -> None:
        def client() -> AsyncClient:
            return AsyncClient(endpoint, timeout_s=timeout_s, stream_timeout_s=timeout_s)

        self._clients = [client() for _ in range(connections)]
        self._observer = client()  # its questions do not queue behind the requests
        self._stack = AsyncExitStack()
        self.health: Health | None = None

    async def __aenter__(self) -> Self:
        try:
            for client in (*self._clients, self._observer):
                await self._stack.enter_async_context(client)
                # Connected now: making the connection is no part of the first request's latency.
                self.health = await client.wait_ready(READY_S)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, plan: Plan, stop: asyncio.Event) -> Measured:
        """Carries out a plan; ends early, with what was measured so far, once `stop` is set."""
        measured = Measured(outcomes=[Outcome(due_s) for due_s in plan.arrivals.tolist()])
        measured.before = await self._stats()
        cpu_s, start = time.process_time(), asyncio.get_running_loop().time()
        run = _Run(plan, self._clients, measured.outcomes, start)
        sampler = asyncio.create_task(self._sample(measured.depths))
        work = asyncio.create_task(run.all())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            measured.interrupted = not work.done()
        finally:
            measured.wall_s = asyncio.get_running_loop().time() - start
            measured.cpu_s = time.process_time() - cpu_s
            for task in (work, sampler, stopped):
                task.cancel()
            ends = await asyncio.gather(work, sampler, stopped, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end
        measured.after = await self._stats()
        return measured

    async def _stats(self) -> Stats | None:
        with suppress(KvforgeError):
            return await self._observer.stats(timeout_s=ASK_S)
        return None

    async def _sample(self, depths: list[Depth]) -> None:
        """Notes the queue's depth at regular times; when there are too many, keeps every other and slows down."""
        pause_s = SAMPLE_S
        while True:
            if (stats := await self._stats()) is not None:
                depths.append(Depth(stats.requests.pending, stats.requests.running))
            if len(depths) >= SAMPLES_MAX:
                del depths[1::2]
                pause_s *= 2
            await asyncio.sleep(pause_s)


class _Run:
    """The requests of one run."""

    def __init__(self, plan: Plan, clients: list[AsyncClient], outcomes: list[Outcome], start: float) -> None:
        self._plan, self._clients, self._outcomes, self._start = plan, clients, outcomes, start
        self._sampling = Sampling(temperature=plan.temperature, ignore_eos=True)
        self._places = asyncio.Semaphore(plan.concurrency_max)
        self._loop = asyncio.get_running_loop()

    def _now_s(self) -> float:
        return self._loop.time() - self._start

    async def all(self) -> None:
        """Every request, each at its time. Cancelled, it cancels those under way and waits for them."""
        async with asyncio.TaskGroup() as group:
            for index, outcome in enumerate(self._outcomes):
                # Also when it is late: those under way must get their turn.
                await asyncio.sleep(max(0.0, outcome.due_s - self._now_s()))
                outcome.awake_s = self._now_s()
                await self._places.acquire()
                group.create_task(self._one(index, outcome))

    async def _one(self, index: int, outcome: Outcome) -> None:
        client = self._clients[index % len(self._clients)]
        outcome.state = RUNNING
        try:
            await self._within_time(client, index, outcome)
        except asyncio.CancelledError:
            outcome.state = INTERRUPTED
            raise
        finally:
            outcome.ended_s = self._now_s()
            self._places.release()

    async def _within_time(self, client: AsyncClient, index: int, outcome: Outcome) -> None:
        prompt, outcome.asked_tokens = self._plan.prompts.make(index)
        outcome.prompt_tokens = len(prompt)
        request: AsyncRequest | None = None
        try:
            async with asyncio.timeout_at(self._start + outcome.due_s + self._plan.timeout_s):
                outcome.sent_s = self._now_s()
                request = await client.submit(
                    prompt, max_tokens=outcome.asked_tokens, sampling=self._sampling, tenant=self._plan.tenant
                )
                outcome.accepted_s = self._now_s()
                async for _ in request:
                    outcome.tokens_s.append(self._now_s())
                finished = await request.result()
        except TimeoutError:
            outcome.state, outcome.code = TIMED_OUT, DeadlineExceeded.code
        except KvforgeError as error:
            late, refused = isinstance(error, DeadlineExceeded), request is None and isinstance(error, DOOR)
            outcome.state, outcome.code = TIMED_OUT if late else REFUSED if refused else FAILED, error.code
        else:
            whole = len(outcome.tokens_s) == outcome.asked_tokens
            outcome.state, outcome.code = (FINISHED, "") if whole else (FAILED, finished.reason)
            outcome.cached_tokens = finished.cached_tokens
        if outcome.state == TIMED_OUT and request is not None:
            with suppress(KvforgeError):
                await client.cancel(request.id, timeout_s=ASK_S)
