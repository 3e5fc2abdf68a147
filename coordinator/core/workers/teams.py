"""The ranks of one worker: several processes that compute one model together, over one pool.

Law: each rank is sent every step, and a step is settled when all have answered it; then it counts once, as rank 0 has
it, and no other rank may have drawn another token. With one rank all are gone: none of them could go on.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kvforge.protocol.errors import Conflict, ProtocolError, WorkerError
from kvforge.protocol.messages import StepResult, WorkerHello, WorkerReady

from .worker import Worker

RANKS_MAX = 64
# Of what ranks announce: must be the same of all.
ALIKE = ("model.fingerprint", "bytes_per_block", "kv_dtype", "wants_kinds", "zeroes")


class Team:
    """From the first rank's hello to the end of any.

    members: the ranks that are connected, or away after a restart of the coordinator. back: of those that were away,
    who is here again. ready: what each has announced. results: of each, those that not all have given yet. done: the
    last step that each has answered.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.members: dict[int, Worker] = {}
        self.back: set[int] = set(range(count))
        self.ready: dict[int, WorkerReady] = {}
        self.results: list[deque[StepResult]] = [deque() for _ in range(count)]
        self.done = [0] * count

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said hello."""
        return [rank for rank in range(self.count) if rank not in self.members]

    def leave(self, rank: int) -> bool:
        """A rank ends. Whether the others can go on without it: as long as they have not met."""
        if not self.missing:
            return False
        del self.members[rank]
        return True

    @property
    def others(self) -> tuple[int, ...]:
        """The connections of all ranks but rank 0."""
        return tuple(self.members[rank].number for rank in range(1, self.count))

    def announced(self) -> WorkerReady:
        """What all ranks announce together: the least of their pools. Raises Conflict, which names what they do not
        agree in."""
        first = self.ready[0]
        for rank in range(1, self.count):
            for field in ALIKE:
                mine, theirs = _of(first, field), _of(self.ready[rank], field)
                if mine != theirs:
                    raise Conflict(
                        f"the ranks of worker {self.name!r} must be alike: {field} is {mine!r} of rank 0 and "
                        f"{theirs!r} of rank {rank}; start them with the same model, settings and kind of device"
                    )
        return msgspec.structs.replace(first, blocks=min(each.blocks for each in self.ready.values()))

    def answer(self, rank: int, result: StepResult) -> bool:
        """Takes a rank's result; False where it has given it before. Raises ProtocolError where one is left out."""
        if result.step_id <= self.done[rank]:
            return False
        if result.step_id != self.done[rank] + 1:
            raise ProtocolError(f"step {self.done[rank] + 1} is due of rank {rank}, the result names {result.step_id}")
        self.done[rank] = result.step_id
        self.results[rank].append(result)
        return True

    def settled(self) -> StepResult | None:
        """The oldest result that all have given, as rank 0 has it, and as long as the slowest took; None where one is
        due. Raises WorkerError where they have computed different things."""
        if not all(self.results):
            return None
        first, *rest = (waiting.popleft() for waiting in self.results)
        for rank, other in enumerate(rest, 1):
            if difference := _difference(first, other):
                raise WorkerError(
                    f"worker {self.name}: rank {rank} has computed something else than rank 0 in step {first.step_id}: "
                    f"{difference}"
                )
        return msgspec.structs.replace(first, duration_us=max(first.duration_us, *(each.duration_us for each in rest)))

    def begin(self, step_id: int) -> None:
        """The pool is registered: `step_id` was the last step of whoever had its place."""
        self.done = [step_id] * self.count

    def lagging(self, step_id: int) -> list[int]:
        """The ranks that have not answered a step."""
        return [rank for rank, done in enumerate(self.done) if done < step_id]


def check_rank(message: WorkerHello) -> None:
    """Raises ProtocolError where a hello names a rank that cannot be."""
    if not 1 <= message.ranks <= RANKS_MAX or not 0 <= message.rank < message.ranks:
        problem = f"there are 1 to {RANKS_MAX} of them, and the first is 0"
        raise ProtocolError(f"worker {message.name!r} is rank {message.rank} of {message.ranks}: {problem}")


def _of(ready: WorkerReady, field: str) -> object:
    return ready.model.fingerprint if field == "model.fingerprint" else getattr(ready, field)


def _difference(one: StepResult, other: StepResult) -> str:
    """In words; "" where there is none."""
    if {each.slot for each in one.errors} != {each.slot for each in other.errors}:
        return "other rows failed"
    if one.slots.tobytes() != other.slots.tobytes():
        return "other rows were sampled"
    for slot, mine, theirs in zip(one.slots.tolist(), one.tokens.tolist(), other.tokens.tolist(), strict=False):
        if mine != theirs:
            return f"slot {slot}, token {theirs} in place of {mine}"
    return "" if one.tokens.size == other.tokens.size else "another number of tokens"
