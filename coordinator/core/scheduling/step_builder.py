"""Steps: the message that carries out a plan, and what is noted of it while it is in flight.

The scheduler decides which rows compute how many tokens; here, these become the input tokens, positions and copies of a
`Step`, and the counters of the rows advance. A step that repeats the one before is built by `Scheduler` with a few
additions.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import NO_INT32, RowStart, Step

from .. import sizes
from ..cache.groups import Group, SentStep, SteadyDecodeBatch
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.sequences import NO_SLOTS, Slots, Tokens, unmarked
from ..requests.table import RequestTable
from ..waits import rows_of
from .admission import Admission
from .beside import BatchRoom
from .draft_asks import repeats_max
from .drafts import ChosenDrafts, draft_counts, history_sizes, place


class StepBuilder:
    """Builds the steps of plans."""

    def __init__(self, cache: KVCacheManager, requests: RequestTable, admission: Admission, batches: BatchRoom) -> None:
        self._cache, self._requests, self._admission, self._batches = cache, requests, admission, batches
        self._rows, self._drafts, self._clock = admission.rows, admission.drafts, cache.clock

    def build(self, group: Group, slots: Slots, counts: Slots, idle: int, drafts: ChosenDrafts) -> Step:
        """Commit a plan: advance the counters of its rows and build the step, which is in flight from now on.

        Args:
            group: The group.
            slots: The rows, [n].
            counts: Their tokens, [n].
            idle: How many rows, the first ones, compute the last token of an idle sequence.
            drafts: The drafts at the ends of rows, by slot.
        """
        s = self._cache.sequences
        starts = s.scheduled[slots]
        known = s.length[slots]
        target = known + s.pending[slots]
        drafted = draft_counts(slots, drafts) if drafts else NO_SLOTS
        own = counts - drafted if drafts else counts
        samples = self._rows.samples(slots, starts + own, target)
        samples[:idle] = False
        tokens = self._inputs(group, slots, starts, own, known)
        if drafts:
            tokens = place(tokens, slots, drafts, group.wants_kinds)
        s.scheduled[slots] += counts
        s.pending[slots] += samples + drafted if drafts else samples
        only = tokens.size == slots.size
        prefill_tokens = 0 if only else tokens.size - int(np.count_nonzero(counts == 1))
        if drafts:
            prefill_tokens -= int(np.add.reduce(drafted)) + int(np.count_nonzero(drafted))
        sampled, runs, tenants = slots[samples], self._rows.run[slots], s.tenant[slots]
        asks = group.model_drafts.most > 0 and sampled.size > 0 and not prefill_tokens
        propose = self._drafts.ask(group, sampled, bool(drafts)) if asks else 0
        step = self._message(group, slots, starts, counts, samples, tokens, drafted, propose)
        tenant = int(tenants[0]) if slots.size and np.count_nonzero(tenants == tenants[0]) == slots.size else -1
        in_time = self._rows.batch_count > 0 and self._batches.sends_in_time(group)
        rows, now_us = (slots, runs, counts, samples, sampled), self._clock.now_us
        self._record(group, SentStep(step.step_id, *rows, now_us, only, prefill_tokens, tenant, step, in_time), idle)
        if group.state_blocks:
            # How far a row with drafts comes is known with its result.
            self._take_checkpoints(group, *((slots[drafted == 0], starts[drafted == 0]) if drafts else (slots, starts)))
        if 0 < slots.size == group.running and only and sampled.size == slots.size:
            group.steady = self._steady(group, slots, runs, starts + 1, target + 1, tenant)
        return step

    def _message(
        self,
        group: Group,
        slots: Slots,
        starts: Slots,
        counts: Slots,
        samples: npt.NDArray[np.bool_],
        tokens: Tokens,
        drafted: Slots,
        propose: int,
    ) -> Step:
        """Build the message of the next step, with all copies that the group owes.

        Arrays are [rows], except `tokens`: the input tokens, row after row. `drafted` is empty without drafts.
        """
        step_id = group.next_step
        begins, history = self._begins(group)
        scored, following = self._scored(slots, starts, counts) if self._rows.scores_count else (NO_INT32, NO_INT32)
        if group.host is not None and group.host.paced.waiting:
            self._admission.returning.hold(group, step_id)
        host_writes, host_reads, host_wipes = group.flush_host_copies(step_id)
        return Step(
            step_id=step_id,
            begins=begins,
            slots=slots.astype(np.int32),
            starts=starts.astype(np.int32),
            counts=counts.astype(np.int32),
            samples=samples.astype(np.int32),
            tokens=tokens,
            copies=group.flush_copies(),
            history=history,
            zeros=group.flush_zeros(),
            scored=scored,
            following=following,
            drafts=drafted.astype(np.int32) if drafted.size else NO_INT32,
            host_writes=host_writes,
            host_reads=host_reads,
            host_wipes=host_wipes,
            propose=propose,
        )

    def _record(self, group: Group, sent: SentStep, idle: int) -> None:
        """Record a step as the last one in flight. idle: how many of its rows belong to idle sequences."""
        group.last_step = sent.step_id
        self._cache.sequences.last_step[sent.slots] = sent.step_id
        if idle:
            group.left_step = sent.step_id  # its result must look at each row
            group.pool.await_step(sent.step_id)
        group.sent.append(sent)
        group.steps_total += 1
        self._requests.computed_tokens_total += sent.message.tokens.size

    def _take_checkpoints(self, group: Group, slots: Slots, starts: Slots) -> None:
        """Take checkpoints of the rows that a step brings to a position where one is wanted."""
        s, checkpoints = self._cache.sequences, self._cache.checkpoints
        for row in np.flatnonzero(s.scheduled[slots] % s.block_size == 0).tolist():
            slot = int(slots[row])
            checkpoints.take_wanted(group, slot, int(self._rows.base[slot]), int(starts[row]))

    def _steady(
        self, group: Group, slots: Slots, runs: Slots, starts: Slots, target: Slots, tenant: int
    ) -> SteadyDecodeBatch:
        """Build the steady decode batch of a group in which all rows decode.

        `starts` and `target` belong to the step after this one.
        """
        s = self._cache.sequences
        assert not group.window_pages or (s.window_end[slots] == s.used[slots]).all()
        room = s.used[slots] * s.block_size - target
        left = int((self._rows.limit[slots] - target).min())
        if group.state_blocks:  # the step that reaches a checkpoint's position is planned in full
            every = self._cache.checkpoints.positions(group).every
            left = min(left, int((every - 1 - starts % every).min()))
        if group.model_drafts.most:
            left = min(left, repeats_max(group))
        return SteadyDecodeBatch(slots, runs, starts, room, left, tenant)

    def _inputs(self, group: Group, slots: Slots, starts: Slots, counts: Slots, known: Slots) -> npt.NDArray[np.int32]:
        """Return the input tokens, row after row; -1 for a token that a step in flight is still sampling."""
        if not slots.size:
            return NO_INT32
        s = self._cache.sequences
        (chunks,) = (counts > 1).nonzero()
        decodes = int(chunks[0]) if chunks.size else slots.size  # decodes come first
        own = slots[:decodes]
        inside = np.minimum(starts[:decodes], s.context_tokens_max - 1)
        ones = group.as_fed(s.tokens[own, inside])
        # With no step in flight, each token to feed is known.
        fed = [np.where(starts[:decodes] < known[:decodes], ones, -1).astype(np.int32) if group.sent else ones]
        rest = zip(slots[decodes:], starts[decodes:], counts[decodes:], known[decodes:], strict=True)
        for slot, start, count, end in rest:
            tokens = group.as_fed(s.tokens[slot, start : min(start + count, end)])
            fed += [tokens, np.full(count - tokens.size, -1, np.int32)] if tokens.size < count else [tokens]
        return np.concatenate(fed) if len(fed) > 1 else fed[0]

    def _scored(
        self, slots: Slots, starts: Slots, counts: Slots
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the places of the tokens to score the next token of, and these next tokens: [m] each."""
        s, rows = self._cache.sequences, self._rows
        first = np.maximum(starts, rows.score_first[slots])
        end = np.minimum(starts + counts, rows.score_end[slots])
        before = np.cumsum(counts) - counts - starts
        places, following = [NO_INT32], [NO_INT32]
        for row in np.flatnonzero(end > first).tolist():
            positions = np.arange(first[row], end[row])
            places.append((positions + before[row]).astype(np.int32))
            following.append(unmarked(s.tokens[slots[row], positions + 1]))
        return np.concatenate(places), np.concatenate(following)

    def _begins(self, group: Group) -> tuple[tuple[RowStart, ...], npt.NDArray[np.int32]]:
        """Return the rows that begin in this step, and the history that penalties, grammars and drafts start from."""
        if group.begins_bytes >= sizes.BEGINS_BYTES_MAX:
            self._admission.waits.wake(rows_of(group.epoch))  # more rows may begin in the step after this one
        group.begins_bytes = 0
        if not group.started_slots:
            return (), NO_INT32
        begins, history = [], [NO_INT32]
        s = self._cache.sequences
        for slot in group.started_slots:
            request = self._requests.live[int(s.request[slot])]
            sampling, base, length = request.sampling, int(self._rows.base[slot]), int(s.length[slot])
            drafts = self._drafts.most(group)
            prompt, answer = history_sizes(sampling, base, length - base, drafts)
            if prompt or answer:
                history += [unmarked(s.tokens[slot, base - prompt : base])] if prompt else []
                history.append(unmarked(s.tokens[slot, length - answer : length]))
            begins.append(
                RowStart(
                    slot=slot,
                    request_id=request.id,
                    sampling=msgspec.structs.replace(sampling, seed=None, stop_tokens=(), ignore_eos=False),
                    seed=request.seed,
                    generated=length - base,
                    prompt_history=prompt,
                    generated_history=answer,
                    drafts=drafts,
                    shared_drafts=self._drafts.shared(slot) if drafts else 0,
                )
            )
        group.started_slots.clear()
        return tuple(begins), np.concatenate(history)
