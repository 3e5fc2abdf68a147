"""Verifies that no accepted request of a run was lost and no answer changed.

Each answer is compared token by token with its twin: the same request, sent again without disturbance. An answer
without a twin counts as unproven, never as kept.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from kvforge import AsyncClient, Finished, SamplingParams
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Int32Array

from ..drive.outcome import FAILED, FINISHED, TIMED_OUT, Outcome
from ..load.workload import Workload, prompts

CONCURRENCY = 64
TWIN_S = 600.0
LISTED_MAX = 20
NO_TOKEN = -1
WHOLE = ("length", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRequest:
    """An accepted request that did not finish with all its tokens."""

    request_id: int
    session: int
    turn: int
    state: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An answer that differs from its twin at `offset`: `token` and `twin_token`, NO_TOKEN where one has ended."""

    request_id: int
    session: int
    turn: int
    offset: int
    token: int
    twin_token: int


@dataclass(slots=True, kw_only=True)
class DurabilityCheck:
    """The result of the check.

    Attributes:
        accepted: The number of accepted requests.
        finished: How many of these finished.
        compared: The number of answers with a twin.
        compared_tokens: Their tokens.
        lost: The lost requests.
        differences: The changed answers.
        unproven: The answers without a twin: request id to reason.
        seconds: The duration of the check.
    """

    accepted: int = 0
    finished: int = 0
    compared: int = 0
    compared_tokens: int = 0
    lost: list[LostRequest] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unproven: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether no request was lost, no answer changed and every answer was compared."""
        return not (self.lost or self.differences or self.unproven)

    def sentences(self) -> list[str]:
        """Describe the result for people, the worst first, with at most LISTED_MAX lines of each kind."""
        lines = [
            f"request {one.request_id} changed: token {one.offset} is {_token(one.token)}, without faults it is "
            f"{_token(one.twin_token)}"
            for one in self.differences[:LISTED_MAX]
        ]
        lines += [f"request {one.request_id} was lost: {one.state}, {one.problem}" for one in self.lost[:LISTED_MAX]]
        lines += [f"request {i} is unproven: {why}" for i, why in list(self.unproven.items())[:LISTED_MAX]]
        counts = (
            f"{self.finished} of {self.accepted} accepted requests finished, {len(self.lost)} were lost; "
            f"{self.compared} answers ({self.compared_tokens} tokens) were compared with undisturbed twins, "
            f"{len(self.differences)} differ, {len(self.unproven)} have no twin"
        )
        return [f"the promise was {'kept' if self.kept else 'BROKEN'}: {counts}", *lines]

    def json(self) -> dict[str, Any]:
        """Return plain values: the counts, and the first LISTED_MAX of each kind."""
        return {
            "kept": self.kept,
            "accepted": self.accepted,
            "finished": self.finished,
            "compared": self.compared,
            "compared_tokens": self.compared_tokens,
            "lost": len(self.lost),
            "different": len(self.differences),
            "unproven": len(self.unproven),
            "seconds": self.seconds,
            "lost_requests": [asdict(one) for one in self.lost[:LISTED_MAX]],
            "differences": [asdict(one) for one in self.differences[:LISTED_MAX]],
            "unproven_requests": [
                {"request_id": i, "problem": why} for i, why in list(self.unproven.items())[:LISTED_MAX]
            ],
        }


@dataclass(frozen=True, slots=True)
class Twin:
    """An answer and the request to send again. `prompt` is what was actually sent."""

    outcome: Outcome
    prompt: Int32Array


async def check(
    outcomes: Sequence[Outcome],
    workload: Workload,
    client: AsyncClient,
    *,
    draw: Callable[[int, int], int],
    temperature: float = 0.0,
    concurrency: int = CONCURRENCY,
    stop: asyncio.Event | None = None,
) -> DurabilityCheck:
    """Check how every accepted request ended, and send those with an answer again without disturbance.

    A twin that fails leaves its answer unproven.

    Args:
        outcomes: The outcomes of a run of `workload` through the coordinator, with their tokens.
        workload: The load.
        client: The connection for the twins.
        draw: (session, turn) -> the seed of the request's draws (`drive.plan.Plan.draw`).
        temperature: The temperature of the run.
        concurrency: The number of twins in flight.
        stop: Once set, no more twins are sent; the remaining answers are unproven.
    """
    began, stop = monotonic(), stop or asyncio.Event()
    accepted = [outcome for outcome in outcomes if outcome.request_id > 0]
    promise = DurabilityCheck(accepted=len(accepted), lost=lost(accepted))
    promise.finished = sum(outcome.state == FINISHED for outcome in accepted)
    places = asyncio.Semaphore(concurrency)

    async def check_twin(twin: Twin) -> None:
        try:
            if stop.is_set():
                promise.unproven[twin.outcome.request_id] = "the check was interrupted"
                return
            done = await _answer(client, twin, draw, temperature)
            if done.reason in WHOLE:
                compare(promise, twin.outcome, done.tokens)
            else:
                promise.unproven[twin.outcome.request_id] = f"its twin was {done.reason}"
        except KvforgeError as error:
            promise.unproven[twin.outcome.request_id] = f"its twin failed: {error}"
        finally:
            places.release()

    asked = set()
    async with asyncio.TaskGroup() as group:
        for twin in twins(accepted, workload):
            asked.add(twin.outcome.request_id)
            await places.acquire()
            group.create_task(check_twin(twin))
    for outcome in accepted:
        if outcome.state == FINISHED and outcome.request_id not in asked:
            promise.unproven[outcome.request_id] = "its tokens, or those of earlier turns, are unknown"
    promise.seconds = monotonic() - began
    return promise


def lost(accepted: Sequence[Outcome]) -> list[LostRequest]:
    """Return the requests that did not finish, finished without all tokens, or share an id with another.

    Requests that the driver abandoned because the run was interrupted are not lost.
    """
    seen: set[int] = set()
    found = []
    for outcome in accepted:
        problem = ""
        if outcome.state in (FAILED, TIMED_OUT):
            problem = f"{outcome.code}: {outcome.message}".strip(": ") or "no error was reported"
        elif outcome.state == FINISHED and 0 < len(outcome.tokens) != outcome.asked_tokens:
            problem = f"it has {len(outcome.tokens)} of {outcome.asked_tokens} tokens"
        elif outcome.request_id in seen:
            problem = "another request of the run has the same id"
        seen.add(outcome.request_id)
        if problem:
            place = {"request_id": outcome.request_id, "session": outcome.session, "turn": outcome.turn}
            found.append(LostRequest(**place, state=outcome.state, problem=problem))
    return found


def twins(accepted: Sequence[Outcome], workload: Workload) -> Iterator[Twin]:
    """Yield the requests to send again: all that have tokens, including lost ones with a partial answer.

    The prompt of a later turn contains the actual answers to earlier turns.
    """
    sessions: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in accepted:
        if len(outcome.tokens):
            sessions[outcome.session].append(outcome)
    for index, turns in sessions.items():
        by_turn = {outcome.turn: outcome for outcome in turns}
        answers: list[Int32Array] = []
        while (earlier := by_turn.get(len(answers))) is not None:
            answers.append(np.array(earlier.tokens, np.int32))
        sent = prompts(workload.session(index), answers)
        yield from (Twin(by_turn[turn], prompt) for turn, prompt in enumerate(sent))


def compare(promise: DurabilityCheck, outcome: Outcome, twin: Sequence[int]) -> None:
    """Compare an answer with its twin's tokens; a lost one as far as it got."""
    mine = np.array(outcome.tokens, np.int64)
    other = np.array(twin, np.int64)
    whole = outcome.state == FINISHED
    promise.compared += 1
    promise.compared_tokens += int(mine.size)
    both = min(mine.size, other.size)
    differs = np.flatnonzero(mine[:both] != other[:both])
    if differs.size:
        offset = int(differs[0])
    elif mine.size > other.size or (whole and mine.size < other.size):
        offset = both
    else:
        return
    place = {"request_id": outcome.request_id, "session": outcome.session, "turn": outcome.turn, "offset": offset}
    promise.differences.append(Difference(**place, token=_at(mine, offset), twin_token=_at(other, offset)))


async def _answer(client: AsyncClient, twin: Twin, draw: Callable[[int, int], int], temperature: float) -> Finished:
    outcome = twin.outcome
    seed = draw(outcome.session, outcome.turn) if temperature else 0
    request = await client.submit(
        twin.prompt,
        max_tokens=outcome.asked_tokens,
        sampling=SamplingParams(temperature=temperature, seed=seed, ignore_eos=True),
        tenant=outcome.tenant,
        retry_s=TWIN_S,
    )
    return await request.result(TWIN_S)


def _at(tokens: npt.NDArray[np.int64], offset: int) -> int:
    return int(tokens[offset]) if offset < tokens.size else NO_TOKEN


def _token(token: int) -> str:
    return "missing" if token == NO_TOKEN else str(token)
