"""Which requests run, and where: from the waiting queue into the groups, and back.

A request is tried in the order of the queue. One that finds no room does not hold up those behind it, until
`passes_max` of them have started before it: then the group that it waits for takes nobody else. So no pool idles while
requests wait that it could serve, and none waits for ever.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec
import numpy as np

from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded

from .. import sizes
from ..cache.cache import Cache
from ..cache.groups import Group
from ..cache.placement import Placement
from ..cache.pool import short_of
from ..cache.sequences import NO_POOL
from ..cache.supply import NO_SPARE, Spare
from ..requests.lifecycle import NO_SLOT, RUNNING, Request, RequestTable
from ..waits import (
    FRONT,
    SIBLING,
    SLOT,
    TENANT_CEILING,
    WORKER,
    Event,
    Wait,
    blocks_of,
    eviction_of,
    prefix_of,
    prompt_of,
    rows_of,
)
from .queue import WaitingQueue
from .rows import RunningRows

BLOCKED_MAX = 16  # behind so many requests that found no room, only the groups are tried that none of them could use
ALONE_CRASHES = 2


class Admission:
    """The waiting queue, and the slots of those that run."""

    def __init__(self, cache: Cache, requests: RequestTable) -> None:
        self._cache, self._requests = cache, requests
        self._limits, self._clock = cache.limits.schedule, cache.clock
        self.waiting = WaitingQueue(cache.clock, cache.limits, cache.tenants)
        self.rows = RunningRows(cache.limits.bounds)
        self.running_total = 0
        self._orders = 0
        self._starts = 0
        self.waits = cache.waits

    # ---------------------------------------------------------------------------------------------------------- queue

    def enqueue(self, request: Request) -> None:
        """A new request waits: for its turn, or for the first of its siblings to compute the prompt."""
        self.waits.stirred = True
        if self.waits_for_sibling(request):
            self.waiting.park(request)
            self._await_sibling(request)
            return
        self.waiting.add(request)
        if request.sequence_id:  # where nobody is evicted but who has a request, there is one more now
            s = self._cache.sequences
            group = self._cache.groups.get(int(s.pool[s.find(request.sequence_id)]))
            if group is not None:
                self.waits.wake(blocks_of(group.epoch))

    def requeue(self, request: Request) -> None:
        """A running request gives up its slot and waits again."""
        slot, s = request.slot, self._cache.sequences
        request.computed = max(request.computed, min(int(s.scheduled[slot]), int(s.length[slot])))
        self.vacate(request)
        if request.sequence_id:
            self._cache.release_kv(slot)
            s.request[slot] = request.id
        request.move("preempt")
        request.preemptions += 1
        self._requests.preemptions_total += 1
        self.waiting.put_back(request)
        self.waits.stirred = True

    def forget(self, request: Request) -> None:
        """A waiting request ended."""
        self.waiting.remove(request)
        self.waits.clear(request)

    # ----------------------------------------------------------------------------------------------------------- waits

    def waits_for_sibling(self, request: Request) -> bool:
        """Of several answers to one prompt the first computes the prompt; the others start when it has."""
        if not request.siblings or request.admitted_order or request.prompt_known:
            return False
        first = request.siblings[0]
        return first is not request and first.first_token_us < 0

    def prompt_is_known(self, request: Request) -> None:
        """The request has its first token, or has ended: its siblings go on, or wait for the next of them."""
        for other in map(self._requests.live.__getitem__, self.waits.wake(prompt_of(request.id))):
            if self.waits_for_sibling(other):
                self._await_sibling(other)
            else:
                self.waiting.unpark(other)

    def _await_sibling(self, request: Request) -> None:
        first = request.siblings[0].id
        self.waits.put(request, Wait(SIBLING, (prompt_of(first),), other=first))

    def look_at_suspect(self, group: Group) -> None:
        """The request that had to run alone in the group may be past its crash point: then others may join it."""
        if group.suspect and not self._runs_alone(group):
            group.suspect = 0
            self.waits.wake(rows_of(group.epoch))

    # ------------------------------------------------------------------------------------------------------ admission

    @property
    def stirred(self) -> bool:
        """Whether something that a waiting request may start by has changed since `admit` looked."""
        return self.waits.stirred and self.waiting.size > 0 and self._could_start()

    def _could_start(self) -> bool:
        return bool(self.waiting) and any(self._takes_rows(group) for group in self._cache.groups.values())

    def admit(self) -> None:
        """Starts waiting requests where there is room."""
        if not self.stirred:
            return
        self.waits.stirred = False
        while (found := self._next_to_start()) is not None:
            self._start(*found)

    def _next_to_start(self) -> tuple[Request, Placement] | None:
        """The first request of the queue that finds room, and its place."""
        kept: set[int] = set()
        at_ceiling: set[int] = set()
        blocked: list[Request] = []
        others, largest = 0, self._cache.limits.bounds.blocks_max
        if not self._could_start():
            self.waits.stirred = True  # whoever was not tried now is tried when a row ends
            return None
        for request in self.waiting:
            if request.tenant in at_ceiling or request.awaits_sibling:
                continue
            if request.wait is None:
                if self._most_blocks(request) > largest:
                    continue
                self._leave_small_pool(request)
                found = self.choose(request, kept)
                if isinstance(found, Placement):
                    self._passes(request, blocked)
                    return request, found
                self.waits.put(request, found)
            blocked.append(request)
            if request.at_ceiling:
                at_ceiling.add(request.tenant)
                continue
            others += 1
            if (number := self._kept_for(request)) is not None:
                kept.add(number)
            if others % BLOCKED_MAX == 0:
                groups = self._cache.groups.values()
                kept |= {g.number for g in groups if any(self.could_hold(g, r) for r in blocked)}
                largest = max((group.pool.count for group in groups if group.number not in kept), default=0)
                if not largest:
                    return None
        return None

    def _passes(self, request: Request, blocked: list[Request]) -> None:
        """The request is about to start before those that found no room."""
        for earlier in blocked:
            if earlier.admitted_order or not request.admitted_order:
                earlier.passed += 1

    def _kept_for(self, request: Request) -> int | None:
        """The group that takes nobody else until this blocked request has started there.

        Not one where it would find no room though everything that runs there had ended: others would wait for what only
        a client can give back.
        """
        if request.passed < self._limits.passes_max and not self.must_be_alone(request):
            return None
        cache, s = self._cache, self._cache.sequences
        slot = s.slot_of.get(request.sequence_id, NO_SLOT) if request.sequence_id else NO_SLOT
        if slot != NO_SLOT and s.pool[slot] != NO_POOL:
            return int(s.pool[slot])
        able = [group for group in cache.groups.values() if self.could_hold(group, request)]
        candidates = [group for group in able if self._fits_when_idle(group, request)]
        if not candidates:
            return None
        if request.kept_epoch not in {group.epoch for group in candidates}:  # once chosen, it stays the one
            best = max(candidates, key=lambda group: (group.pool.available(request.tenant), -group.number))
            request.kept_epoch = best.epoch
        return next(group.number for group in candidates if group.epoch == request.kept_epoch)

    def _fits_when_idle(self, group: Group, request: Request) -> bool:
        """Whether the request would find room if everything that runs in the group had ended."""
        placement = self.plan(group, request)
        supply, held = self._cache.eviction.supply_when_idle(group)
        shared = int(np.count_nonzero(held[placement.hits - group.pool.base]))
        first = self._cache.sequences.blocks_for(self._length(request) + 1)
        needed = max(first, placement.needed + placement.hits.size) - shared
        return supply.has(request.tenant, needed, NO_SPARE)

    def prompt_holder(self, request: Request) -> Request | None:
        """A sibling that runs and has the KV of the whole prompt."""
        s = self._cache.sequences
        for other in request.siblings:
            if other is not request and other.slot != NO_SLOT and s.computed[other.slot] >= request.prompt.size:
                return other
        return None

    # --------------------------------------------------------------------------------------------------------- choice

    def choose(self, request: Request, kept: Container[int]) -> Placement | Wait:
        """The group for a request, by the longest cached prefix and then the most free blocks; or what it waits for."""
        cache, s = self._cache, self._cache.sequences
        slot = s.find(request.sequence_id) if request.sequence_id else NO_SLOT
        if slot == NO_SLOT and not s.slots_free:
            return Wait("sequences_max", (SLOT,))
        if slot != NO_SLOT and cache.still_read(slot):
            return Wait("step", (blocks_of(cache.groups[int(s.read_pool[slot])].epoch),))
        resident = slot != NO_SLOT and s.pool[slot] != NO_POOL
        best, best_rank = None, (-1, -1)
        lacks: list[Wait] = []
        for group in cache.groups.values():
            if (resident and s.pool[slot] != group.number) or not self.could_hold(group, request):
                continue
            if (obstacle := self._obstacle(group, request, kept)) is not None:
                lacks.append(obstacle)
                continue
            placement = Placement(group, np.zeros(0, np.int64), (-1, 0), 0) if resident else self.plan(group, request)
            asking = np.array([] if slot == NO_SLOT else [slot], np.int64)
            try:
                placement = cache.with_room(placement, request.tenant, self.spare(group, request), asking)
            except CapacityExceeded as error:
                lacks.append(_lack(group, request, placement, error))
                continue
            cached = placement.cached_tokens(s.block_size)
            rank = (cached, group.pool.available(request.tenant) - group.running)
            if rank > best_rank:
                best, best_rank = placement, rank
        if best is not None:
            return best
        return _nearest(lacks, (eviction_of(request.sequence_id),) if resident else ())

    def _obstacle(self, group: Group, request: Request, kept: Container[int]) -> Wait | None:
        """What keeps the request out of the group, whatever room there is."""
        if group.number in kept:
            return Wait("kept", (FRONT,), group.epoch)
        if not self._takes_rows(group):
            return Wait("step_rows_max", (rows_of(group.epoch),), group.epoch)
        if group.running and (self.must_be_alone(request) or self._runs_alone(group)):
            return Wait("alone", (rows_of(group.epoch),), group.epoch, other=group.suspect)
        return None

    def plan(self, group: Group, request: Request) -> Placement:
        """What a request that lives nowhere would share with, and need from, the group's pool."""
        cache, s = self._cache, self._cache.sequences
        holder = self.prompt_holder(request) if not request.admitted_order else None
        if holder is not None and s.pool[holder.slot] == group.number:
            return cache.plan_fork(group, holder.slot, request.prompt.size)
        slot = s.find(request.sequence_id) if request.sequence_id else NO_SLOT
        tokens = s.text(slot) if slot != NO_SLOT else np.concatenate([request.prompt, request.tokens])
        if request.hashes is None:
            request.hashes = cache.indexing.hashes(request.salt, tokens)
        return cache.plan_placement(group, request.salt, tokens, request.hashes)

    def _takes_rows(self, group: Group) -> bool:
        return group.running < self._limits.step_rows_max and group.begins_bytes < sizes.BEGINS_BYTES_MAX

    def must_be_alone(self, request: Request) -> bool:
        """A request with which workers died runs by itself until it is past that point: nobody else fails with it."""
        return request.crashes >= ALONE_CRASHES and self._length(request) <= request.crash_length

    def _runs_alone(self, group: Group) -> bool:
        request = self._requests.live.get(group.suspect)
        return request is not None and request.state == RUNNING and self.must_be_alone(request)

    def _length(self, request: Request) -> int:
        if request.slot != NO_SLOT:
            return int(self._cache.sequences.length[request.slot])
        return request.prompt.size + request.tokens.size

    def could_hold(self, group: Group, request: Request) -> bool:
        """Whether all that the request may come to need could ever be in the group's pool."""
        tenants = self._cache.tenants
        reserved = tenants.reserved_for_others(tenants.names[request.tenant])
        return self._most_blocks(request) <= group.pool.count - reserved

    def _most_blocks(self, request: Request) -> int:
        """The blocks of the request if it runs to its end."""
        return self._cache.sequences.blocks_for(request.prompt.size + request.max_tokens)

    def _leave_small_pool(self, request: Request) -> None:
        """A sequence that lives where its request could never end gives up its KV, if another pool can hold it."""
        s, groups = self._cache.sequences, self._cache.groups
        slot = s.find(request.sequence_id) if request.sequence_id else NO_SLOT
        if slot == NO_SLOT or s.pool[slot] == NO_POOL or self.could_hold(groups[int(s.pool[slot])], request):
            return
        if any(self.could_hold(group, request) for group in groups.values()):
            self._cache.release_kv(slot)

    def spare(self, group: Group, request: Request) -> Spare:
        """Blocks that admission leaves free: one for each running row to grow into, or it would soon preempt.

        Within the tenant's ceiling only its own rows count. Where none of them runs, what the request's first token
        takes must be there: without that it would hold its blocks, and wait.
        """
        s, pool = self._cache.sequences, group.running + 1 if group.running else 0
        if not self._cache.tenants.has_quotas:
            return Spare(pool)
        mine = int(np.count_nonzero(s.running & (s.pool == group.number) & (s.tenant == request.tenant)))
        length = self._length(request)
        return Spare(pool, mine + 1 if mine else s.blocks_for(length + 1) - s.blocks_for(length))

    # ------------------------------------------------------------------------------------------------- start and stop

    def _start(self, request: Request, placement: Placement) -> None:
        cache, s, group = self._cache, self._cache.sequences, placement.group
        again = request.admitted_order > 0
        self.waiting.start(request)
        self.waits.wake(FRONT)
        if request.sequence_id:
            slot = s.find(request.sequence_id)
            cache.rewind(slot)
        else:
            slot = self._create_sequence(request)
        if s.pool[slot] == NO_POOL:
            cache.move_in(slot, placement)
        cached = int(s.computed[slot])
        self._count_prefix(request, slot, cached, again)
        if not again:
            self._orders += 1
            request.admitted_order = self._orders
            request.first_scheduled_us = self._clock.now_us
        request.slot, request.worker, request.hashes = slot, group.name, None
        request.passed = request.kept_epoch = 0
        request.move("schedule")
        s.request[slot] = request.id
        s.running[slot] = True
        self.running_total += 1
        group.row_came()
        if request.crashes >= ALONE_CRASHES:
            group.suspect = request.id
        self._starts += 1
        self.rows.run[slot] = self._starts
        self.rows.start(slot, request, request.prompt.size, group.model.eos_tokens, request.admitted_order)
        group.started_slots.append(slot)
        group.begins_bytes += sizes.begin_bytes(request.sampling, int(s.length[slot]))

    def _create_sequence(self, request: Request) -> int:
        s = self._cache.sequences
        slot = s.create(request.tenant, request.salt)
        s.extend(slot, request.prompt)
        if request.tokens.size:
            s.extend(slot, request.tokens, request.logprobs)
        return slot

    def _count_prefix(self, request: Request, slot: int, cached: int, again: bool) -> None:
        length = int(self._cache.sequences.length[slot])
        self.waiting.charge(request.tenant, length - cached)
        if again:
            again_tokens = max(0, request.computed - cached)
            request.redone_tokens += again_tokens
            self._requests.recomputed_tokens_total += again_tokens
            return
        tenants = self._cache.tenants
        tenants.prefix_queried_tokens[request.tenant] += length
        tenants.prefix_hit_tokens[request.tenant] += cached
        request.cached_tokens = cached
        self._requests.cached_tokens_total += cached

    def vacate(self, request: Request) -> None:
        """The request leaves its slot, taking what it has generated with it. A client's sequence stays its own."""
        slot, s = request.slot, self._cache.sequences
        if slot == NO_SLOT:
            return
        group = self._cache.groups[int(s.pool[slot])]
        base, length = int(self.rows.base[slot]), int(s.length[slot])
        request.tokens = s.tokens[slot, base:length].copy()
        request.logprobs = s.logprobs[slot, base:length].copy()
        request.slot = NO_SLOT
        s.running[slot] = False
        self.running_total -= 1
        group.row_left()
        request.wait = None
        self.waits.wake(rows_of(group.epoch))
        self.rows.run[slot] = 0
        s.request[slot] = 0
        if slot in group.started_slots:
            group.started_slots.remove(slot)
        if s.owned[slot]:
            group.pool.await_step(int(s.last_step[slot]))
            self._cache.trim(slot)
        else:
            self._cache.remove(slot)

    # ----------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """The queue, the slots and the request states agree."""
        s, rows = self._cache.sequences, self.rows
        self.waiting.check_invariants()
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting) == len({request.id for request in waiting}), "a request waits twice"
        assert not any(request.state == RUNNING or request.ended for request in waiting), "a waiting request runs"
        running = {request.slot: request for request in self._requests.live.values() if request.state == RUNNING}
        assert sorted(running) == np.flatnonzero(s.running).tolist(), "active slots disagree with running requests"
        assert self.running_total == len(running), "the count of running requests"
        for group in self._cache.groups.values():
            counted = int(np.count_nonzero(s.running & (s.pool == group.number)))
            assert group.running == counted, "the count of a group's running requests"
        assert len(running) + len(waiting) == len(self._requests.live), "a request is neither running nor waiting"
        self.waits.check_invariants(waiting)
        for request in waiting:
            parked = request.awaits_sibling
            assert parked == self.waiting.is_parked(request), (
                "one that waits for a sibling is in the queue, or another is not"
            )
            assert not parked or self.waits_for_sibling(request), "a sibling waits for a prompt that is known"
        for slot, request in running.items():
            assert s.request[slot] == request.id and s.pool[slot] != NO_POOL, "a running request without a place"
            assert s.length[slot] + s.pending[slot] <= rows.limit[slot], "more tokens planned than asked for"


def _lack(group: Group, request: Request, placement: Placement, error: CapacityExceeded) -> Wait:
    """The request finds no room in the group: it waits for blocks, for a row that ends and what is kept for it, and for
    a block that it would share. The error itself is not kept: with its traceback it would keep all of this alive."""
    events = [blocks_of(group.epoch), rows_of(group.epoch)]
    hits = int(placement.hits.size)
    if request.hashes is not None and hits < request.hashes.size:
        events.append(prefix_of(int(request.hashes[hits])))
    limit = TENANT_CEILING if isinstance(error, QuotaExceeded) else "blocks"
    return Wait(limit, tuple(events), group.epoch, short_of(error), placement.needed, str(error))


def _nearest(lacks: list[Wait], besides: tuple[Event, ...]) -> Wait:
    """One record of what keeps a request out of each group: the words of the one where it lacks least, all events."""
    if not lacks:
        return Wait("workers", (WORKER, *besides))
    room = [wait for wait in lacks if wait.limit == "blocks"] or [w for w in lacks if w.limit == TENANT_CEILING]
    told = min(room, key=lambda wait: wait.short) if room else lacks[0]
    events = dict.fromkeys(event for wait in lacks for event in wait.events)
    return msgspec.structs.replace(told, events=(*events, *besides))
