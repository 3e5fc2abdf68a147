"""A worker group: its pool, its prefix index, the block copies it owes, and the steps it was sent."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import NO_INT32, Int32Array, Step, WorkerReady
from kvforge.protocol.meters import POOL_CELLS, STEP_TIME

from .blocks import BlockIds
from .costs import DURATION_US_MAX, StepCosts
from .pool import Pool
from .sequences import Slots


class SentStep(msgspec.Struct, frozen=True, eq=False):
    """What the core remembers of a step until its result arrives. Arrays are [rows], sampled: the slots that sample.

    runs: which run each row belonged to. A request that was preempted and came back to the same slot is another run.
    decodes: one token for each row, and no more. prefill_tokens: those of prompts. tenant: of every row, or -1.
    message: the step as it was sent, for a worker that comes back and may not have got it.
    """

    step_id: int
    slots: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    samples: npt.NDArray[np.bool_]
    sampled: npt.NDArray[np.int64]
    sent_us: int
    decodes: bool
    prefill_tokens: int
    tenant: int
    message: Step


class Steady:
    """Rows that decode together, step after step: all that the next step needs is known, except a handful of numbers.

    Most steps are like the one before: the same rows, each one token further. As long as nobody joins or leaves, each
    row's block has room or can be followed by a free one, and no new holder shares a block, planning is a few
    additions. Whatever else happens sets this aside; the scheduler plans the long way and starts a new one.

    Arrays are [rows]. starts: positions that the next step feeds. room: tokens that fit into the blocks held after
    that. left: steps until the first row has all that it asked for. tenant: of every row, or -1.
    """

    def __init__(self, slots: Slots, runs: Slots, starts: Slots, room: Slots, left: int, tenant: int) -> None:
        self.slots, self.runs, self.tenant = slots, runs, tenant
        self.starts, self.room, self.left = starts, room, left
        self.ones = np.ones(slots.size, np.int64)
        self.samples = np.ones(slots.size, np.bool_)
        self.slots32 = slots.astype(np.int32)
        self.ones32 = np.ones(slots.size, np.int32)
        self.unknown = np.full(slots.size, -1, np.int32)
        for array in (self.ones, self.samples, self.slots32, self.ones32, self.unknown):
            array.setflags(write=False)


class Group:
    """One worker and its pool, from its WorkerReady to its death. By its `epoch` its results are told from those of an
    earlier life.

    worker: the connection of its process. others: those of its other ranks, each of which does every step too.
    running: rows that run. steady: they decode, step after step; None where the next step may not follow from the last.
    left_step: the last step in which a row may be that has left since.
    copies: the block copies that the next step must carry, even if it has no rows: target -> (source, tokens).
    suspect: the request that runs alone because workers died with it, 0 for none.
    begins_bytes: what the rows that begin with the next step take in it.
    stopped: requests whose rows found no room for their next token when the last step was planned.
    away: its worker was connected to an earlier process and has not come back yet.
    result_us: when its last result came. costs: what its steps cost, as far as it is known. step_times: the cells of
    STEP_TIME, in a list: counting in one is faster. told: the rows that had a token last, at told_us.
    """

    def __init__(self, number: int, worker: int, name: str, epoch: int, pool: Pool, ready: WorkerReady) -> None:
        self.number, self.worker, self.name, self.epoch = number, worker, name, epoch
        self.others: tuple[int, ...] = ()
        self.pool, self.index, self.model = pool, pool.index, ready.model
        self.bytes_per_block, self.kv_dtype, self.wants_kinds = ready.bytes_per_block, ready.kv_dtype, ready.wants_kinds
        self.sent: deque[SentStep] = deque()
        self.last_step = 0
        self.copies: dict[int, tuple[int, int]] = {}
        self.started_slots: list[int] = []
        self.begins_bytes = 0
        self.steps_total = 0
        self.running = 0
        self.left_step = 0
        self.steady: Steady | None = None
        self.suspect = 0
        self.stopped: list[int] = []
        self.away = False
        self.result_us = 0
        self.costs = StepCosts()
        self.step_times = [0] * (POOL_CELLS - STEP_TIME.start)
        self.told: Slots | None = None
        self.told_us = 0

    @property
    def next_step(self) -> int:
        """The id that the next step will have."""
        return self.last_step + 1

    def step_took(self, prefill_tokens: int, duration_us: int) -> None:
        """A step is over."""
        self.costs.add(prefill_tokens, duration_us)
        duration_us = max(0, min(duration_us, DURATION_US_MAX))
        self.step_times[bisect_left(STEP_TIME.bounds, duration_us)] += 1
        self.step_times[-1] += duration_us

    def row_came(self) -> None:
        """A row starts."""
        self.running += 1
        self.steady = None

    def row_left(self) -> None:
        """A row is over, or preempted."""
        self.running -= 1
        self.steady = None
        self.left_step = self.last_step

    def hold(self, ids: BlockIds) -> None:
        """Adds one holder to each block: [n] distinct ids. A row that could write one may have to copy it first now."""
        self.pool.hold(ids)
        self.steady = None

    def copy_block(self, source: int, target: int, tokens: int) -> int:
        """The next step copies the first `tokens` tokens of `source` to `target`. Returns the block really read.

        A source that is itself still to be copied stands for its own source: copies of one step are independent.
        """
        if source in self.copies:
            origin, copied = self.copies[source]
            assert tokens <= copied, "KV was computed in a block whose copy was never sent"
            source = origin
        self.copies[target] = (source, tokens)
        return source

    def release(self, ids: BlockIds, last_step: int) -> int:
        """Takes one holder from each block, as `Pool.release`; those that nobody holds any more need no copy."""
        dead = self.pool.release(ids, last_step)
        if dead and self.copies:
            for block in ids[self.pool.blocks.refcount[ids] == 0].tolist():
                self.copies.pop(block, None)
        return dead

    def flush_copies(self) -> Int32Array:
        """The copies that the next step carries: [3 * n] int32 triples."""
        if not self.copies:
            return NO_INT32
        triples = [value for target, (source, tokens) in self.copies.items() for value in (source, target, tokens)]
        self.copies.clear()
        return np.array(triples, np.int32)

    def flush_zeros(self) -> Int32Array:
        """The blocks that the next step zeroes first: [n] int32."""
        zeroing = self.pool.zeroing
        return zeroing.take() if zeroing is not None else NO_INT32

    def skip_step(self) -> bool:
        """While nothing is under way and nothing is owed, no step can touch a block. Then the next id is given up, so
        that nothing waits for it any longer. Returns whether it was."""
        if self.sent or self.copies or not self.pool.awaits_step:
            return False
        self.last_step += 1
        return True

    def check_invariants(self) -> None:
        """The group's parts agree."""
        self.pool.check_invariants()
        state = self.pool.blocks.refcount
        for target in self.copies:
            assert state[target] > 0, "a copy is owed to a block nobody holds"
        ids = [step.step_id for step in self.sent]
        assert ids == list(range(self.last_step - len(ids) + 1, self.last_step + 1)), "steps under way"
