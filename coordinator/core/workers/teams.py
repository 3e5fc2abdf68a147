"""The ranks of one worker: several processes that compute one model together, over one pool.

Every rank executes every step. A step is settled when all ranks have answered it; it then counts once, with the
result of rank 0, and all ranks must have sampled the same tokens. If one rank is lost, all end, since the others
cannot continue.

Each rank has a host file of its own, with its share of each block. They count as one file: a block is saved when all
ranks have acknowledged it, and is missed when one of them does not find its share.
"""

from __future__ import annotations

import hashlib
from collections import deque

import msgspec
import numpy as np

from kvforge.protocol.errors import Conflict, ProtocolError, WorkerError
from kvforge.protocol.messages import NO_INT32, Int32Array, StepResult, WorkerHello, WorkerReady

from .worker import Worker

RANKS_MAX = 64
IDENTITY_BYTES = 16  # of the host files of all ranks
# Fields of the announcement that must agree between ranks.
ALIKE = (
    *("model.fingerprint", "bytes_per_block", "kv_dtype", "wants_kinds", "zeroes", "state_blocks", "prompt_chunk"),
    *("window", "window_pages", "window_blocks", "drafts", "model_drafts", "host_blocks", "disk_blocks"),
)


class Team:
    """The ranks of one worker, from the first handshake to the end of any rank.

    Attributes:
        members: The ranks that are connected, or away after a restart of the coordinator.
        back: Ranks that are connected again after such a restart.
        ready: The announcement of each rank.
        results: For each rank, the results that other ranks have not given yet.
        done: The last step that each rank has answered.
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
        """The ranks that have not connected."""
        return [rank for rank in range(self.count) if rank not in self.members]

    def leave(self, rank: int) -> bool:
        """Remove a rank. Return whether the others can continue, which they can until all have met."""
        if not self.missing:
            return False
        del self.members[rank]
        return True

    @property
    def others(self) -> tuple[int, ...]:
        """The connections of all ranks except rank 0."""
        return tuple(self.members[rank].number for rank in range(1, self.count))

    def announced(self) -> WorkerReady:
        """Combine the announcements of all ranks: the smallest of their pools, and their host files as one.

        Raises:
            Conflict: The ranks disagree in a field.
        """
        first = self.ready[0]
        for rank in range(1, self.count):
            for field in ALIKE:
                mine, theirs = _of(first, field), _of(self.ready[rank], field)
                if mine != theirs:
                    raise Conflict(
                        f"the ranks of worker {self.name!r} disagree: {field} is {mine!r} on rank 0 and "
                        f"{theirs!r} on rank {rank}; start them with the same model, settings and kind of device"
                    )
        ready = [self.ready[rank] for rank in range(self.count)]
        identities = [each.host_identity for each in ready]
        return msgspec.structs.replace(
            first,
            blocks=min(each.blocks for each in ready),
            draft_states=min(each.draft_states for each in ready),
            host_identity=_joint_identity(identities) if first.host_blocks else "",
            host_new=all(each.host_new for each in ready),
        )

    def answer(self, rank: int, result: StepResult) -> bool:
        """Take a rank's result. Return False if the rank has answered this step before.

        Raises:
            ProtocolError: The rank skipped a step.
        """
        if result.step_id <= self.done[rank]:
            return False
        if result.step_id != self.done[rank] + 1:
            raise ProtocolError(f"step {self.done[rank] + 1} is due of rank {rank}, not step {result.step_id}")
        self.done[rank] = result.step_id
        self.results[rank].append(result)
        return True

    def settled(self) -> StepResult | None:
        """Return the oldest result that all ranks have given, or None.

        The result is that of rank 0, with the durations of the slowest ranks. A host block that one of them did not
        find is missed.

        Raises:
            WorkerError: The ranks have computed different results.
        """
        if not all(self.results):
            return None
        first, *rest = (waiting.popleft() for waiting in self.results)
        for rank, other in enumerate(rest, 1):
            if difference := _difference(first, other):
                raise WorkerError(
                    f"worker {self.name}: rank {rank} disagrees with rank 0 in step {first.step_id}: {difference}"
                )
        result = msgspec.structs.replace(
            first, duration_us=max(first.duration_us, *(each.duration_us for each in rest))
        )
        if not any(each.host_copied.size or each.host_missed.size for each in (first, *rest)):
            return result
        return msgspec.structs.replace(
            result,
            host_missed=_missed_by_any([first, *rest]),
            host_write_us=max(each.host_write_us for each in (first, *rest)),
            host_read_us=max(each.host_read_us for each in (first, *rest)),
        )

    def begin(self, step_id: int) -> None:
        """Start with the step after `step_id`, once the pool is registered."""
        self.done = [step_id] * self.count

    def lagging(self, step_id: int) -> list[int]:
        """Return the ranks that have not answered a step."""
        return [rank for rank, done in enumerate(self.done) if done < step_id]


def check_rank(message: WorkerHello) -> None:
    """Validate the rank in a handshake.

    Raises:
        ProtocolError: The rank or the number of ranks is out of range.
    """
    if not 1 <= message.ranks <= RANKS_MAX or not 0 <= message.rank < message.ranks:
        problem = f"expected 1 to {RANKS_MAX} ranks, numbered from 0"
        raise ProtocolError(f"worker {message.name!r} is rank {message.rank} of {message.ranks}: {problem}")


def _of(ready: WorkerReady, field: str) -> object:
    return ready.model.fingerprint if field == "model.fingerprint" else getattr(ready, field)


def _joint_identity(identities: list[str]) -> str:
    """Return the identity of the files of all ranks, in order, as that of one."""
    return hashlib.blake2b("\n".join(identities).encode(), digest_size=IDENTITY_BYTES).hexdigest()


def _missed_by_any(results: list[StepResult]) -> Int32Array:
    """Return the host blocks that a rank did not find, each with the first reason; see `StepResult.host_missed`.

    A list of odd length stays as it is: it is no list of pairs, and is refused.
    """
    reasons: dict[int, int] = {}
    for result in results:
        if result.host_missed.size % 2:
            return result.host_missed
        for block, reason in result.host_missed.reshape(-1, 2).tolist():
            reasons.setdefault(block, reason)
    return np.array([number for pair in reasons.items() for number in pair], np.int32) if reasons else NO_INT32


def _difference(one: StepResult, other: StepResult) -> str:
    """Describe how two results differ; "" if they do not."""
    if {each.slot for each in one.errors} != {each.slot for each in other.errors}:
        return "other rows failed"
    if one.slots.tobytes() != other.slots.tobytes():
        return "other rows were sampled"
    for slot, mine, theirs in zip(one.slots.tolist(), one.tokens.tolist(), other.tokens.tolist(), strict=False):
        if mine != theirs:
            return f"slot {slot}, token {theirs} in place of {mine}"
    if one.host_copied.tobytes() != other.host_copied.tobytes():
        return "other host blocks were copied"
    return "" if one.tokens.size == other.tokens.size else "another number of tokens"
