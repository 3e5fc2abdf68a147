"""Sequences as struct-of-arrays: one slot and one row of the block table each.

A resident sequence has a pool and blocks for all its tokens; a non-resident sequence keeps its tokens without KV. For
a resident sequence, positions [0, computed) have KV that a worker acknowledged. Steps in flight write the KV of
positions [computed, scheduled) and sample `pending` further tokens. A resident sequence always holds
ceil((length + pending) / block_size) blocks.

In a pool for a recurrent state, a resident sequence also holds `state_used` blocks in `states`, which no
other sequence shares. They hold the state behind exactly `scheduled` tokens as soon as the steps in flight have ended.
A state cannot go back: a sequence that loses tokens or unacknowledged KV gives up its blocks, and moves in again when
needed.

In a pool for layers with a sliding window, a resident sequence also holds window blocks for its blocks
[window_first, window_end); see `windows`.

GENERATED is added to the id of a token that was generated here, because some workers compute the KV of such tokens
differently from that of prompt tokens, also in a recomputation.

A slot is reused only after every step that may read its row of the shared table has ended. A sequence that lost its
blocks gets new ones only after the same steps: `read_step` of pool `read_pool` is the last of these.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded, SequenceNotFound
from kvforge.protocol.messages import GENERATED

from ..clock import Clock
from ..deadlines import SEQUENCES
from ..limits import Limits
from ..waits import SLOT, Waits

Slots = npt.NDArray[np.int64]
NO_SLOTS: Slots = np.zeros(0, np.int64)
Tokens = npt.NDArray[np.int32]
NO_POOL = -1
LINE_BYTES = 64
# numpy takes half the time for a small array and an array of one number than for a small array and a Python number.
ZERO, ONE, ONE_32 = np.array(0), np.array(1), np.array(1, np.int32)
_TOKEN = np.int32(GENERATED - 1)
GENERATED_MARK = np.array(GENERATED, np.int32)


class NextCells(NamedTuple):
    """The cells of the next token of n sequences, in one axis: numpy takes half the time of two for these.

    Attributes:
        tokens: All cells of `Sequences.tokens`, and the padding of its rows.
        logprobs: The same of `Sequences.logprobs`.
        where: [n] int64, indices of both.
    """

    tokens: Tokens
    logprobs: npt.NDArray[np.float32]
    where: Slots


class ChangedRings(NamedTuple):
    """Other window blocks in the rows of `Sequences.states`.

    Attributes:
        slots: The slots of the rows, [n].
        places: A place in the ring of each, [n].
        ids: The blocks, [n * pages] int32.
        first: The first column of a ring.
        pages: Columns of a place.
    """

    slots: Slots
    places: Slots
    ids: npt.NDArray[np.int32]
    first: int
    pages: int


def unmarked(tokens: Tokens) -> Tokens:
    """Return a copy of the tokens without their GENERATED marks."""
    return tokens & _TOKEN


def generated(tokens: Tokens) -> Tokens:
    """Return a copy of the token ids with GENERATED added."""
    return tokens | GENERATED_MARK


class Sequences:
    """Every live sequence. Arrays are indexed by slot; `slot_of` maps ids to slots.

    `expiry_us` is a lower bound of the time when the first sequence expires; None means that no sequence has a time to
    live. Using a sequence only postpones its expiry, so the bound is recomputed when it is reached, not in every turn.

    Attributes:
        leased: The owner's connection is gone, and the time to live is that of its lease.
        shared_end: Where a checkpoint of its state is wanted because others share the tokens before; 0: nowhere.
        kept: An ended request left the sequence to the next turn; it is dropped where its place is needed.
        pinned: The sequence is a prompt's beginning that a request pinned; see `PrefixPins`.
        idle_since_us: When the last request on it ended; 0 while one works on it, and for a pin. See `IdleTracker`.
        return_us: When to try to bring it back from the host tier, or to take its blocks again; 0: never.
        returned: It came back before its next request, which has not come yet.
        returned_after_us: For how long it had been idle then; 0: it has not come back since its last request.
    """

    def __init__(self, clock: Clock, limits: Limits, waits: Waits, first_id: int = 0) -> None:
        self._clock, self._waits, self._last_id = clock, waits, first_id
        n, context = limits.bounds.sequences_max, limits.context_tokens_max
        self.block_size = limits.cache.block_size
        self.context_tokens_max = context
        self.id = np.zeros(n, np.int64)
        self.pool = np.full(n, NO_POOL, np.int64)
        self.tenant = np.zeros(n, np.int64)
        self.length = np.zeros(n, np.int64)
        self.computed = np.zeros(n, np.int64)
        self.scheduled = np.zeros(n, np.int64)
        self.pending = np.zeros(n, np.int64)
        self.used = np.zeros(n, np.int64)
        self.last_step = np.zeros(n, np.int64)
        self.read_pool = np.zeros(n, np.int64)
        self.read_step = np.zeros(n, np.int64)
        self.salt = np.zeros(n, np.int64)
        self.hashed = np.zeros(n, np.int64)
        self.chain = np.zeros(n, np.uint64)
        self.parent = np.zeros(n, np.int64)
        self.request = np.zeros(n, np.int64)
        self.client = np.zeros(n, np.int64)
        self.running = np.zeros(n, np.bool_)
        self.resident_us = np.zeros(n, np.int64)
        self.created_us = np.zeros(n, np.int64)
        self.accessed_us = np.zeros(n, np.int64)
        self.accesses = np.zeros(n, np.int64)
        self.idle_ttl_us = np.zeros(n, np.int64)
        self.leased = np.zeros(n, np.bool_)
        self.owned = np.zeros(n, np.bool_)
        self.kept = np.zeros(n, np.bool_)
        self.pinned = np.zeros(n, np.bool_)
        self.state_used = np.zeros(n, np.int64)
        self.shared_end = np.zeros(n, np.int64)
        self.window_first = np.zeros(n, np.int64)
        self.window_end = np.zeros(n, np.int64)
        self.idle_since_us = np.zeros(n, np.int64)
        self.return_us = np.zeros(n, np.int64)
        self.returned = np.zeros(n, np.bool_)
        self.returned_after_us = np.zeros(n, np.int64)
        self._columns = [column for column in vars(self).values() if isinstance(column, np.ndarray)]
        self.table = _rows(n, limits.bounds.blocks_per_sequence_max, np.int32)
        self.states = _rows(n, limits.bounds.state_blocks_max, np.int32)
        self.tokens = _rows(n, context, np.int32)
        self.logprobs = _rows(n, context, np.float32)
        self.slot_of: dict[int, int] = {}
        self.expiry_us: int | None = None
        self._free = list(range(n - 1, -1, -1))
        self.quarantine: deque[tuple[int, int, int]] = deque()
        self.changed_rows: list[Slots] = []
        self.changed_lengths: list[Slots] = []  # rows with no other change than their length
        self.changed_cells: list[tuple[Slots, Slots | slice]] = []
        self.changed_states: list[int] = []  # slots with other state blocks; `changed_rows` has them too
        self.changed_rings: list[ChangedRings] = []

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def slots_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def find(self, sequence_id: int) -> int:
        """Return the slot of a sequence.

        Raises:
            SequenceNotFound: No live sequence has this id.
        """
        slot = self.slot_of.get(sequence_id)
        if slot is None:
            raise SequenceNotFound(sequence_id)
        return slot

    def need_slots(self, count: int) -> None:
        """Check that `count` slots are free.

        Raises:
            CapacityExceeded: Fewer slots are free.
        """
        if count > len(self._free):
            raise CapacityExceeded("sequences", count, len(self._free), "remove sequences or raise sequences_max")

    def create(self, tenant: int, salt: int) -> int:
        """Create an empty, non-resident sequence and return its slot."""
        slot = self._free.pop()
        self._last_id += 1
        sequence_id = self._last_id
        assert self.id[slot] == 0 and self.used[slot] == 0 and self.state_used[slot] == 0
        self.slot_of[sequence_id] = slot
        self.id[slot], self.tenant[slot], self.salt[slot] = sequence_id, tenant, salt
        self.created_us[slot] = self.accessed_us[slot] = self._clock.now_us
        self.changed_rows.append(np.array([slot]))
        return slot

    def end(self, slot: int, pool: int, quarantine_step: int) -> None:
        """End the sequence in `slot`, which has no blocks any more.

        Args:
            slot: The sequence's slot.
            pool: The pool with steps that may read the row.
            quarantine_step: The last step that may read the row, 0 for none.
        """
        assert self.used[slot] == 0 and self.id[slot] != 0 and not self.running[slot] and self.state_used[slot] == 0
        assert self.window_end[slot] == 0
        del self.slot_of[int(self.id[slot])]
        for column in self._columns:
            column[slot] = 0
        self.pool[slot] = NO_POOL
        if self.expiry_us is not None and not self.idle_ttl_us.any():
            self.expiry_us = None
        self.changed_rows.append(np.array([slot]))
        if quarantine_step:
            self.quarantine.append((pool, quarantine_step, slot))
        else:
            self._free.append(slot)
            self._waits.wake(SLOT)

    def step_done(self, pool: int, step: int) -> None:
        """Free the slots that were waiting for steps of `pool` up to `step`."""
        for _ in range(len(self.quarantine)):
            entry = self.quarantine.popleft()
            if entry[0] == pool and entry[1] <= step:
                self._free.append(entry[2])
                self._waits.wake(SLOT)
            else:
                self.quarantine.append(entry)

    def append(self, slots: Slots, at: Slots | int, tokens: Tokens | int) -> None:
        """Append one token to each of `slots`. Each has a block that it may write.

        Every new token enters through this method, `append_sampled`, `append_accepted` or `extend`, with GENERATED
        added if it was generated.

        Args:
            slots: Distinct slots, [n].
            at: Their lengths, [n] or one value.
            tokens: Token ids, [n] int32 or one value.
        """
        self.tokens[slots, at] = tokens
        self.length[slots] = at + 1
        self.accessed_us[slots] = self._clock.now_us
        self.changed_lengths.append(slots)

    def next_cells(self, slots: Slots, at: Slots) -> NextCells:
        """Return the cells of position at[i] of slots[i], [n]."""
        tokens, logprobs = self.tokens, self.logprobs
        assert tokens.strides == logprobs.strides
        return NextCells(_flat(tokens), _flat(logprobs), slots * (tokens.strides[0] // tokens.itemsize) + at)

    def append_sampled(
        self, slots: Slots, length: Slots, cells: NextCells, tokens: Tokens, logprobs: npt.NDArray[np.float32]
    ) -> None:
        """Append one token to each of `slots`, as `append` does, with its log-probability.

        Args:
            slots: Distinct slots, [n].
            length: Their lengths after it, [n].
            cells: Their cells for the new token.
            tokens: Token ids with GENERATED added, [n] int32.
            logprobs: [n].
        """
        cells.tokens[cells.where] = tokens
        cells.logprobs[cells.where] = logprobs
        self.length[slots] = length
        self.accessed_us[slots] = self._clock.now_us
        self.changed_lengths.append(slots)

    def append_accepted(
        self, slots: Slots, length: Slots, rows: Slots, at: Slots, tokens: Tokens, logprobs: npt.NDArray[np.float32]
    ) -> None:
        """Append one or more tokens to each of `slots`, as `append_sampled` appends one.

        Args:
            slots: Distinct slots, [n].
            length: Their lengths after it, [n].
            rows: The slot of each token, [m].
            at: Its position, [m].
            tokens: Token ids with GENERATED added, [m] int32.
            logprobs: [m].
        """
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.length[slots] = length
        self.accessed_us[slots] = self._clock.now_us
        self.changed_lengths.append(slots)

    def extend(self, slot: int, tokens: Tokens, logprobs: npt.NDArray[np.float32] | None = None) -> None:
        """Append tokens [n] to one sequence, with log-probabilities [n] if there are any."""
        length = int(self.length[slot])
        end = length + tokens.size
        self.tokens[slot, length:end] = tokens
        if logprobs is not None:
            self.logprobs[slot, length:end] = logprobs
        self.length[slot] = end
        self.accessed_us[slot] = self._clock.now_us
        self.changed_lengths.append(np.array([slot]))

    def touch(self, slots: Slots | int) -> None:
        """Count an access."""
        self.accessed_us[slots] = self._clock.now_us
        self.accesses[slots] += 1

    def keep_idle(self, slot: int, ttl_us: int) -> None:
        """Set the idle time after which the sequence is removed; 0 means never."""
        self.idle_ttl_us[slot] = ttl_us
        self.is_idle(slot)

    def is_idle(self, slot: int) -> None:
        """Start the time to live of a sequence that no request works on. A kept one can now give up its place."""
        if self.kept[slot]:
            self._waits.wake(SLOT)
        ttl_us = int(self.idle_ttl_us[slot])
        if ttl_us:
            end_us = int(self.accessed_us[slot]) + ttl_us
            self.expiry_us = end_us if self.expiry_us is None else min(self.expiry_us, end_us)
            self._clock.deadlines.arm(SEQUENCES, end_us)

    def collect_expired(self) -> list[int]:
        """Return the ids of expired sequences, for the caller to remove."""
        if self.expiry_us is None or self._clock.now_us < self.expiry_us:
            return []
        limited = np.flatnonzero(self.owned & (self.idle_ttl_us > 0) & (self.request == 0))
        ends_us = self.accessed_us[limited] + self.idle_ttl_us[limited]
        later = ends_us > self._clock.now_us
        self.expiry_us = int(ends_us[later].min()) if later.any() else None
        expired: list[int] = limited[~later].tolist()
        return expired

    def blocks_of(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the block ids of a sequence, in order: [used] int64."""
        return self.table[slot, : self.used[slot]].astype(np.int64)

    def states_of(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the ids of the blocks that hold a sequence's recurrent state: [state_used] int64."""
        return self.states[slot, : self.state_used[slot]].astype(np.int64)

    def text(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the tokens of a sequence: [length] int32, a copy."""
        return unmarked(self.tokens[slot, : self.length[slot]])

    def blocks_for(self, tokens: int) -> int:
        """Return ceil(tokens / block_size)."""
        return -(-tokens // self.block_size)

    def check_invariants(self) -> None:
        """Check that slots, ids and counters agree."""
        live = np.fromiter(self.slot_of.values(), np.int64, len(self.slot_of))
        assert np.array_equal(np.sort(live), np.flatnonzero(self.id)), "a live slot is not mapped"
        assert self.id[live].tolist() == [*self.slot_of], "an id maps to the wrong slot"
        idle = np.array(self._free + [slot for _, _, slot in self.quarantine], np.int64)
        every = np.sort(np.concatenate((idle, live)))
        assert np.array_equal(every, np.arange(self.id.size)), "a slot is lost or twice free"
        assert not self.used[idle].any(), "a free slot holds blocks"
        assert not self.state_used[self.pool == NO_POOL].any(), "state blocks without a pool"
        assert (self.pending >= 0).all() and (self.length >= 0).all(), "a counter is below zero"
        assert (self.computed <= self.scheduled).all(), "acknowledged KV was never scheduled"
        assert (self.scheduled <= self.length + self.pending).all(), "KV is scheduled beyond the tokens"
        assert (self.length + self.pending <= self.context_tokens_max).all(), "a sequence outgrew its limit"
        resident = self.pool != NO_POOL
        needed = -(-(self.length + self.pending) // self.block_size)
        assert (self.used == np.where(resident, needed, 0)).all(), "blocks held disagree with the length"
        assert not self.scheduled[~resident].any() and not self.pending[~resident].any(), "KV without a pool"
        assert not self.pending[~self.running].any(), "tokens pending without a running request"
        assert (self.request[self.running] != 0).all(), "a running sequence without a request"


def _rows(count: int, width: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return zeros [count, width], with rows padded by a cache line.

    Rows of a power of two bytes would map the cells of one column to the same few cache sets, and a decode step reads
    and writes one column of every row.
    """
    return np.zeros((count, width + LINE_BYTES // np.dtype(dtype).itemsize), dtype)[:, :width]


def _flat(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the memory of rows that `_rows` made, or a snapshot, as one axis: a view."""
    if rows.flags.c_contiguous:
        return rows.reshape(-1)
    assert rows.base is not None
    return rows.base.reshape(-1)
