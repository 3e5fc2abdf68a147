"""Sequences as struct-of-arrays: one slot each, one row of the block table each.

A sequence is resident (it has a pool, and blocks for all its tokens) or not (its tokens are kept, its KV is not).
For a resident one, positions [0, computed) have KV that a worker acknowledged, [computed, scheduled) have KV that steps
under way will have written, and `pending` further tokens are being sampled by those steps. Blocks held are always
ceil((length + pending) / block_size).

A token that was generated here has GENERATED added to its id: some workers compute it in another way than those that
came from outside, now and whenever it is computed again.

A slot is given out again only when every step that may read its row of the shared table is over; nor does a sequence
whose blocks were taken away get others before that. `read_step` of pool `read_pool` is the last such step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded, SequenceNotFound
from kvforge.protocol.messages import GENERATED

from ..clock import Clock
from ..limits import Limits
from ..waits import SLOT, Waits

Slots = npt.NDArray[np.int64]
NO_SLOTS: Slots = np.zeros(0, np.int64)
Tokens = npt.NDArray[np.int32]
NO_POOL = -1
LINE_BYTES = 64
_TOKEN = np.int32(GENERATED - 1)
_GENERATED = np.int32(GENERATED)


def unmarked(tokens: Tokens) -> Tokens:
    """The ids of tokens, some of which have GENERATED added: a copy."""
    return tokens & _TOKEN


def generated(tokens: Tokens) -> Tokens:
    """Ids with GENERATED added: a copy."""
    return tokens | _GENERATED


class Sequences:
    """Every live sequence. Arrays are indexed by slot; `slot_of` maps ids to slots.

    first_id: ids are larger. expiry_us: no sequence's time to live is over before that; None: none is limited. Whoever
    uses one only puts its end off, so this is looked up again when it has come, and not in every turn.
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
        self.leased = np.zeros(n, np.bool_)  # its owner is gone: its time to live is not its own
        self.owned = np.zeros(n, np.bool_)
        self._columns = [column for column in vars(self).values() if isinstance(column, np.ndarray)]
        self.table = _rows(n, limits.bounds.blocks_per_sequence_max, np.int32)
        self.tokens = _rows(n, context, np.int32)
        self.logprobs = _rows(n, context, np.float32)
        self.slot_of: dict[int, int] = {}
        self.expiry_us: int | None = None
        self._free = list(range(n - 1, -1, -1))
        self._quarantine: deque[tuple[int, int, int]] = deque()
        self.changed_rows: list[Slots] = []
        self.changed_lengths: list[Slots] = []  # of these rows nothing else
        self.changed_cells: list[tuple[Slots, Slots | slice]] = []

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def slots_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def find(self, sequence_id: int) -> int:
        """The slot of a sequence. Raises SequenceNotFound."""
        slot = self.slot_of.get(sequence_id)
        if slot is None:
            raise SequenceNotFound(sequence_id)
        return slot

    def need_slots(self, count: int) -> None:
        """Raises CapacityExceeded where `count` slots cannot be taken."""
        if count > len(self._free):
            raise CapacityExceeded("sequences", count, len(self._free), "remove sequences or raise sequences_max")

    def create(self, tenant: int, salt: int) -> int:
        """A fresh, empty, non-resident sequence in a free slot."""
        slot = self._free.pop()
        self._last_id += 1
        sequence_id = self._last_id
        assert self.id[slot] == 0 and self.used[slot] == 0
        self.slot_of[sequence_id] = slot
        self.id[slot], self.tenant[slot], self.salt[slot] = sequence_id, tenant, salt
        self.created_us[slot] = self.accessed_us[slot] = self._clock.now_us
        self.changed_rows.append(np.array([slot]))
        return slot

    def end(self, slot: int, pool: int, quarantine_step: int) -> None:
        """Ends the sequence in `slot`. Its blocks are gone already.

        quarantine_step: the last step that may read the row, 0 where none does.
        """
        assert self.used[slot] == 0 and self.id[slot] != 0 and not self.running[slot]
        del self.slot_of[int(self.id[slot])]
        for column in self._columns:
            column[slot] = 0
        self.pool[slot] = NO_POOL
        if self.expiry_us is not None and not self.idle_ttl_us.any():
            self.expiry_us = None
        self.changed_rows.append(np.array([slot]))
        if quarantine_step:
            self._quarantine.append((pool, quarantine_step, slot))
        else:
            self._free.append(slot)
            self._waits.wake(SLOT)

    def step_done(self, pool: int, step: int) -> None:
        """Every step of `pool` up to `step` is over: slots that only they could read are free again."""
        for _ in range(len(self._quarantine)):
            entry = self._quarantine.popleft()
            if entry[0] == pool and entry[1] <= step:
                self._free.append(entry[2])
                self._waits.wake(SLOT)
            else:
                self._quarantine.append(entry)

    def append(self, slots: Slots, at: Slots | int, tokens: Tokens | int) -> None:
        """One token more for each of `slots`, [n] distinct, `at` their lengths. There is a block that each may be
        written to. This and `extend` are how every token comes in: with GENERATED added where it was generated."""
        self.tokens[slots, at] = tokens
        self.length[slots] = at + 1
        self.accessed_us[slots] = self._clock.now_us
        self.changed_lengths.append(slots)

    def extend(self, slot: int, tokens: Tokens, logprobs: npt.NDArray[np.float32] | None = None) -> None:
        """Several tokens more for one sequence: [n], with their log-probabilities if they have any."""
        length = int(self.length[slot])
        end = length + tokens.size
        self.tokens[slot, length:end] = tokens
        if logprobs is not None:
            self.logprobs[slot, length:end] = logprobs
        self.length[slot] = end
        self.accessed_us[slot] = self._clock.now_us
        self.changed_lengths.append(np.array([slot]))

    def touch(self, slots: Slots | int) -> None:
        """Counts an access."""
        self.accessed_us[slots] = self._clock.now_us
        self.accesses[slots] += 1

    def keep_idle(self, slot: int, ttl_us: int) -> None:
        """The sequence is to be removed when nobody has used it for so long; 0: never."""
        self.idle_ttl_us[slot] = ttl_us
        self.is_idle(slot)

    def is_idle(self, slot: int) -> None:
        """No request works on the sequence (any more): its time to live counts."""
        ttl_us = int(self.idle_ttl_us[slot])
        if ttl_us:
            end_us = int(self.accessed_us[slot]) + ttl_us
            self.expiry_us = end_us if self.expiry_us is None else min(self.expiry_us, end_us)

    def collect_expired(self) -> list[int]:
        """The sequences whose time to live is over; the caller removes them."""
        if self.expiry_us is None or self._clock.now_us < self.expiry_us:
            return []
        limited = np.flatnonzero(self.owned & (self.idle_ttl_us > 0) & (self.request == 0))
        ends_us = self.accessed_us[limited] + self.idle_ttl_us[limited]
        later = ends_us > self._clock.now_us
        self.expiry_us = int(ends_us[later].min()) if later.any() else None
        expired: list[int] = limited[~later].tolist()
        return expired

    def blocks_of(self, slot: int) -> npt.NDArray[np.int64]:
        """The block ids of a sequence, in order: [used] int64."""
        return self.table[slot, : self.used[slot]].astype(np.int64)

    def text(self, slot: int) -> npt.NDArray[np.int32]:
        """The tokens of a sequence: [length] int32, a copy."""
        return unmarked(self.tokens[slot, : self.length[slot]])

    def blocks_for(self, tokens: int) -> int:
        """ceil(tokens / block_size)."""
        return -(-tokens // self.block_size)

    def check_invariants(self) -> None:
        """Slots, ids and counters agree with each other."""
        live = np.array(sorted(self.slot_of.values()), np.int64)
        assert live.tolist() == np.flatnonzero(self.id).tolist(), "a live slot is not mapped"
        assert all(self.id[slot] == sequence for sequence, slot in self.slot_of.items()), "an id maps to another slot"
        idle = self._free + [slot for _, _, slot in self._quarantine]
        assert sorted([*idle, *live.tolist()]) == list(range(self.id.size)), "a slot is lost or twice free"
        assert not self.used[np.array(idle, np.int64)].any(), "a free slot holds blocks"
        assert (self.pending >= 0).all() and (self.length >= 0).all(), "a counter is below zero"
        assert (self.computed <= self.scheduled).all(), "KV acknowledged that was never scheduled"
        assert (self.scheduled <= self.length + self.pending).all(), "KV scheduled beyond the tokens"
        assert (self.length + self.pending <= self.context_tokens_max).all(), "a sequence outgrew its limit"
        resident = self.pool != NO_POOL
        needed = -(-(self.length + self.pending) // self.block_size)
        assert (self.used == np.where(resident, needed, 0)).all(), "blocks held disagree with the length"
        assert not self.scheduled[~resident].any() and not self.pending[~resident].any(), "KV without a pool"
        assert not self.pending[~self.running].any(), "tokens pending without a running request"
        assert (self.request[self.running] != 0).all(), "a running sequence without a request"


def _rows(count: int, width: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros, [count, width], a cache line apart from rows of a power of two bytes: those of one column would all fall
    into the same few places of the processor's caches, and a decode step reads and writes one column of every row."""
    return np.zeros((count, width + LINE_BYTES // np.dtype(dtype).itemsize), dtype)[:, :width]
