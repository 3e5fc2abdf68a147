"""Which requests run, and what the next step of each group computes.

Iteration-level batching: every step decodes one token of each running request and fills what is left of its token
budget with prefill chunks. Up to `steps_in_flight_max` steps of a group are under way; the token that one samples is
the next one's input and stays on the device, so the next step is planned before the last has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.errors import CapacityExceeded, QuotaExceeded
from protocol.messages import NO_INT32, RowStart, Step

from .cache import Cache
from .groups import Group, SentStep
from .requests import NO_SLOT, RUNNING, Request, RequestTable
from .residence import Residence
from .sequences import NO_POOL, Slots

EOS_TOKENS_MAX = 16


class Runs:
    """What the scheduler knows of each running sequence: struct-of-arrays indexed by slot."""

    def __init__(self, slots: int, stop_tokens_max: int) -> None:
        self.limit = np.zeros(slots, np.int64)
        self.base = np.zeros(slots, np.int64)
        self.order = np.zeros(slots, np.int64)
        self.serial = np.zeros(slots, np.int64)
        self.client = np.zeros(slots, np.int64)
        self.stream = np.zeros(slots, np.bool_)
        self.tops = np.zeros(slots, np.bool_)
        self.stops = np.full((slots, stop_tokens_max + EOS_TOKENS_MAX), -1, np.int32)

    def start(self, slot: int, request: Request, prompt_length: int, eos: tuple[int, ...], order: int) -> None:
        """The request takes the slot."""
        self.base[slot] = prompt_length
        self.limit[slot] = prompt_length + request.max_tokens
        self.order[slot] = order
        self.client[slot] = request.client
        self.stream[slot] = request.stream
        self.tops[slot] = request.tops is not None
        stops = request.sampling.stop_tokens + (() if request.sampling.ignore_eos else eos)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops


class Scheduler:
    """The waiting queue, admission to groups, and the plan of each step."""

    def __init__(self, cache: Cache, requests: RequestTable) -> None:
        self._cache, self._requests = cache, requests
        self._limits = cache.limits
        self.waiting: deque[Request] = deque()
        self.runs = Runs(self._limits.sequences_max, self._limits.stop_tokens_max)
        self._orders = 0
        self._starts = 0
        self._sequence_ids: Callable[[], int] = _unset
        self.running_total = 0
        self._blocked: tuple[object, ...] = ()

    def use_ids(self, next_sequence_id: Callable[[], int]) -> None:
        """Where ids for the sequences of requests come from."""
        self._sequence_ids = next_sequence_id

    # ------------------------------------------------------------------------------------------------------ admission

    def enqueue(self, request: Request) -> None:
        """A new request waits at the end of the queue."""
        self.waiting.append(request)

    def requeue(self, request: Request, now_us: int) -> None:
        """A running request gives up its slot and waits again, before all that were admitted after it."""
        slot = request.slot
        self.vacate(request, now_us)
        if request.sequence_id:
            self._cache.release_kv(slot, now_us)
            self._cache.sequences.request[slot] = request.id
        request.move("preempt")
        self._requests.preemptions_total += 1
        at = next((i for i, r in enumerate(self.waiting) if not 0 < r.admitted_order < request.admitted_order), None)
        self.waiting.insert(len(self.waiting) if at is None else at, request)

    def admit(self, now_us: int) -> Iterator[Request]:
        """Moves requests from the head of the queue to groups that have room, in order; yields each."""
        while self.waiting:
            request = self.waiting[0]
            mark = self._mark(request)
            if mark == self._blocked:
                return  # nothing has changed since it was tried last
            self._leave_small_pool(request, now_us)
            residence = self._choose(request)
            if residence is None:
                self._blocked = self._mark(request)
                return
            self.waiting.popleft()
            self._start(request, residence, now_us)
            yield request

    def _mark(self, request: Request) -> tuple[object, ...]:
        """What decides whether a request can be admitted: equal marks, equal answers."""
        pools = tuple((group.epoch, group.pool.changes) for group in self._cache.groups.values())
        return (request.id, self._cache.sequences.slots_free, self.running_total, pools)

    def _choose(self, request: Request) -> Residence | None:
        """The group for a request: the longest cached prefix first, the most free blocks second."""
        cache, s = self._cache, self._cache.sequences
        slot = s.find(request.sequence_id) if request.sequence_id else NO_SLOT
        if not s.slots_free if slot == NO_SLOT else cache.still_read(slot):
            return None
        resident = slot != NO_SLOT and s.pool[slot] != NO_POOL
        tokens = s.text(slot) if slot != NO_SLOT else np.concatenate([request.prompt, request.tokens])
        if request.hashes is None:
            request.hashes = cache.hashes(request.salt, tokens)
        best, best_rank = None, (-1, -1)
        for group in cache.groups.values():
            if (resident and s.pool[slot] != group.number) or not self._could_hold(group, request):
                continue
            running = self.running_in(group)
            if running >= self._limits.step_rows_max:
                continue
            if resident:
                residence = Residence(group, np.zeros(0, np.int64), (-1, 0), 0)
            else:
                residence = cache.plan_residence(group, request.salt, tokens, request.hashes)
            asking = np.array([slot] if slot != NO_SLOT else [], np.int64)
            try:
                residence = cache.with_room(residence, request.tenant, self.spare(group), asking)
            except CapacityExceeded:
                continue
            rank = (residence.cached_tokens(self._limits.block_size), group.pool.available(request.tenant) - running)
            if rank > best_rank:
                best, best_rank = residence, rank
        return best

    def _could_hold(self, group: Group, request: Request) -> bool:
        """Whether all that the request may come to need could ever be in the group's pool."""
        cache = self._cache
        needed = cache.sequences.blocks_for(request.prompt.size + request.max_tokens)
        return needed <= group.pool.count - cache.tenants.reserved_for_others(cache.tenants.names[request.tenant])

    def _leave_small_pool(self, request: Request, now_us: int) -> None:
        """A sequence that lives where its request could never end gives up its KV, if another pool can hold it."""
        s, groups = self._cache.sequences, self._cache.groups
        slot = s.find(request.sequence_id) if request.sequence_id else NO_SLOT
        if slot == NO_SLOT or s.pool[slot] == NO_POOL or self._could_hold(groups[int(s.pool[slot])], request):
            return
        if any(self._could_hold(group, request) for group in groups.values()):
            self._cache.release_kv(slot, now_us)

    def spare(self, group: Group) -> int:
        """Blocks that admission leaves free: one for each running row to grow into, or it would soon preempt."""
        running = self.running_in(group)
        return running + 1 if running else 0

    def running_in(self, group: Group) -> int:
        """Rows of the group that are running."""
        return int(np.count_nonzero(self._cache.sequences.running & (self._cache.sequences.pool == group.number)))

    def _start(self, request: Request, residence: Residence, now_us: int) -> None:
        cache, s, group = self._cache, self._cache.sequences, residence.group
        again = request.admitted_order > 0
        if request.sequence_id:
            slot = s.find(request.sequence_id)
            cache.rewind(slot)
        else:
            slot = self._take_slot(request, now_us)
        if s.pool[slot] == NO_POOL:
            cache.settle_in(slot, residence, now_us)
        cached = int(s.computed[slot])
        self._count_prefix(request, slot, cached, again)
        if not again:
            self._orders += 1
            request.admitted_order = self._orders
            request.first_scheduled_us = now_us
        request.slot, request.worker, request.hashes = slot, group.name, None
        request.move("schedule")
        s.request[slot] = request.id
        s.running[slot] = True
        self.running_total += 1
        self._starts += 1
        self.runs.serial[slot] = self._starts
        self.runs.start(slot, request, request.prompt.size, group.model.eos_tokens, request.admitted_order)
        group.started_slots.append(slot)

    def _take_slot(self, request: Request, now_us: int) -> int:
        s = self._cache.sequences
        slot = s.take(self._sequence_ids(), request.tenant, request.salt, now_us)
        known, start = request.prompt.size, request.tokens.size
        s.tokens[slot, :known] = request.prompt
        s.tokens[slot, known : known + start] = request.tokens
        s.logprobs[slot, known : known + start] = request.logprobs
        s.length[slot] = known + start
        return slot

    def _count_prefix(self, request: Request, slot: int, cached: int, again: bool) -> None:
        length = int(self._cache.sequences.length[slot])
        if again:
            self._requests.recomputed_tokens_total += length - cached
            return
        tenants = self._cache.tenants
        tenants.prefix_queried_tokens[request.tenant] += length
        tenants.prefix_hit_tokens[request.tenant] += cached
        request.cached_tokens = cached
        self._requests.cached_tokens_total += cached

    def vacate(self, request: Request, now_us: int) -> None:
        """The request leaves its slot, taking what it has generated with it. A client's sequence stays its own."""
        slot, s = request.slot, self._cache.sequences
        if slot == NO_SLOT:
            return
        base, length = int(self.runs.base[slot]), int(s.length[slot])
        request.tokens = s.tokens[slot, base:length].copy()
        request.logprobs = s.logprobs[slot, base:length].copy()
        request.slot = NO_SLOT
        s.running[slot] = False
        self.running_total -= 1
        self.runs.serial[slot] = 0
        s.request[slot] = 0
        for group in self._cache.groups.values():
            if slot in group.started_slots:
                group.started_slots.remove(slot)
        if s.owned[slot]:
            self._cache.trim(slot, now_us)
        else:
            self._cache.remove(slot, now_us)

    # ------------------------------------------------------------------------------------------------------- planning

    def plan(self, group: Group, now_us: int) -> Step | None:
        """The group's next step, or None where it has nothing to do or enough under way."""
        if len(group.sent) >= self._limits.steps_in_flight_max:
            return None
        if not self.running_total and not group.owes_copies:
            return None
        s, runs = self._cache.sequences, self.runs
        mine = np.flatnonzero(s.running & (s.pool == group.number))
        target = s.length[mine] + s.pending[mine]
        left = np.where(target < runs.limit[mine], target - s.scheduled[mine], 0)
        if not np.count_nonzero(left > 0) and not group.owes_copies:
            return None
        decodes = self._decodes(group, mine[left == 1], now_us)
        counts = np.ones(decodes.size, np.int64)
        slots = decodes
        if left.max(initial=0) > 1:
            slots, counts = self._prefills(group, mine[left > 1], decodes, counts, now_us)
        # Preemption on behalf of a later row may have taken an earlier one.
        alive = s.running[slots] & (s.pool[slots] == group.number)
        slots, counts = slots[alive], counts[alive]
        if not slots.size and not group.owes_copies:
            return None
        return self._send(group, slots, counts, now_us)

    def _ready(self, group: Group, slots: Slots, counts: Slots) -> Slots:
        """Which rows may be planned: one whose block must be copied first waits until no step reads its table row."""
        s = self._cache.sequences
        rows, _ = self._cache.unwritable(slots, s.scheduled[slots], s.scheduled[slots] + counts)
        waiting = np.zeros(slots.size, np.bool_)
        waiting[rows] = s.last_step[slots[rows]] > group.pool.settled_step
        return slots[~waiting]

    def _decodes(self, group: Group, slots: Slots, now_us: int) -> Slots:
        """Reserves room for one more token of each row; oldest first where not all fit."""
        s = self._cache.sequences
        if not slots.size:
            return slots
        slots = slots[np.argsort(self.runs.order[slots], kind="stable")][: self._limits.step_tokens_max]
        start = s.scheduled[slots]
        shared, _ = self._cache.unwritable(slots, start, start + 1)
        room = s.used[slots] * s.block_size
        if not shared.size and not np.count_nonzero(s.length[slots] + s.pending[slots] >= room):
            return np.sort(slots)  # most steps: every row writes into a block that it has
        slots = self._ready(group, slots, np.ones(slots.size, np.int64))
        planned = []
        for tenant in sorted(set(s.tenant[slots].tolist())):
            rows = slots[s.tenant[slots] == tenant]
            start, target = s.scheduled[rows], s.length[rows] + s.pending[rows] + 1
            try:
                self._cache.reserve(rows, start, start + 1, target, now_us)
            except CapacityExceeded:
                rows = np.array([slot for slot in rows.tolist() if self._make_way(group, slot, 1, now_us)], np.int64)
            planned.append(rows)
        return np.sort(np.concatenate(planned)) if planned else slots

    def _prefills(self, group: Group, slots: Slots, decodes: Slots, counts: Slots, now_us: int) -> tuple[Slots, Slots]:
        """Adds chunks of prompts, oldest first, until the token budget of the step is spent."""
        s = self._cache.sequences
        budget = self._limits.step_tokens_max - int(counts.sum())
        chosen: list[int] = []
        chunks: list[int] = []
        for slot in slots[np.argsort(self.runs.order[slots], kind="stable")].tolist():
            if budget <= 0 or decodes.size + len(chosen) >= self._limits.step_rows_max:
                break
            if not s.running[slot]:
                continue
            chunk = min(budget, int(s.length[slot] + s.pending[slot] - s.scheduled[slot]))
            one = np.array([slot])
            if self._ready(group, one, np.array([chunk])).size and self._make_way(group, slot, chunk, now_us):
                chosen.append(slot)
                chunks.append(chunk)
                budget -= chunk
        return np.append(decodes, np.array(chosen, np.int64)), np.append(counts, np.array(chunks, np.int64))

    def _make_way(self, group: Group, slot: int, count: int, now_us: int) -> bool:
        """Reserves room for one row, preempting younger requests of its group where it must."""
        s, runs = self._cache.sequences, self.runs
        while s.running[slot] and s.pool[slot] == group.number:
            start = s.scheduled[[slot]]
            target = s.length[[slot]] + s.pending[[slot]]
            samples = start + count == target
            try:
                self._cache.reserve(np.array([slot]), start, start + count, target + samples, now_us)
            except CapacityExceeded as error:
                if group.pool.quarantined:  # blocks come back with the next result: better to wait than to preempt
                    return False
                mine = np.flatnonzero(s.running & (s.pool == group.number))
                if isinstance(error, QuotaExceeded):  # only the tenant's own blocks count against its ceiling
                    mine = mine[s.tenant[mine] == s.tenant[slot]]
                victim = int(mine[np.argmax(runs.order[mine])])
                shares = bool(self._cache.unwritable(np.array([slot]), start, start + count)[0].size)
                if mine.size == 1 and not shares:  # where it shares, it starts again on blocks of its own
                    return False
                self.requeue(self._requests.live[int(s.request[victim])], now_us)
                continue
            return True
        return False

    def _send(self, group: Group, slots: Slots, counts: Slots, now_us: int) -> Step:
        """Commits the plan: counters move, and the step becomes a message."""
        s = self._cache.sequences
        starts = s.scheduled[slots]
        known, target = s.length[slots], s.length[slots] + s.pending[slots]
        samples = starts + counts == target
        group.last_step += 1
        group.steps_total += 1
        step_id = group.last_step
        tokens = self._inputs(slots, starts, counts, known)
        begins, history = self._begins(group)
        s.scheduled[slots] += counts
        s.pending[slots] += samples
        s.last_step[slots] = step_id
        group.sent.append(SentStep(step_id, slots, self.runs.serial[slots], counts, samples, now_us))
        self._requests.computed_tokens_total += int(counts.sum())
        return Step(
            step_id=step_id,
            begins=begins,
            slots=slots.astype(np.int32),
            starts=starts.astype(np.int32),
            counts=counts.astype(np.int32),
            samples=samples.astype(np.int32),
            tokens=tokens,
            copies=group.take_copies(),
            history=history,
        )

    def _inputs(self, slots: Slots, starts: Slots, counts: Slots, known: Slots) -> npt.NDArray[np.int32]:
        """The tokens fed, row after row; -1 for the one that a step under way is still sampling."""
        if not slots.size:
            return NO_INT32
        s = self._cache.sequences
        rows = np.repeat(np.arange(slots.size), counts)
        positions = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts) + starts[rows]
        inside = np.minimum(positions, s.context_tokens_max - 1)
        tokens: npt.NDArray[np.int32] = np.where(positions < known[rows], s.tokens[slots[rows], inside], -1)
        return tokens.astype(np.int32)

    def _begins(self, group: Group) -> tuple[tuple[RowStart, ...], npt.NDArray[np.int32]]:
        """The slots that change hands, and what penalties count of their tokens: the worker may never have seen it."""
        begins, history = [], [NO_INT32]
        s = self._cache.sequences
        for slot in group.started_slots:
            request = self._requests.live[int(s.request[slot])]
            sampling, base, length = request.sampling, int(self.runs.base[slot]), int(s.length[slot])
            first = 0 if sampling.repetition_penalty != 1.0 else base
            if sampling.counts_answer:
                history.append(s.tokens[slot, first:length])
            begins.append(
                RowStart(
                    slot=slot,
                    request_id=request.id,
                    sampling=msgspec.structs.replace(sampling, seed=None, stop_tokens=(), ignore_eos=False),
                    seed=request.seed,
                    generated=length - base,
                    prompt_history=base - first if sampling.counts_answer else 0,
                    generated_history=length - base if sampling.counts_answer else 0,
                )
            )
        group.started_slots.clear()
        return tuple(begins), np.concatenate(history)

    # ----------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """The queue, the slots and the request states agree."""
        s, runs = self._cache.sequences, self.runs
        assert not any(request.state == RUNNING or request.ended for request in self.waiting), "a waiting request runs"
        running = {request.slot: request for request in self._requests.live.values() if request.state == RUNNING}
        assert sorted(running) == np.flatnonzero(s.running).tolist(), "active slots disagree with running requests"
        assert self.running_total == len(running), "the count of running requests"
        assert len(running) + len(self.waiting) == len(self._requests.live), "a request is neither running nor waiting"
        for slot, request in running.items():
            assert s.request[slot] == request.id and s.pool[slot] != NO_POOL, "a running request without a place"
            assert s.length[slot] + s.pending[slot] <= runs.limit[slot], "more tokens planned than asked for"


def _unset() -> int:
    raise AssertionError("the scheduler has no source of ids")
