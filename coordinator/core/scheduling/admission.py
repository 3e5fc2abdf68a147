"""Admission: requests move from the waiting queue into the groups, and back.

Requests are tried in queue order. A request without room delays no others until `passes_max` later ones have started
before it. From then on, the group that it waits for admits no other request. No pool therefore idles while
requests that it could serve wait, and no request waits forever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvforge.protocol.meters import (
    DISPLACED,
    HIT,
    PREEMPTED,
    QUERIED,
    QUEUE,
    RECOMPUTED,
    WAITING,
)
from kvforge.protocol.meters import (
    RUNNING as RUNNING_NOW,
)

from .. import sizes
from ..cache.groups import Group
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.placement import NO_DONOR, Placement
from ..cache.returns import Return
from ..cache.sequences import NO_POOL, Tokens, generated, unmarked
from ..requests.phases import RECOVERING
from ..requests.request import FINISHED, NO_SLOT, RUNNING, Request
from ..requests.table import RequestTable
from ..waits import FRONT, GRAMMAR, SIBLING, Wait, blocks_of, prompt_of, rows_of, trial_of
from .choice import ALONE_CRASHES, Choice
from .disk_waits import DiskWaits
from .drafts import Drafts
from .prefetch import Prefetch
from .queue import WaitingQueue
from .returning import Returning
from .rows import BATCH_PRIORITY, RunningRows

BLOCKED_MAX = 16  # after this many requests without room, groups that could hold one are skipped


class Admission:
    """The waiting queue, and the slots of running requests."""

    def __init__(self, cache: KVCacheManager, requests: RequestTable) -> None:
        self._cache, self._requests = cache, requests
        self._limits, self._clock = cache.limits.schedule, cache.clock
        self.waiting = WaitingQueue(cache.clock, cache.limits, cache.tenants)
        self.rows = RunningRows(cache.limits.bounds)
        self.choice = Choice(cache, requests)
        self.disk_waits = DiskWaits(cache, self.choice)
        self._prefetch = Prefetch(cache, self.choice)
        self.returning = Returning(cache, self.waiting)
        self.drafts = Drafts(cache, requests, self.rows)
        self._orders = 0
        self.waits, self._meters = cache.waits, cache.tenants.meters

    # ---------------------------------------------------------------------------------------------------------- queue

    def enqueue(self, request: Request) -> None:
        """Queue a new request, which waits for its turn or for its first sibling to compute the prompt."""
        self.waits.admission_due = True
        if request.sequence_id or request.continues:
            self._prefetch.hurry(request)
        request.phases.queued_for = self._why_untried(request.priority == BATCH_PRIORITY)
        if self.waits_for_sibling(request):
            self.waiting.park(request)
            self._await_sibling(request)
            return
        self.waiting.add(request)
        if request.sequence_id:  # under policy `none`, this sequence can now be evicted because it has a request
            s = self._cache.sequences
            group = self._cache.groups.get(int(s.pool[s.find(request.sequence_id)]))
            if group is not None:
                self.waits.wake(blocks_of(group.epoch))
        if not self._could_start():
            self._prefetch.bring(request)

    def _why_untried(self, batch: bool) -> str:
        """Return the limit that keeps all requests from being tried, as `explain` names it; "" if there is none."""
        groups = self._cache.groups.values()
        if not groups:
            return "workers"
        return "" if any(self.choice.accepts_rows(group, batch=batch) for group in groups) else "step_rows_max"

    def put_off(self, request: Request) -> None:
        """Take a running request off its slot until its worker may have tried its grammar."""
        request.phases.put_off(self._clock.now_us)
        if not request.phases.begun:
            request.phases.queued_for = GRAMMAR
        self._wait_again(request)
        self.waits.put(request, Wait(GRAMMAR, (trial_of(request.id),)))

    def requeue(self, request: Request) -> None:
        """Take a running request off its slot and queue it again."""
        self._wait_again(request)
        request.preemptions += 1
        self._requests.preemptions_total += 1
        self._meters.count(request.tenant, DISPLACED if request.phases.phase == RECOVERING else PREEMPTED)

    def _wait_again(self, request: Request) -> None:
        slot, s = request.slot, self._cache.sequences
        self.note_computed([request])
        self._cache.residency.note_reuse(slot)
        self.vacate(request)
        if request.sequence_id:
            self._cache.residency.release_kv(slot)
            s.request[slot] = request.id
        request.move("preempt")
        self._meters.count(request.tenant, WAITING)
        self.waiting.put_back(request)
        self.waits.admission_due = True

    def note_computed(self, requests: Sequence[Request]) -> None:
        """Record how far running requests got: work repeated below that point counts as recomputed."""
        s, slots = self._cache.sequences, [request.slot for request in requests]
        got = np.minimum(s.scheduled[slots], s.length[slots]).tolist()
        for request, tokens in zip(requests, got, strict=True):
            request.computed = max(request.computed, tokens)

    def forget(self, request: Request) -> None:
        """Drop a waiting request that ended."""
        self.waiting.remove(request)
        self.waits.clear(request)
        self._meters.count(request.tenant, WAITING, -1)

    # ----------------------------------------------------------------------------------------------------------- waits

    def waits_for_sibling(self, request: Request) -> bool:
        """Return whether the request waits for a sibling: the first answer to a prompt computes the prompt for all."""
        if not request.siblings or request.admitted_order or request.prompt_known:
            return False
        first = request.siblings[0]
        return first is not request and first.first_token_us < 0

    def prompt_is_known(self, request: Request) -> None:
        """Release the siblings of a request that got its first token, or make them wait for the next if it ended."""
        for other in map(self._requests.live.__getitem__, self.waits.wake(prompt_of(request.id))):
            if self.waits_for_sibling(other):
                self._await_sibling(other)
            else:
                self.waiting.unpark(other)

    def _await_sibling(self, request: Request) -> None:
        first = request.siblings[0].id
        request.phases.queued_for = SIBLING
        self.waits.put(request, Wait(SIBLING, (prompt_of(first),), other=first))

    def look_at_suspect(self, group: Group) -> None:
        """Let other requests join the group if the one that had to run alone is past its crash point."""
        if group.suspect and not self.choice.runs_alone(group):
            group.suspect = 0
            self.waits.wake(rows_of(group.epoch))

    # ------------------------------------------------------------------------------------------------------ admission

    @property
    def due(self) -> bool:
        """Whether an event since the last `admit` may let a waiting request start."""
        return self.waits.admission_due and self._could_start()

    def _could_start(self) -> bool:
        """Return whether a worker has a row for one of the requests that wait."""
        waiting = self.waiting
        if not waiting.size:
            return False
        batches = waiting.batches == waiting.size
        return any(self.choice.accepts_rows(group, batch=batches) for group in self._cache.groups.values())

    def admit(self) -> None:
        """Start waiting requests where there is room."""
        if not self.due:
            return
        self.waits.admission_due = False
        while (found := self._next_to_start()) is not None:
            self._start(*found)
        if self.waiting.size:
            for group in self._cache.groups.values():
                self.returning.make_way(group)

    def _next_to_start(self) -> tuple[Request, Placement] | None:
        """Return the first request of the queue that has room, and its placement."""
        kept: set[int] = set()
        at_ceiling: set[int] = set()
        blocked: list[Request] = []
        others, largest = 0, self._cache.limits.bounds.blocks_max
        if not self._could_start():
            self.waits.admission_due = True  # requests that are not tried now are tried when a row ends
            return None
        for request in self.waiting:
            if request.tenant in at_ceiling or request.awaits_sibling or request.awaits_trial or request.awaits_disk:
                continue
            if request.wait is None:
                if self.choice.most_blocks(request) > largest:
                    continue
                self._leave_small_pool(request)
                self._leave_state(request)
                found = self.choice.choose(request, kept)
                if isinstance(found, Placement) and (wait := self.disk_waits.wait_of(request, found)) is not None:
                    self.waits.put(request, wait)
                    if not request.admitted_order:
                        request.phases.queued_for = wait.limit
                    continue
                if isinstance(found, Placement):
                    self._passes(request, blocked)
                    return request, found
                self.waits.put(request, found)
                if not request.admitted_order:
                    request.phases.queued_for = found.limit
            blocked.append(request)
            if request.at_ceiling:
                at_ceiling.add(request.tenant)
                continue
            others += 1
            if (number := self._kept_for(request)) is not None:
                kept.add(number)
            if others % BLOCKED_MAX == 0:
                groups = self._cache.groups.values()
                kept |= {g.number for g in groups if any(self.choice.could_hold(g, r) for r in blocked)}
                largest = max((group.pool.count for group in groups if group.number not in kept), default=0)
                if not largest:
                    return None
        return None

    def _passes(self, request: Request, blocked: list[Request]) -> None:
        """Count that the request is about to start before requests without room."""
        for earlier in blocked:
            if earlier.admitted_order or not request.admitted_order:
                earlier.passed += 1

    def _kept_for(self, request: Request) -> int | None:
        """Return the group that admits no other request until this blocked request has started there.

        No group is kept if the request would not fit even with the group idle: the others would then wait for blocks
        that only a client can release.
        """
        if request.passed < self._limits.passes_max and not self.choice.must_be_alone(request):
            return None
        cache, s = self._cache, self._cache.sequences
        slot = s.slot_of.get(request.sequence_id, NO_SLOT)
        if slot != NO_SLOT and s.pool[slot] != NO_POOL:
            return int(s.pool[slot])
        there = [group for group in cache.groups.values() if not group.away]
        able = [group for group in there if self.choice.could_hold(group, request)]
        candidates = [group for group in able if self.choice.fits_when_idle(group, request)]
        if not candidates:
            return None
        if request.kept_epoch not in {group.epoch for group in candidates}:  # the choice is sticky
            best = max(candidates, key=lambda group: (group.pool.available(request.tenant), -group.number))
            request.kept_epoch = best.epoch
        return next(group.number for group in candidates if group.epoch == request.kept_epoch)

    def _leave_small_pool(self, request: Request) -> None:
        """Release a sequence's KV if its pool could never hold the request and another pool can."""
        s, groups = self._cache.sequences, self._cache.groups
        slot = s.slot_of.get(request.sequence_id, NO_SLOT)
        if slot == NO_SLOT or s.pool[slot] == NO_POOL or self.choice.could_hold(groups[int(s.pool[slot])], request):
            return
        if any(self.choice.could_hold(group, request) for group in groups.values()):
            self._cache.residency.release_kv(slot)

    def _leave_state(self, request: Request) -> None:
        """Release a sequence's blocks if it cannot continue with its recurrent state: it moves in again."""
        residency = self._cache.residency
        slot = self._cache.sequences.slot_of.get(request.sequence_id, NO_SLOT)
        if slot != NO_SLOT and residency.must_move(slot) and not residency.is_settling(slot):
            residency.release_kv(slot)

    # ------------------------------------------------------------------------------------------------- start and stop

    def _start(self, request: Request, placement: Placement) -> None:
        cache, s, group = self._cache, self._cache.sequences, placement.group
        again = request.admitted_order > 0
        self.waiting.start(request)
        self.waits.wake(FRONT)
        if request.sequence_id:
            slot = s.find(request.sequence_id)
            s.pinned[slot] = False  # it grows, and only its beginning was weighed against the share
            cache.residency.rewind(slot)
        else:
            cache.kept.free_slots(1, but=request.continues if placement.donor != NO_DONOR else 0)
            slot = self._create_sequence(request)
        if s.pool[slot] == NO_POOL:
            cache.residency.move_in(slot, placement)
        else:
            cache.residency.note_reuse(slot)
        cached = int(s.scheduled[slot])
        self._count_prefix(request, slot, cached, again)
        if placement.returns is not None:
            self._note_return(request, group, placement.returns)
        if not again:
            self._orders += 1
            request.admitted_order = self._orders
            request.first_scheduled_us = self._clock.now_us
            self._meters.observe(request.tenant, QUEUE, self._clock.now_us - request.submitted_us)
        request.slot, request.worker, request.hashes = slot, group.name, None
        request.passed = request.kept_epoch = 0
        request.move("schedule")
        request.phases.start(self._clock.now_us)
        s.request[slot] = request.id
        s.running[slot] = True
        self._meters.count(request.tenant, WAITING, -1)
        self._meters.count(request.tenant, RUNNING_NOW)
        group.row_came()
        if request.crashes >= ALONE_CRASHES:
            group.suspect = request.id
        self.rows.start(slot, request, group.model.eos_tokens)
        group.started_slots.append(slot)
        group.begins_bytes += sizes.begin_bytes(request.sampling, int(s.length[slot]), group.drafts)

    def _create_sequence(self, request: Request) -> int:
        s = self._cache.sequences
        slot = s.create(request.tenant, request.salt)
        s.extend(slot, request.prompt)
        if request.tokens.size:
            s.extend(slot, generated(request.tokens), request.logprobs)
        return slot

    def _note_return(self, request: Request, group: Group, how: Return) -> None:
        """Record that a preempted request came back with blocks from the host, or without them."""
        assert group.host is not None
        request.returns, tier = how, group.host.tier
        if how.read:
            tier.swapped_total += 1
            tier.swapped_blocks_total += how.read
            tier.swap_saved_us_total += how.saved_us
        else:
            tier.unswapped_total += 1

    def _count_prefix(self, request: Request, slot: int, cached: int, again: bool) -> None:
        length = int(self._cache.sequences.length[slot])
        self.waiting.charge(request.tenant, length - cached)
        if again:
            again_tokens = max(0, request.computed - cached)
            request.redone_tokens += again_tokens
            self._requests.recomputed_tokens_total += again_tokens
            self._meters.count(request.tenant, RECOMPUTED, again_tokens)
            return
        tenants = self._cache.tenants
        tenants.prefix_queried_tokens[request.tenant] += length
        tenants.prefix_hit_tokens[request.tenant] += cached
        request.cached_tokens = cached
        self._requests.cached_tokens_total += cached
        self._meters.count(request.tenant, QUERIED, length)
        self._meters.count(request.tenant, HIT, cached)

    def vacate(self, request: Request) -> None:
        """Take the request off its slot, with what it has generated. A client's sequence stays.

        The group and its KV may be gone already.
        """
        slot, s = request.slot, self._cache.sequences
        group = self._cache.groups.get(int(s.pool[slot]))
        request.tokens, request.logprobs = self.answer(request)
        request.slot, request.token_us = NO_SLOT, int(self.rows.token_us[slot])
        s.running[slot] = False
        self._meters.count(request.tenant, RUNNING_NOW, -1)
        request.wait = None
        run, settles = int(self.rows.run[slot]), group is not None and self._cache.residency.settles(slot)
        self.rows.leave(slot)
        s.request[slot] = 0
        if group is not None:
            if request.priority != BATCH_PRIORITY:
                group.interactive_us = self._clock.now_us
            group.row_left()
            group.proposals.pop(slot, None)
            group.expected.pop(slot, None)
            self.waits.wake(rows_of(group.epoch))
            if slot in group.started_slots:
                group.started_slots.remove(slot)
        if s.owned[slot] or self._keeps(request, slot):
            if group is not None:
                group.pool.await_step(int(s.last_step[slot]))
                # A recurrent state cannot be cut back to an earlier token.
                if group.wants_kinds and not group.state_blocks and slot not in group.idle_tails:
                    group.idle_tails.append(slot)
            if settles:
                self.rows.run[slot] = run  # the result of the step in flight counts
            self._cache.residency.trim(slot, settles)
        else:
            self._cache.residency.remove(slot)

    def _keeps(self, request: Request, slot: int) -> bool:
        """Leave the sequence of a finished request to the next turn, if it asked for that. Return whether it did."""
        if not request.keep_us or request.state != FINISHED:
            return False
        self._cache.kept.keep(slot, request.keep_us)
        request.kept_id = int(self._cache.sequences.id[slot])
        return True

    # -------------------------------------------------------------------------------------------------------- answers

    @property
    def running_total(self) -> int:
        """Number of running requests."""
        return sum(group.running for group in self._cache.groups.values())

    def generated(self, request: Request) -> int:
        """Return how many tokens the request has generated."""
        if request.slot == NO_SLOT:
            return int(request.tokens.size)
        return int(self._cache.sequences.length[request.slot]) - request.prompt_tokens

    def answer(self, request: Request, offset: int = 0) -> tuple[Tokens, npt.NDArray[np.float32]]:
        """Return the generated tokens from `offset` on, and their log-probabilities: [n] each."""
        slot, s = request.slot, self._cache.sequences
        if slot == NO_SLOT:
            return request.tokens[offset:], request.logprobs[offset:]
        first, end = request.prompt_tokens + offset, int(s.length[slot])
        return unmarked(s.tokens[slot, first:end]), s.logprobs[slot, first:end].copy()

    # ----------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """Check that queue, slots and request states agree."""
        s, rows = self._cache.sequences, self.rows
        self.waiting.check_invariants()
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting) == len({request.id for request in waiting}), "a request waits twice"
        assert not any(request.state == RUNNING or request.ended for request in waiting), "a waiting request runs"
        running = {request.slot: request for request in self._requests.live.values() if request.state == RUNNING}
        assert sorted(running) == np.flatnonzero(s.running).tolist(), "active slots disagree with running requests"
        for group in self._cache.groups.values():
            counted = int(np.count_nonzero(s.running & (s.pool == group.number)))
            assert group.running == counted, "the count of a group's running requests is wrong"
        assert len(running) + len(waiting) == len(self._requests.live), "a request is neither running nor waiting"
        self.waits.check_invariants(waiting)
        self._check_meters(waiting)
        for request in waiting:
            parked = request.awaits_sibling
            assert parked == self.waiting.is_parked(request), (
                "a request is parked without a sibling, or queued with one"
            )
            assert not parked or self.waits_for_sibling(request), "a sibling waits for a known prompt"
        fresh = np.flatnonzero(rows.fresh).tolist()
        assert len(fresh) == rows.fresh_count and running.keys() >= set(fresh), "the count of fresh rows is wrong"
        for slot, request in running.items():
            assert s.request[slot] == request.id and s.pool[slot] != NO_POOL, "a running request without a sequence"
            assert s.length[slot] + s.pending[slot] <= rows.limit[slot], "more tokens planned than requested"
            record = request.prompt_logprobs
            assert rows.scores[slot] == (record is not None), "the wish for log-probabilities of a prompt differs"
            if record is not None:
                known = max(int(rows.score_first[slot]), min(int(s.computed[slot]), record.total))
                assert record.size == known, "log-probabilities of a prompt disagree with what was computed"
        assert rows.scores_count == np.count_nonzero(rows.scores), "the count of rows that score is wrong"
        assert rows.batch_count == np.count_nonzero(rows.batch & s.running), "the count of rows of batches is wrong"

    def _check_meters(self, waiting: list[Request]) -> None:
        for cell, counted in ((RUNNING_NOW, self.running_total), (WAITING, len(waiting))):
            metered = self._meters.rows[:, cell]
            assert int(metered.sum()) == counted and (metered >= 0).all(), "request gauges disagree with the requests"
