"""A worker group: its block pool, its prefix index, its pending block copies, and its steps in flight."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import NO_INT32, Int32Array, Step, WorkerReady
from kvforge.protocol.meters import POOL_CELLS, STEP_TIME

from .block_pool import BlockPool
from .blocks import BlockIds
from .costs import DURATION_US_MAX, StepCosts
from .disk_copies import DiskCopies
from .entry_parts import NO_KEY
from .host_copies import HostCopies
from .leaving_rows import LeavingRows
from .model_drafts import ModelDrafts
from .pauses import Pauses
from .pool_invariants import check_pool
from .row_costs import RowCosts
from .sequences import NextCells, Slots, Tokens, unmarked


class SentStep(msgspec.Struct, frozen=True, eq=False):
    """A step in flight. Arrays are [rows], except `sampled`.

    Attributes:
        slots: The slot of each row.
        runs: The run of each row. A preempted request that returns to the same slot starts a new run.
        sampled: The slots that sample, [n].
        decodes: Every row feeds exactly one token.
        prefill_tokens: Prompt tokens in the step.
        tenant: The tenant of every row, or -1 if they differ.
        message: The step as sent, to resend to a worker that reconnects.
        in_time: It was due shortly before the end of the step before: see `BatchRoom.send_us`.
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
    in_time: bool = False


class FormingCheckpoint(msgspec.Struct):
    """A checkpoint that is being taken. See `checkpoints`.

    Attributes:
        slot: The slot of its sequence.
        sequence_id: The sequence.
        tokens: The state is that behind so many tokens.
        blocks: The blocks that it is copied to.
        step: The step that copies it.
        value: The chained hash of the tokens.
        key: The entry of the KV block before the position; NO_KEY until the row's result.
    """

    slot: int
    sequence_id: int
    tokens: int
    blocks: tuple[int, ...]
    step: int
    value: int
    key: int = NO_KEY


class SteadyDecodeBatch:
    """A batch of rows that decode together, which lets the scheduler plan the next step with a few additions.

    Most steps repeat the one before: the same rows, each one token further. The batch stays valid while no row joins or
    leaves, each row's block has room or can be followed by a free block, and no new holder shares a block. Any other
    event discards it; the scheduler then plans in full and builds a new one.

    Arrays are [rows].

    Attributes:
        starts: Positions that the next step feeds.
        room: Tokens that still fit into the row's blocks after the next step.
        left: Steps until the first row has all its tokens.
        tenant: The tenant of every row, or -1 if they differ.
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


class SampledRows:
    """The rows of the last result, with what the next result of the same rows needs to know about them.

    Results name the rows by an array. It is the same object while the steady decode batch lasts, in which no row joins
    or leaves; any other result has another one. Arrays are [rows].

    Attributes:
        requests: Their requests.
        length: Their lengths: positions of the next tokens.
        offsets: Positions of the next tokens in the answers, int32.
        cells: Where the next tokens are written.
        left: Results until the first row has all its tokens.
        tops: A request wants top log-probabilities.
        reader: The client that reads all rows, 0 for none; -1 if they differ.
        readers_changed: `RunningRows.readers_changed` when `reader` was read.
        leaving: When rows leave window blocks behind; None until it has been found out.
    """

    __slots__ = (
        "cells",
        "leaving",
        "left",
        "length",
        "offsets",
        "reader",
        "readers_changed",
        "requests",
        "rows",
        "tops",
    )

    def __init__(
        self,
        rows: Slots,
        requests: npt.NDArray[np.int64],
        length: Slots,
        offsets: npt.NDArray[np.int32],
        cells: NextCells,
        left: int,
        tops: bool,
    ) -> None:
        self.rows, self.requests, self.length, self.offsets = rows, requests, length, offsets
        self.cells, self.left, self.tops = cells, left, tops
        self.reader = self.readers_changed = -1
        self.leaving: LeavingRows | None = None


class Group:
    """One worker and its pool, from its WorkerReady to its death.

    `epoch` identifies this registration, so that late results of an earlier one can be discarded.

    Attributes:
        worker: The connection of the worker's first process.
        others: Connections of its other ranks. Each rank executes every step.
        running: Number of running rows.
        steady: The steady decode batch; None if the next step must be planned in full.
        left_step: The last step that may contain a row that has left since.
        state_blocks: Blocks of a sequence's recurrent state; 0: the model has none.
        window: Tokens that layers with a sliding window see; see `windows`.
        window_pages: Blocks with the KV of these layers for one block of tokens; 0: the model has none.
        window_blocks: Blocks of tokens that the ring of a sequence names.
        prompt_chunk: Steps cut prompts at multiples of this many tokens, if the model has a state.
        copies: Block copies that the next step must carry, even without rows: target -> (source, tokens).
        host: Copies from and to the host tier; None if the worker has none.
        forming: Checkpoints of recurrent states that are being taken.
        suspect: A request that runs alone because workers died while running it; 0 for none.
        begins_bytes: Bytes in the next step for rows that begin with it.
        drafts: The most tokens that the worker drafts and verifies for a row in a step; 0: none.
        draft_states: The most drafts of a step in all rows, if the model has a recurrent state.
        proposals: Tokens that the worker expects behind those of running rows, by slot; see `scheduling.drafts`.
        expected: A proposal for each row that is compared with its tokens, by slot: the run of the row, how many
            tokens were right, and the proposal.
        draft_chance, draft_later: The averages of its requests' chances; see `scheduling.draft_choice`.
        model_drafts: Measurements of its draft model.
        row_costs: The costs of steps without prompt tokens, of a worker that drafts or has requests of batches.
        draft_wait: For how many steps it took no proposals when drafts did not pay, 0 since they did.
        drafts_from: The step from which on it takes proposals; 0: it takes them.
        drafted_total: Drafts that its steps have verified.
        accepted_total: Drafts that became tokens.
        stopped: Requests that got no block for their next token when the last step was planned.
        idle_tails: Slots of ended requests that left a last token without KV. See `Scheduler._idle_tails`.
        interactive_us: When the last request ended that was none of a batch; -1 for never.
        batch_step: The last step in which prompts of batches waited and no row of others ran.
        away: The worker was connected to an earlier coordinator process and has not reconnected.
        result_us: Arrival time of the last result.
        costs: The cost model of its steps.
        pauses: How long its device has nothing to do between steps.
        step_times: The cells of STEP_TIME, as a list because counting in a list is faster.
        last_sampled_us: Time at which the rows in `last_sampled` got the most recent tokens.
        sampled_rows: The rows in `last_sampled`, with values derived from other parts; None after a recovery.
    """

    def __init__(self, number: int, worker: int, name: str, epoch: int, pool: BlockPool, ready: WorkerReady) -> None:
        self.number, self.worker, self.name, self.epoch = number, worker, name, epoch
        self.others: tuple[int, ...] = ()
        self.pool, self.index, self.model = pool, pool.index, ready.model
        self.bytes_per_block, self.kv_dtype, self.wants_kinds = ready.bytes_per_block, ready.kv_dtype, ready.wants_kinds
        self.state_blocks = ready.state_blocks
        self.window, self.window_pages, self.window_blocks = ready.window, ready.window_pages, ready.window_blocks
        self.prompt_chunk = ready.prompt_chunk if ready.state_blocks else 1
        self.draft_states = ready.draft_states if ready.state_blocks else 0
        self.drafts = min(ready.drafts, self.draft_states) if ready.state_blocks else ready.drafts
        self.proposals: dict[int, tuple[int, ...]] = {}
        self.expected: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self.draft_chance = self.draft_later = 512
        self.model_drafts = ModelDrafts(min(ready.model_drafts, self.drafts))
        self.row_costs = RowCosts()
        self.draft_wait = self.drafts_from = 0
        self.drafted_total = self.accepted_total = 0
        self.sent: deque[SentStep] = deque()
        self.last_step = 0
        self.copies: dict[int, tuple[int, int]] = {}
        self.host: HostCopies | None = None
        self.forming: list[FormingCheckpoint] = []
        self.started_slots: list[int] = []
        self.begins_bytes = 0
        self.steps_total = 0
        self.running = 0
        self.left_step = 0
        self.steady: SteadyDecodeBatch | None = None
        self.suspect = 0
        self.stopped: list[int] = []
        self.idle_tails: list[int] = []
        self.interactive_us = -1
        self.batch_step = 0
        self.away = False
        self.result_us = 0
        self.costs, self.pauses = StepCosts(), Pauses()
        self.step_times = [0] * (POOL_CELLS - STEP_TIME.start)
        self.last_sampled: Slots | None = None
        self.last_sampled_us = 0
        self.sampled_rows: SampledRows | None = None

    @property
    def next_step(self) -> int:
        """The id of the next step."""
        return self.last_step + 1

    @property
    def has_copies(self) -> bool:
        """Whether the next step must carry copies, even without rows."""
        return bool(self.copies) or (self.host is not None and self.host.pending)

    def step_took(self, prefill_tokens: int, duration_us: int, reads: bool = False) -> None:
        """Record the duration of a finished step. reads: it waited for blocks from the host, which is no cost of it."""
        if not reads:
            self.costs.add(prefill_tokens, duration_us)
        duration_us = max(0, min(duration_us, DURATION_US_MAX))
        self.step_times[bisect_left(STEP_TIME.bounds, duration_us)] += 1
        self.step_times[-1] += duration_us

    def row_came(self) -> None:
        """Count a row that starts."""
        self.running += 1
        self.steady = None

    def row_left(self) -> None:
        """Count a row that ended or was preempted."""
        self.running -= 1
        self.steady = None
        self.left_step = self.last_step

    def as_fed(self, tokens: Tokens) -> Tokens:
        """Return tokens in the form that the worker takes: with their GENERATED marks or without."""
        return tokens if self.wants_kinds else unmarked(tokens)

    def hold(self, ids: BlockIds) -> None:
        """Add one holder to each block: [n] distinct ids.

        This discards the steady decode batch: a row that shares a block must now copy it before writing.
        """
        self.pool.hold(ids)
        self.steady = None

    def copy_block(self, source: int, target: int, tokens: int) -> int:
        """Make the next step copy the first `tokens` tokens of `source` to `target`.

        If `source` itself is pending as a copy target, its own source is read instead: the copies of one step are
        independent.

        Returns:
            The block that the copy reads.
        """
        if source in self.copies:
            origin, copied = self.copies[source]
            assert tokens <= copied, "KV was computed in a block before its copy was sent"
            source = origin
        self.copies[target] = (source, tokens)
        return source

    def copy_held(self, source: int, target: int, tokens: int) -> None:
        """Make the next step copy a block, and keep what it reads until then even if its holders leave."""
        self.pool.touch([self.copy_block(source, target, tokens)], self.next_step)

    def release(self, ids: BlockIds, last_step: int) -> int:
        """Remove one holder from each block, as `BlockPool.release` does; cancel copies into blocks without holders."""
        dead = self.pool.release(ids, last_step)
        if dead and self.copies:
            for block in ids[self.pool.blocks.refcount[ids] == 0].tolist():
                self.copies.pop(block, None)
        if dead and self.host is not None and self.host.reads:
            for block in ids[self.pool.blocks.refcount[ids] == 0].tolist():
                self.host.cancel(block)
        return dead

    def release_sole(self, ids: BlockIds) -> bool:
        """Remove the only holder of each block, as `BlockPool.release_sole` does; cancel copies into the blocks."""
        if not self.pool.release_sole(ids):
            return False
        for block in ids.tolist() if self.copies else ():
            self.copies.pop(block, None)
        if self.host is not None and self.host.reads:
            for block in ids.tolist():
                self.host.cancel(block)
        return True

    def flush_copies(self) -> Int32Array:
        """Return and clear the copies that the next step carries: [3 * n] int32 triples (source, target, tokens)."""
        if not self.copies:
            return NO_INT32
        triples = [value for target, (source, tokens) in self.copies.items() for value in (source, target, tokens)]
        self.copies.clear()
        return np.array(triples, np.int32)

    def flush_host_copies(self, step: int) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return and clear the host copies that a step carries: see `HostCopies.flush`."""
        if self.host is None:
            return NO_INT32, NO_INT32, NO_INT32
        self.order_writeback()
        return self.host.flush(step, self.running)

    @property
    def owes_writeback(self) -> bool:
        """Whether filled blocks wait for their turn to be written back."""
        return self.pool.writeback is not None and bool(self.pool.writeback.backlog)

    def order_writeback(self) -> None:
        """Let the next step write filled blocks back to the host tier: see `HostWriteback.order`."""
        if self.pool.writeback is not None:
            self.pool.writeback.order(self.pool.parts)

    @property
    def disk(self) -> DiskCopies | None:
        """Copies between the host tier and the disk tier; None if the worker has none."""
        return self.host.disk if self.host is not None else None

    def flush_zeros(self) -> Int32Array:
        """Return and clear the blocks that the next step zeroes first: [n] int32."""
        zeroing = self.pool.zeroing
        return zeroing.pop_blocks() if zeroing is not None else NO_INT32

    def skip_step(self) -> bool:
        """Give up the next step id if no step is in flight and no copy is pending, so that nothing waits for that step.

        Returns:
            Whether the id was given up.
        """
        if self.sent or self.has_copies or not self.pool.awaits_step:
            return False
        self.last_step += 1
        return True

    def check_invariants(self) -> None:
        """Check that the group's parts agree."""
        check_pool(self.pool)
        state = self.pool.blocks.refcount
        for target in self.copies:
            assert state[target] > 0, "a copy is pending into a block without holders"
        ids = [step.step_id for step in self.sent]
        assert ids == list(range(self.last_step - len(ids) + 1, self.last_step + 1)), "step ids in flight"
