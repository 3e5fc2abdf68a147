"""Step planning: the content of each group's next step.

Iteration-level batching: every step decodes one token of each running request and fills the rest of its token budget
with prefill chunks. Up to `steps_in_flight_max` steps of a group are in flight. A sampled token is the next step's
input and stays on the device, so the next step is planned before the previous one has ended.
"""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded
from kvforge.protocol.messages import GENERATED, NO_INT32, Step

from ..cache.groups import Group, SentStep, SteadyDecodeBatch
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.sequences import NO_SLOTS, ONE, ZERO, Slots
from ..cache.states import chunk_end
from ..cache.supply import short_of
from ..deadlines import NEVER, STEPS, WORKERS
from ..events import Effect, ToWorker
from ..limits import microseconds
from ..requests.table import RequestTable
from . import preemption, stalled
from .admission import Admission
from .beside import CHUNK_TOKENS_MIN, LOWER_SHARE, BatchRoom, lower_share
from .drafts import NO_DRAFTS, ordered
from .finisher import RequestFinisher
from .step_builder import StepBuilder

NO_ROWS = np.zeros(0, np.bool_)
SCORED_TOKENS_MAX = 1 << 14  # prompt tokens of a step with log-probabilities: bounds its result


class Scheduler:
    """Plans the steps of each group."""

    def __init__(
        self,
        cache: KVCacheManager,
        requests: RequestTable,
        admission: Admission,
        finisher: RequestFinisher,
        effects: list[Effect],
    ) -> None:
        self._cache, self._requests, self._admission = cache, requests, admission
        self._finisher, self._effects = finisher, effects
        self._limits, self._clock = cache.limits.schedule, cache.clock
        self._deadlines, self._timeout_us = cache.clock.deadlines, microseconds(self._limits.step_timeout_s)
        self._decode_gap_us = microseconds(self._limits.decode_gap_ms / 1000)
        self._rows, self._drafts = admission.rows, admission.drafts
        self._batches = BatchRoom(cache, self._rows)
        self._step_builder = StepBuilder(cache, requests, admission, self._batches)

    def fill(self, group: Group) -> None:
        """Send the group every step that it can take.

        With no step in flight, no block or row waits for one any more; skipping a step id releases these, and the next
        step may need them.
        """
        if group.away:
            return
        while True:
            while (step := self.plan(group)) is not None:
                self._effects.append(ToWorker(group.worker, step))
                for rank in group.others:
                    self._effects.append(ToWorker(rank, step))
                if self._deadlines.bounds_us[WORKERS] > self._clock.now_us + self._timeout_us:
                    self._deadlines.arm(WORKERS, self._clock.now_us + self._timeout_us)
                if len(group.sent) >= self._limits.steps_in_flight_max:
                    return
            if group.sent or not group.skip_step():
                return
            self._cache.step_done(group, group.last_step)

    def pass_time(self) -> int:
        """Return when the next step is to be sent behind one in flight, or NEVER. `fill` sends what is due by now."""
        first_us, now_us = NEVER, self._clock.now_us
        if self._rows.batch_count:
            for group in self._cache.groups.values():
                if not group.away and self._batches.sends_in_time(group):
                    due_us = self._batches.send_us(group)
                    if now_us < due_us < first_us:
                        first_us = due_us
        return first_us

    def plan(self, group: Group) -> Step | None:
        """Build the group's next step; None if it has nothing to do or enough steps in flight.

        A row fails if it has no room for its next token and would have none even with everything else ended.
        """
        if group.steady is not None and not group.has_copies and len(group.sent) < self._in_flight_max(group):
            step = self._schedule_repeat(group, group.steady)
            if step is not None:
                return step
        parts = self._cache, self._requests, self._finisher
        while True:
            before = stalled.requests_of(group, self._requests) if group.stopped else []
            step = self._plan(group)
            if before:
                stalled.unstall(group, before, self._clock.now_us)
            if not group.stopped or not stalled.give_up(*parts, group, step) or step is not None:
                return step

    def _plan(self, group: Group) -> Step | None:
        if len(group.sent) >= self._in_flight_max(group):
            return None
        if not group.running and group.host is not None:
            group.order_writeback()  # with nothing else to do, steps without rows carry it
        if not group.running and not group.has_copies and not group.idle_tails:
            return None
        group.steady = None
        group.stopped.clear()  # rows that still get no block are added again
        s, rows = self._cache.sequences, self._rows
        (mine,) = (s.running & (s.pool == group.number)).nonzero()
        target = s.length[mine] + s.pending[mine]
        left = np.where(target < rows.limit[mine], target - s.scheduled[mine], 0)
        only = NO_ROWS
        if rows.scores_count:
            only = rows.only_scores(mine)
            left[only] = (target - s.scheduled[mine])[only]
        if not np.count_nonzero(left > 0) and not group.has_copies and not group.idle_tails:
            return None
        several = left > 1
        if only.size:
            several |= only & (left > 0)  # reserves no room for a token, as a decode would
        prefilling = bool(np.count_nonzero(several))
        preempted = self._requests.preemptions_total
        ready = decoding = mine[(left > 0) & ~several]
        if rows.batch_count:
            decoding = self._batches.decodes(group, ready, mine[several], self._limits.step_tokens_max)
        decodes = self._decodes(group, decoding, prefilling)
        counts, drafts = np.ones(decodes.size, np.int64), NO_DRAFTS
        if group.proposals:
            calm = not (prefilling or group.stopped or self._admission.waiting.size)
            drafts = self._drafts.choose(group, decodes, prefilling, calm)
            decodes, counts = ordered(decodes, drafts)
        slots = decodes
        if prefilling:
            slots, counts = self._prefills(group, mine[several], decodes, counts)
        if not slots.size and decoding.size < ready.size:  # the rows that others were left out for lack room
            left_out = np.setdiff1d(ready, decoding)
            slots = self._decodes(group, left_out[s.running[left_out]], prefilling)
            counts = np.ones(slots.size, np.int64)
        if self._requests.preemptions_total != preempted:  # a later row may have preempted an earlier one
            alive = s.running[slots] & (s.pool[slots] == group.number)
            slots, counts = slots[alive], counts[alive]
            drafts = {slot: drafts[slot] for slot in slots.tolist() if slot in drafts} if drafts else drafts
        tails = NO_SLOTS
        if group.idle_tails and not prefilling:
            most = min(self._limits.step_rows_max, self._limits.step_tokens_max)
            tails = self._idle_tails(group, most - int(counts.sum()))
            slots, counts = np.concatenate((tails, slots)), np.concatenate((np.ones(tails.size, np.int64), counts))
        if not slots.size and not group.has_copies:
            return None
        return self._step_builder.build(group, slots, counts, tails.size, drafts)

    def _idle_tails(self, group: Group, most: int) -> Slots:
        """Return idle sequences whose last token gets its KV in this step, which has no prompt tokens.

        The last token of an answer is sampled and not computed. In the next turn it would be a decode beside the
        prompt's chunk, and such a step takes longer than one of a cached prompt. A sequence that changed since its
        request ended, or that shares its last block, is left to its next turn.

        Args:
            group: The group.
            most: How many rows the step has room for.
        """
        s = self._cache.sequences
        waiting = np.array(group.idle_tails, np.int64)
        last = s.length[waiting] - 1
        idle = (s.request[waiting] == 0) & (s.pool[waiting] == group.number)
        due = waiting[idle & (s.computed[waiting] == last) & (s.tokens[waiting, last] >= GENERATED)]
        group.idle_tails = due[max(0, most) :].tolist()
        due = due[: max(0, most)]
        due = np.delete(due, self._cache.tables.unwritable(due, s.computed[due])[0])
        self._rows.run_idle(due)
        return due

    def _schedule_repeat(self, group: Group, steady: SteadyDecodeBatch) -> Step | None:
        """Build a step that repeats the previous decode batch; None if something has changed."""
        s = self._cache.sequences
        if steady.left <= 0:
            return None
        (full,) = (steady.room <= ZERO).nonzero()
        zeros = NO_INT32
        if full.size:
            if not self._cache.tables.grow(group, steady.slots[full], steady.tenant):
                return None
            steady.room[full] += s.block_size
            if group.pool.zeroing is not None:
                zeros = group.flush_zeros()
        slots = steady.slots
        if self._rows.batch_count:
            self._batches.repeats(group, slots)
        # All rows' input tokens are known if no step is in flight, and unknown otherwise.
        tokens = steady.unknown if group.sent else group.as_fed(s.tokens[slots, steady.starts])
        starts = steady.starts.astype(np.int32)
        np.add(steady.starts, ONE, steady.starts)
        np.subtract(steady.room, ONE, steady.room)
        steady.left -= 1
        s.scheduled[slots] = steady.starts
        if not group.sent or group.sent[0].slots is slots:
            s.pending[slots] = len(group.sent) + 1  # every step in flight repeats these rows
        else:
            s.pending[slots] += 1
        step_id = group.last_step = group.last_step + 1
        s.last_step[slots] = step_id
        host_writes, _, host_wipes = group.flush_host_copies(step_id)  # blocks that rows grew into; nothing is read
        step = Step(
            step_id=step_id,
            slots=steady.slots32,
            starts=starts,
            counts=steady.ones32,
            samples=steady.ones32,
            tokens=tokens,
            zeros=zeros,
            host_writes=host_writes,
            host_wipes=host_wipes,
        )
        rows = (slots, steady.runs, steady.ones, steady.samples, slots)
        in_time = self._rows.batch_count > 0 and self._batches.sends_in_time(group)
        group.sent.append(SentStep(step_id, *rows, self._clock.now_us, True, 0, steady.tenant, step, in_time))
        group.steps_total += 1
        self._requests.computed_tokens_total += slots.size
        return step

    def _ready(self, group: Group, slots: Slots, counts: Slots) -> Slots:
        """Return the rows that may be planned: a row that must copy a block waits until no step reads its table row."""
        s = self._cache.sequences
        rows, _ = self._cache.tables.unwritable(slots, s.scheduled[slots], s.scheduled[slots] + counts)
        waiting = np.zeros(slots.size, np.bool_)
        waiting[rows] = s.last_step[slots[rows]] > group.pool.done_step
        return slots[~waiting]

    def _decodes(self, group: Group, slots: Slots, prefilling: bool) -> Slots:
        """Reserve room for one more token of each row, oldest first if not all fit."""
        s = self._cache.sequences
        if not slots.size:
            return slots
        most = self._limits.step_tokens_max
        if prefilling:  # leave room for prefill tokens, so that decodes cannot fill every step
            chunk = group.prompt_chunk if group.state_blocks else 1
            most -= chunk if most > chunk else most * (group.next_step % 2)
        too_many = slots.size > most
        if too_many:
            slots = slots[np.argsort(self._rows.order[slots], kind="stable")][:most]
        start = s.scheduled[slots]
        short = s.length[slots] + s.pending[slots] >= s.used[slots] * s.block_size
        if group.window_pages:
            short |= s.window_end[slots] < s.used[slots]
        copied, _ = self._cache.tables.unwritable(slots, start)
        short[copied] = True
        if not np.count_nonzero(short):
            return np.sort(slots) if too_many else slots  # the common case: all rows write into blocks they have
        asking = slots[short]
        if copied.size:
            asking = self._ready(group, asking, np.ones(asking.size, np.int64))
        elif not group.window_pages and self._cache.tables.grow(group, asking):
            return np.sort(slots) if too_many else slots  # nearly always: each row has got its next block
        served = self._with_blocks(group, asking)
        return np.sort(np.concatenate([slots[~short], served]))

    def _with_blocks(self, group: Group, slots: Slots) -> Slots:
        """Give blocks to rows that need a further or an own one, oldest first if not all fit."""
        s = self._cache.sequences
        planned = [NO_SLOTS]
        tenants = sorted(set(s.tenant[slots].tolist()))
        for tenant in tenants:
            rows = slots[s.tenant[slots] == tenant] if len(tenants) > 1 else slots
            start, target = s.scheduled[rows], s.length[rows] + s.pending[rows] + 1
            try:
                self._cache.tables.reserve(rows, start, start + 1, target)
            except CapacityExceeded:
                by_age = rows[np.argsort(self._rows.order[rows], kind="stable")].tolist()
                rows = np.array([slot for slot in by_age if self._make_way(group, slot, 1)], np.int64)
            planned.append(rows)
        return np.concatenate(planned)

    def _prefills(self, group: Group, slots: Slots, decodes: Slots, counts: Slots) -> tuple[Slots, Slots]:
        """Add prefill chunks until the step's token budget is spent, those of batches last."""
        budget = self._prefill_budget(group, int(counts.sum()))
        rows = self._limits.step_rows_max - decodes.size
        if not self._rows.batch_count:
            chunks = self._place(group, slots, budget, rows)
        else:
            batch = self._rows.batch[slots]
            kept = self._batches.kept(group, budget) if np.count_nonzero(batch) else 0
            chunks = self._place(group, slots[~batch], budget - kept, rows)
            room = self._batches.prompt_tokens(group, decodes, sum(chunks.values()), budget)
            chunks |= self._place(group, slots[batch], room, rows - len(chunks))
        more = np.array((list(chunks), list(chunks.values())), np.int64)
        return np.concatenate((decodes, more[0])), np.concatenate((counts, more[1]))

    def _place(self, group: Group, slots: Slots, budget: int, rows: int) -> dict[int, int]:
        """Return chunks of at most `budget` tokens, by slot, for at most `rows` rows that have room for them."""
        if not slots.size or budget <= 0:
            return {}
        s = self._cache.sequences
        chosen: dict[int, int] = {}
        shares = self._whole_chunks(group, slots, budget) if group.state_blocks else self._shares(slots, budget)
        for (slot, chunk), free in zip(shares, self._writable(shares), strict=True):
            if len(chosen) >= rows:
                break
            if not s.running[slot]:
                continue
            if free or (
                self._ready(group, np.array([slot]), np.array([chunk])).size and self._make_way(group, slot, chunk)
            ):
                chosen[slot] = chunk
        return chosen

    def _writable(self, shares: list[tuple[int, int]]) -> list[bool]:
        """Return which chunks fall into blocks that their rows hold and may write.

        These are most chunks, since a row gets the blocks of its prompt when it starts. Other rows of the step do not
        change the answer.
        """
        s = self._cache.sequences
        slots, counts = np.array(shares, np.int64).reshape(-1, 2).T
        start = s.scheduled[slots]
        target = s.length[slots] + s.pending[slots]
        writable = target + self._rows.samples(slots, start + counts, target) <= s.used[slots] * s.block_size
        writable[self._cache.tables.unwritable(slots, start, start + counts)[0]] = False
        if self._cache.windows.present:
            lengths = target + self._rows.samples(slots, start + counts, target)
            writable &= self._cache.windows.missing(slots, start + counts, lengths) == 0
        kept: list[bool] = writable.tolist()
        return kept

    def _prefill_budget(self, group: Group, decodes: int) -> int:
        """Return the prefill tokens of the next step. Decodes limit them to what fits into `decode_gap_ms`."""
        budget = self._limits.step_tokens_max - decodes
        if self._rows.scores_count:
            budget = min(budget, SCORED_TOKENS_MAX)
        chunk = group.costs.chunk(self._decode_gap_us) if decodes else 0
        return min(budget, max(CHUNK_TOKENS_MIN, chunk, group.prompt_chunk)) if chunk else budget

    def _in_flight_max(self, group: Group) -> int:
        """Return how many steps may be in flight.

        One where drafts are due or in flight, and behind a step that asks for some. One too while batches alone run
        and others are likely to come, until shortly before its end.
        """
        if group.proposals or (group.sent and (group.sent[-1].message.drafts.size or group.sent[-1].message.propose)):
            return 1
        if self._rows.batch_count and self._batches.sends_in_time(group):
            due_us = self._batches.send_us(group)
            if due_us > self._clock.now_us:
                if due_us < NEVER:
                    self._deadlines.arm(STEPS, due_us)
                return 1
            return 2
        return self._limits.steps_in_flight_max

    def _shares(self, slots: Slots, budget: int) -> list[tuple[int, int]]:
        """Split the budget into (slot, chunk) pairs, those of higher priority first.

        Rows of lower priority get what is left, and a small part of every step, so that they progress beside a steady
        load of higher priority.
        """
        s, live = self._cache.sequences, self._requests.live
        by_age = slots[np.argsort(self._rows.order[slots], kind="stable")].tolist()
        left = dict(zip(by_age, (s.length + s.pending - s.scheduled)[by_age].tolist(), strict=True))
        levels: dict[int, list[int]] = {}
        for slot, request_id in zip(by_age, s.request[by_age].tolist(), strict=True):
            request = live.get(request_id)  # a decode of this step may have preempted it
            levels.setdefault(request.priority if request is not None else 0, []).append(slot)
        shares: list[tuple[int, int]] = []
        kept = lower_share(budget)
        for at, level in enumerate(sorted(levels, reverse=True), 1):
            most = budget - kept if at < len(levels) else budget
            share = _split(levels[level], left, most)
            budget -= sum(share.values())
            shares += share.items()
        return shares

    def _whole_chunks(self, group: Group, slots: Slots, budget: int) -> list[tuple[int, int]]:
        """Split the budget into (slot, chunk) pairs for a model with a recurrent state: prompts are cut at its grid.

        The first row gets at least one chunk, if the budget has one. The others get the whole chunks of their shares,
        and what is left goes to the rows in order. Lower priorities, whose small share may be no whole chunk, come
        first in a small part of the steps.
        """
        s, live = self._cache.sequences, self._requests.live
        shares, sign = dict(self._shares(slots, budget)), 1 if group.next_step % LOWER_SHARE == 0 else -1
        running = [(slot, live[int(s.request[slot])]) for slot in slots[s.running[slots]].tolist()]
        running.sort(key=lambda row: (sign * row[1].priority, int(self._rows.order[row[0]])))
        chunks: dict[int, int] = {}
        for slot, _ in running:
            least = 0 if chunks else group.prompt_chunk
            chunks[slot] = self._chunk(group, slot, min(budget, max(shares.get(slot, 0), least)))
            budget -= chunks[slot]
        for slot, chunk in chunks.items():
            more = self._chunk(group, slot, chunk + budget)
            chunks[slot], budget = more, budget - (more - chunk)
        return [(slot, chunk) for slot, chunk in chunks.items() if chunk]

    def _chunk(self, group: Group, slot: int, room: int) -> int:
        """Return how many tokens a row can compute within `room`, all of one kind."""
        s = self._cache.sequences
        start = int(s.scheduled[slot])
        end = chunk_end(s.tokens[slot, : s.length[slot]], start, room, group.prompt_chunk)
        wanted = self._cache.checkpoints.following(group, slot, int(self._rows.base[slot]), start)
        return min(end, wanted) - start

    def _make_way(self, group: Group, slot: int, count: int) -> bool:
        """Reserve room for one row, preempting others of its group as needed."""
        s = self._cache.sequences
        while s.running[slot] and s.pool[slot] == group.number:
            start = s.scheduled[[slot]]
            target = s.length[[slot]] + s.pending[[slot]]
            samples = self._rows.samples(np.array([slot]), start + count, target)
            try:
                self._cache.tables.reserve(np.array([slot]), start, start + count, target + samples)
            except CapacityExceeded as error:
                if self._admission.returning.make_way(group):
                    continue
                # Blocks come back with the next result: wait instead of preempting.
                if group.pool.quarantined or group.forming or (group.window_pages and group.sent):
                    return False
                (mine,) = (s.running & (s.pool == group.number)).nonzero()
                helps = s.tenant[mine] == s.tenant[slot]
                if not isinstance(error, QuotaExceeded):  # only the tenant's own blocks count against its ceiling
                    # Blocks released by a tenant within its floor stay reserved for it.
                    floor = self._cache.tenants.floor
                    helps |= ((floor == 0) | (group.pool.usage > floor))[s.tenant[mine]]
                victim = preemption.choose(self._cache, self._requests, self._rows.order, mine[helps], short_of(error))
                if victim is None:
                    if not self._cache.tables.unwritable(np.array([slot]), start, start + count)[0].size:
                        end, length = int(start[0]) + count, int(target[0] + samples[0])
                        needed = self._cache.tables.needed(slot, int(start[0]), end, length)
                        request = self._requests.live[int(s.request[slot])]
                        stalled.stall(group, request, error, needed, self._clock.now_us)
                        return False
                    victim = slot  # the only row, with shared blocks: restart it on blocks of its own
                request = self._requests.live[int(s.request[victim])]
                request.phases.preempt(self._clock.now_us)
                self._admission.requeue(request)
                continue
            return True
        return False


def _split(by_age: list[int], left: dict[int, int], budget: int) -> dict[int, int]:
    """Split a budget among rows by age: half for the oldest prompt, the rest for the shortest.

    A short prompt then never waits for a long one, a long one always progresses, and equal ones end one by one.
    """
    oldest = by_age[0]
    share = {oldest: min(left[oldest], -(-budget // 2))} if budget > 0 else {}
    budget -= sum(share.values())
    for slot in sorted(by_age, key=left.__getitem__):
        if budget <= 0:
            break
        before = share.get(slot, 0)
        share[slot] = min(left[slot], before + budget)
        budget -= share[slot] - before
    return share
