"""Sessions of a coding agent: a turn is the previous prompt, the actual answer and tool results, after a pause.

The format is that of callanjfox/kv-cache-tester, one session a line. Its block ids identify the full blocks of a
prompt. If a prompt starts with all blocks of the previous one, the turn keeps everything, including the actual answer.
If the agent edited its history, the turn keeps the common prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from kvforge.protocol.errors import InvalidRequest

from .blocks import Blocks
from .content import cut_turn
from .draws import FloatArray
from .files import broken
from .lengths import LENGTH_MAX
from .workload import Turn

SUBAGENT = "subagent"
Runs = list[tuple[int, int]]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Request(msgspec.Struct):
    """A request, or a subagent: it has `requests` instead of a prompt, with times from its own start."""

    t: _Seconds
    type: str
    input_tokens: _Tokens = msgspec.field(name="in", default=0)
    output_tokens: _Tokens = msgspec.field(name="out", default=0)
    hash_runs: Runs = []
    think_time: _Seconds = 0.0
    requests: list[_Request] = []


class _Line(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)]
    requests: list[_Request]


@dataclass(frozen=True, slots=True)
class Agent:
    """The requests of one agent.

    Attributes:
        session: Its session in the file; agents of a session share blocks.
        start_s: Its start after that of the session.
        kind: "agent" or SUBAGENT.
        block_size: Tokens per block.
        requests: Its requests.
    """

    session: int
    start_s: float
    kind: str
    block_size: int
    requests: tuple[_Request, ...]


def read(file: str, lines: Iterable[tuple[int, str]]) -> list[Agent]:
    """Return the agents of all sessions in order, each main agent before its subagents.

    Raises:
        InvalidRequest: A line is malformed.
    """
    decoder = msgspec.json.Decoder(_Line)
    agents: list[Agent] = []
    session = 0
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise broken(file, number, str(error)) from None
        found = list(_agents(session, row))
        for agent in found:
            _check(file, number, agent)
        agents.extend(found)
        session += bool(found)
    if not agents:
        raise InvalidRequest("trace", f"{file} contains no requests")
    return agents


def _agents(session: int, row: _Line) -> Iterator[Agent]:
    main = tuple(request for request in row.requests if not request.requests)
    if main:
        yield Agent(session, 0.0, "agent", row.block_size, main)
    for request in row.requests:
        if request.requests:
            yield Agent(session, request.t, SUBAGENT, row.block_size, tuple(request.requests))


def _check(file: str, number: int, agent: Agent) -> None:
    for request in agent.requests:
        blocks = sum(count for _, count in request.hash_runs)
        if request.input_tokens < 1 or request.requests:
            raise broken(file, number, f"the request at {request.t:g} s has no prompt, or a subagent has subagents")
        if blocks != request.input_tokens // agent.block_size or any(count < 1 for _, count in request.hash_runs):
            raise broken(
                file,
                number,
                f"at {request.t:g} s: {blocks} blocks of {agent.block_size} do not match {request.input_tokens} tokens",
            )


class Agents:
    """The `Content` of a trace of agents.

    Args:
        agents: The agents.
        starts: [sessions] s, the start of each session; the file repeats if there are more. None for a closed loop, in
            which subagents are sessions of their own.
        count: The maximum number of agents.
        end_s: No agent arrives later.
        seed: The seed of the tokens.
        vocab: Token ids are below it.
        length_scale: The factor of all lengths.
        think_scale: The factor of all pauses.
        context_max: The context that each request must fit.

    Attributes:
        times: The arrival of each agent, ascending. A subagent keeps its recorded delay, times `think_scale`.
    """

    def __init__(
        self,
        agents: list[Agent],
        starts: FloatArray | None,
        *,
        count: int | None = None,
        end_s: float | None = None,
        seed: int,
        vocab: int,
        length_scale: float = 1.0,
        think_scale: float = 1.0,
        context_max: int | None = None,
    ) -> None:
        self._seed, self._vocab, self._scale = seed, vocab, length_scale
        self._think_scale, self._context_max = think_scale, context_max
        self._agents = agents
        self._sessions = agents[-1].session + 1
        self.times: FloatArray | None = None
        # For each arrival: the agent, and how often its session has repeated.
        self._coming = [(place % len(agents), place // len(agents)) for place in range(count or len(agents))]
        if starts is not None:
            of_session: list[list[int]] = [[] for _ in range(self._sessions)]
            for index, agent in enumerate(agents):
                of_session[agent.session].append(index)
            coming = [
                (start_s + agents[index].start_s * think_scale, index, place // self._sessions)
                for place, start_s in enumerate(starts.tolist())
                for index in of_session[place % self._sessions]
            ]
            coming = [arrival for arrival in sorted(coming) if end_s is None or arrival[0] < end_s][:count]
            self.times = np.array([time_s for time_s, _, _ in coming])
            self._coming = [(index, lap) for _, index, lap in coming]
        self._plans: dict[int, list[tuple[int, int, int, bool]]] = {}
        plans = [self._plan(index) for index, _ in self._coming]
        self.requests = sum(len(plan) for plan in plans)
        self.shortened = sum(cut for plan in plans for *_, cut in plan)

    def __len__(self) -> int:
        return len(self._coming)

    def kind(self, index: int) -> str:
        """Return the class of a session's requests; see `Content`."""
        return self._agents[self._coming[index % len(self)][0]].kind

    def turns(self, index: int) -> tuple[Turn, ...]:
        """Return the requests of a session; see `Content`. It takes about 30 us per turn."""
        which, lap = self._coming[index % len(self)]
        agent = self._agents[which]
        blocks = self._blocks(agent)
        scope = blocks.scope(agent.session, lap, index // len(self))
        made = []
        for number, (request, (kept, new, output, _)) in enumerate(zip(agent.requests, self._plan(which), strict=True)):
            # The trace has no id for the final partial block, so it is never shared.
            own = -1 - number - which * LENGTH_MAX
            ids = np.concatenate([*(np.arange(first, first + count) for first, count in request.hash_runs), [own]])
            made.append(
                Turn(
                    tokens=blocks.tokens(scope, ids.astype(np.int64), kept, kept + new),
                    output_tokens=output,
                    kept=kept,
                    think_s=request.think_time * self._think_scale if number else 0.0,
                )
            )
        return tuple(made)

    def _blocks(self, agent: Agent) -> Blocks:
        return Blocks(agent.block_size, seed=self._seed, vocab=self._vocab, scale=self._scale)

    def _plan(self, which: int) -> list[tuple[int, int, int, bool]]:
        """Return the kept, new and generated tokens of each turn of an agent, and whether it was truncated."""
        if which not in self._plans:
            agent = self._agents[which]
            blocks = self._blocks(agent)
            planned: list[tuple[int, int, int, bool]] = []
            shared = [0, *(common(before.hash_runs, after.hash_runs) for before, after in pairwise(agent.requests))]
            for number, (request, count) in enumerate(zip(agent.requests, shared, strict=True)):
                length = max(1, blocks.scaled(request.input_tokens))
                kept = 0
                if number:
                    everything = count == agent.requests[number - 1].input_tokens // agent.block_size
                    held = sum(planned[-1][:3])
                    kept = min(held if everything else blocks.scaled(count * agent.block_size), held, length - 1)
                output = max(1, blocks.scaled(request.output_tokens))
                planned.append(cut_turn(kept, length - kept, output, self._context_max))
            self._plans[which] = planned
        return self._plans[which]


def common(one: Runs, other: Runs) -> int:
    """Return how many leading ids two lists of runs (first, count) have in common."""
    shared = 0
    left, right = iter(one), iter(other)
    (a, a_count), (b, b_count) = next(left, (0, 0)), next(right, (0, 0))
    while a_count and b_count and a == b:
        step = min(a_count, b_count)
        shared += step
        a, a_count, b, b_count = a + step, a_count - step, b + step, b_count - step
        if not a_count:
            a, a_count = next(left, (0, 0))
        if not b_count:
            b, b_count = next(right, (0, 0))
    return shared
