"""Step results: tokens are appended, blocks indexed, requests ended."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import KvforgeError, ProtocolError, WorkerError, restore
from kvforge.protocol.messages import ERROR_TEXT_MAX, NO_INT32, ErrorInfo, StepResult
from kvforge.protocol.meters import FIRST_TOKEN, GAP, PREFILLED

from ..cache.groups import Group, SampledRows, SentStep
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.sequences import GENERATED_MARK, NO_SLOTS, ONE, ONE_32, Slots
from ..deadlines import TRIAL
from ..requests.prompt_logprobs import ScoredTokens
from ..requests.request import Request
from ..requests.streams import StreamRows, Streams
from ..requests.table import RequestTable
from ..requests.top_logprobs import TopLogprobs
from ..scheduling.admission import Admission
from ..scheduling.finisher import RequestFinisher
from .accepted import NOTHING_FURTHER, FurtherTokens, split

INDEX_STEPS = 8
AGAIN_MS_MAX = 1000
FIELD_MAX, FIELDS_MAX = 200, 16


class StepResults:
    """Applies the results of steps.

    Masks are tested with count_nonzero because numpy's any() takes three times as long.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        requests: RequestTable,
        admission: Admission,
        streams: Streams,
        finisher: RequestFinisher,
    ) -> None:
        self._cache, self._requests, self._admission, self._streams = cache, requests, admission, streams
        self._finisher, self._deadlines, self._clock = finisher, cache.clock.deadlines, cache.clock
        self._meters = cache.tenants.meters

    def apply(self, group: Group, result: StepResult) -> None:
        """Apply the result of the oldest step in flight.

        Raises:
            ProtocolError: The result does not fit the step.
        """
        sent, drafts, further = group.sent[0], self._admission.drafts, NOTHING_FURTHER
        proposes = result.draft_slots.size or result.draft_counts.size or result.draft_tokens.size
        if proposes or result.draft_model_rows:
            drafts.check(group, result)
        if sent.message.drafts.size:
            result, further = split(sent, result, group.model.vocab_size)
        tokens, logprobs, top_logprobs, errors = self._aligned(group, sent, result)
        prompts: list[tuple[int, int, ScoredTokens]] = []
        # Steps that score nothing, as nearly all decodes, make no call for it.
        if sent.message.scored.size or (
            result.prompt_logprobs.size
            or result.prompt_ranks.size
            or result.prompt_top_counts.size
            or result.prompt_top_tokens.size
            or result.prompt_top_logprobs.size
        ):
            prompts = self._scored_rows(group, sent, result)
        s, running = self._cache.sequences, self._admission.rows
        if group.host is not None or result.host_copied.size or result.host_missed.size:
            missed = self._host_copied(group, sent, result)
            prompts = [scored for scored in prompts if scored[0] not in missed]
        group.sent.popleft()
        slots, rows, counts = sent.slots, sent.sampled, sent.counts
        if sent.message.drafts.size:
            counts = counts - sent.message.drafts  # the first token of each row; `_append_drafted` counts the others
        failing: list[int] = []
        verified = NO_SLOTS
        again: dict[int, int] = {}
        if result.errors:
            again = {row.slot: row.again_ms for row in result.errors if row.again_ms > 0}
        if errors or sent.step_id <= group.left_step:  # some rows may have ended or been preempted
            live = running.run[slots] == sent.runs
            failed = np.isin(slots, np.fromiter(errors, np.int64, len(errors)))
            failing = slots[live & failed & s.running[slots]].tolist()
            good = live & ~failed
            idle = live & ~s.running[slots]
            if np.count_nonzero(idle):
                good &= ~idle | self._idle_tails(sent, idle)
            if again:
                self._keep_prefill(slots, counts, live & np.isin(slots, list(again)))
            sampled = (good & ~idle)[sent.samples]
            slots, rows, counts = slots[good], rows[sampled], counts[good]
            tokens, logprobs = tokens[sampled], logprobs[sampled]
            top_logprobs = None if top_logprobs is None else top_logprobs.pick(np.flatnonzero(sampled))
        if rows is not slots:  # otherwise each row samples, and `_append` writes what was computed
            s.computed[slots] += counts
        if prompts:
            self._record_prompts(prompts)
        if sent.message.drafts.size:
            own = (rows, tokens, logprobs, top_logprobs)
            tokens, verified = self._append_drafted(group, sent, *own, further)
        else:
            self._append(group, sent, rows, tokens, logprobs, top_logprobs)
        if group.suspect:
            self._admission.look_at_suspect(group)
        if group.forming:
            self._cache.checkpoints.computed(group)
        # Blocks filled by decodes are indexed for several steps at once, which is cheaper.
        windows, leaving, behind = self._cache.windows, NO_SLOTS, NO_SLOTS
        if group.window_pages:
            leaving, behind = windows.out_of_sight(group, slots)
        if (
            not sent.decodes
            or not group.sent
            or sent.step_id % INDEX_STEPS == 0
            or (leaving.size and windows.unindexed(leaving, behind))
        ):
            self._cache.indexing.filled(group)
        group.pool.step_done(sent.step_id)
        if verified.size:
            self._cache.residency.give_back(group, verified)
        if leaving.size:
            windows.release_behind(group, leaving, behind)
        if group.forming:
            self._cache.checkpoints.settle(group)
        if s.quarantine:
            s.step_done(group.number, sent.step_id)
        self._finish(group, rows, tokens)
        if verified.size and group.state_blocks:
            self._take_checkpoints(group, sent, verified)
        if running.scores_count:
            self._finish_scored(slots)
        if group.proposals or group.expected or result.draft_slots.size or sent.message.propose:
            drafts.take(group, sent, result)
        for slot in failing:
            request = self._requests.live[int(s.request[slot])]
            if slot in again:
                self._admission.put_off(request)
                self._deadlines.set(self._clock.now_us + 1000 * min(again[slot], AGAIN_MS_MAX), request.id, TRIAL)
            else:
                self._finisher.end(request, "fail", "failed", errors[slot])

    def _host_copied(self, group: Group, sent: SentStep, result: StepResult) -> list[int]:
        """Record the host copies of a step, which its result must acknowledge block by block.

        Sequences without their blocks on the host begin again; what steps computed from them does not count.

        Returns:
            The slots of these sequences.

        Raises:
            ProtocolError: It acknowledges others. The worker's blocks may then hold anything.
        """
        due = group.host.due(sent.step_id) if group.host is not None else None
        expected = NO_INT32 if due is None else due
        if not np.array_equal(result.host_copied, expected):
            raise ProtocolError(
                f"step_result: host_copied acknowledges {result.host_copied.size} copies, "
                f"step {sent.step_id} carried {expected.size} others"
            )
        if group.host is None:
            if result.host_missed.size:
                raise ProtocolError("step_result: host_missed comes from a worker without a host file")
            return []
        try:
            missed = group.host.missed(sent.step_id, result.host_missed) if result.host_missed.size else []
        except ValueError as error:
            problem = f"step_result: host_missed names what step {sent.step_id} did not read: {error}"
            raise ProtocolError(problem) from None
        group.host.measured(sent.step_id, result.host_write_us, result.host_read_us)
        group.host.step_done(sent.step_id, self._cache.sequences)
        for slot in missed:
            request = self._requests.live.get(int(self._cache.sequences.request[slot]))
            if request is not None and request.slot == slot:
                request.phases.preempt(self._clock.now_us)
                self._admission.requeue(request)
            else:
                self._cache.residency.release_kv(slot)
        return missed

    def _idle_tails(self, sent: SentStep, idle: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which rows of idle sequences have computed what is still their last token: [rows]. None gets a token.

        A sequence that was cut off or lost its KV meanwhile no longer has this token scheduled.
        """
        s, slots = self._cache.sequences, sent.slots
        self._admission.rows.run[slots[idle]] = 0
        counts: npt.NDArray[np.bool_] = idle & (s.scheduled[slots] == sent.message.starts + sent.counts)
        return counts

    def _keep_prefill(self, slots: Slots, counts: Slots, put_off: npt.NDArray[np.bool_]) -> None:
        """Keep the KV of rows that only lack a token; the last token is computed again."""
        self._cache.sequences.computed[slots[put_off]] += counts[put_off] - 1

    def _first_token(self, slot: int) -> None:
        """Record the first token of a row's run, and possibly of its request."""
        self._admission.rows.set_fresh(slot, False)
        request = self._requests.live[int(self._cache.sequences.request[slot])]
        request.phases.token(self._clock.now_us)
        if request.first_token_us < 0:
            request.first_token_us = self._clock.now_us
            self._meters.observe(request.tenant, FIRST_TOKEN, self._clock.now_us - request.submitted_us)
            self._meters.count(request.tenant, PREFILLED, request.prompt_tokens)
            if request.pins:
                self._pin(request, slot)
            if request.siblings:
                self._admission.prompt_is_known(request)

    def _pin(self, request: Request, slot: int) -> None:
        """Pin the leading parts of a prompt that has been computed: the longest first, which shorter ones may share."""
        pins = self._cache.prefix_pins
        order = sorted(range(len(request.pins)), key=lambda at: -request.pins[at][0])
        pinned = {at: pins.pin(slot, request.pins[at][0], 1000 * request.pins[at][1]) for at in order}
        request.pinned = tuple(pinned[at] for at in range(len(request.pins)))

    def _finish(self, group: Group, rows: Slots, tokens: npt.NDArray[np.int32]) -> None:
        """End requests that got a stop token or their last token."""
        s, running = self._cache.sequences, self._admission.rows
        stopped = running.stopped(rows, tokens) if running.stops_most else None
        if stopped is None and (not rows.size or (group.sampled_rows is not None and group.sampled_rows.left > 0)):
            return
        done = s.length[rows] >= running.limit[rows]
        if stopped is not None:
            done |= stopped
        for i in np.flatnonzero(done).tolist() if np.count_nonzero(done) else ():
            request = self._requests.live[int(s.request[rows[i]])]
            self._finisher.end(request, "finish", "stop" if stopped is not None and stopped[i] else "length", None)

    def _aligned(
        self, group: Group, sent: SentStep, result: StepResult
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], TopLogprobs | None, dict[int, KvforgeError]]:
        """Align the result with the sampled rows of the step.

        Returns:
            Tokens, log-probabilities and top log-probabilities in the order of the step, and the errors by slot.
        """
        errors = {row.slot: _restored(row.error) for row in result.errors} if result.errors else {}
        tokens, logprobs, vocabulary = result.tokens, result.logprobs, group.model.vocab_size
        if not result.slots.size == tokens.size == logprobs.size:
            raise ProtocolError("step_result: slots, tokens and logprobs differ in length")
        places, sampled, before = None, sent.sampled, group.sampled_rows
        expected = sent.message.slots if sampled is sent.slots else sampled.astype(np.int32)
        # For few items, comparing bytes is several times faster than numpy's comparison.
        if result.slots.tobytes() != expected.tobytes():
            places = _places(result.slots, sampled)
            # Index -1 selects the appended item, for rows without a token.
            tokens, logprobs = np.append(tokens, np.int32(0))[places], np.append(logprobs, np.float32(0))[places]
            for slot in sampled[places < 0].tolist():
                errors.setdefault(slot, WorkerError("the worker returned no token for this request"))
        # Viewed as unsigned, negative ids are large.
        if np.count_nonzero(tokens.view(np.uint32) >= vocabulary):
            raise ProtocolError(f"step_result: a token outside the vocabulary of {vocabulary}")
        top_logprobs = None
        if result.top_counts.size or result.top_tokens.size or result.top_logprobs.size:
            top_logprobs = TopLogprobs(result.top_counts, result.top_tokens, result.top_logprobs)
            top_logprobs.check(result.slots.size, vocabulary)
            top_logprobs = top_logprobs if places is None else top_logprobs.pick(places)
        elif before.tops if before is not None and before.rows is sampled else self._wants_top_logprobs(sampled):
            top_logprobs = TopLogprobs.none(sampled.size)
        return tokens, logprobs, top_logprobs, errors

    def _wants_top_logprobs(self, rows: Slots) -> bool:
        """Return whether a request in these rows wants top log-probabilities."""
        return bool(np.count_nonzero(self._admission.rows.tops[rows]))

    def _record_top_logprobs(self, rows: Slots, top_logprobs: TopLogprobs) -> TopLogprobs:
        """Record the top log-probabilities of requests that asked for them. Return those to stream."""
        s = self._cache.sequences
        asked = np.flatnonzero(self._admission.rows.tops[rows])
        counts, ends = top_logprobs.counts.tolist(), np.cumsum(top_logprobs.counts).tolist()
        for i in asked.tolist():
            record, part = self._requests.live[int(s.request[rows[i]])].tops, slice(ends[i] - counts[i], ends[i])
            assert record is not None
            record.add(top_logprobs.tokens[part], top_logprobs.logprobs[part])
            counts[i] = 0
        if not any(counts):
            return top_logprobs  # no other row has any
        wanted = np.full(rows.size, -1)
        wanted[asked] = asked
        return top_logprobs.pick(wanted)

    def _scored_rows(self, group: Group, sent: SentStep, result: StepResult) -> list[tuple[int, int, ScoredTokens]]:
        """Return the slot, the first position and the log-probabilities of each scored row that still runs.

        Raises:
            ProtocolError: The log-probabilities do not fit the step.
        """
        step = sent.message
        found = ScoredTokens(
            result.prompt_logprobs,
            result.prompt_ranks,
            TopLogprobs(result.prompt_top_counts, result.prompt_top_tokens, result.prompt_top_logprobs),
        )
        ends = np.cumsum(sent.counts)
        rows = np.searchsorted(ends, step.scored, "right")
        positions = step.scored - (ends - sent.counts)[rows] + step.starts[rows]
        if result.errors:
            failed = np.isin(sent.slots[rows], [row.slot for row in result.errors])
            rows, positions = rows[~failed], positions[~failed]
        found.check(rows.size, group.model.vocab_size)
        running = self._admission.rows.run[sent.slots] == sent.runs
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        parts = []
        for start, end in itertools.pairwise((*first.tolist(), rows.size)):
            row = int(rows[start])
            if running[row]:
                parts.append((int(sent.slots[row]), int(positions[start]), found.pick(np.arange(start, end))))
        return parts

    def _record_prompts(self, prompts: list[tuple[int, int, ScoredTokens]]) -> None:
        """Record log-probabilities of prompts, and stream them."""
        running = self._admission.rows
        for slot, position, scored in prompts:
            request = self._requests.live[int(self._cache.sequences.request[slot])]
            record = request.prompt_logprobs
            assert record is not None and record.size == position, "log-probabilities of other prompt tokens were due"
            record.add(scored)
            tokens = record.prompt[position + 1 : record.size + 1]
            columns = (tokens, scored.logprobs, scored.tops, scored.ranks)
            reader = int(running.reader[slot]) if request.reads_prompt else 0
            self._streams.add_tokens(reader, request.id, position - record.total, *columns)

    def _finish_scored(self, slots: Slots) -> None:
        """End requests that generate no token once their prompts are computed."""
        s = self._cache.sequences
        done = self._admission.rows.only_scores(slots) & (s.computed[slots] == s.length[slots])
        for slot in slots[done].tolist():
            request = self._requests.live[int(s.request[slot])]
            self._meters.count(request.tenant, PREFILLED, request.prompt_tokens)
            self._finisher.end(request, "finish", "length", None)

    def _append(
        self,
        group: Group,
        sent: SentStep,
        rows: Slots,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        top_logprobs: TopLogprobs | None,
    ) -> None:
        """Append the sampled tokens [n] to their sequences and stream them."""
        if not rows.size:
            return
        s, running, tenants, tenant = self._cache.sequences, self._admission.rows, self._cache.tenants, sent.tenant
        sampled = group.sampled_rows
        if sampled is None or sampled.rows is not rows:
            sampled = group.sampled_rows = self._sampled(rows)
        before, offsets = sampled.length, sampled.offsets
        length = sampled.length = before + ONE
        s.append_sampled(rows, length, sampled.cells, tokens | GENERATED_MARK, logprobs)
        if rows is sent.slots:
            s.computed[rows] = before  # a row samples when all its tokens are computed
        if rows is sent.slots and (not group.sent or group.sent[-1].slots is rows):
            s.pending[rows] = len(group.sent)  # every step in flight repeats these rows
        else:
            s.pending[rows] -= 1
        for slot in rows[running.fresh[rows]].tolist() if running.fresh_count else ():
            self._first_token(slot)
        self._requests.generated_tokens_total += rows.size
        if tenant >= 0:
            tenants.service[tenant] += rows.size / tenants.weight.item(tenant)
        else:
            self._admission.waiting.charge_each(s.tenant[rows])
        self._count(group, rows, tenant)
        if top_logprobs is not None:
            top_logprobs = self._record_top_logprobs(rows, top_logprobs)
        streamed = StreamRows(sampled.requests, offsets, tokens, logprobs, top_logprobs)
        if sampled.readers_changed != running.readers_changed:
            self._read_readers(sampled)
        if sampled.reader > 0:
            self._streams.add_step(sampled.reader, streamed)
        elif sampled.reader < 0:
            self._streams.add_step_of_clients(running.reader[rows], streamed)
        sampled.offsets = offsets + ONE_32
        np.add(sampled.cells.where, ONE, sampled.cells.where)
        sampled.left -= 1

    def _append_drafted(
        self,
        group: Group,
        sent: SentStep,
        rows: Slots,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        top_logprobs: TopLogprobs | None,
        further: FurtherTokens,
    ) -> tuple[npt.NDArray[np.int32], Slots]:
        """Append the first tokens [n] of the rows of a step with drafts, and those accepted up to a stop token.

        Each is charged, counted and streamed like the token of any row. The KV of the tokens that were not accepted is
        no longer scheduled, so that the next step writes over it.

        Returns:
            The last token of each row, [n], and the rows that had drafts.
        """
        s, running, tenants, tenant = self._cache.sequences, self._admission.rows, self._cache.tenants, sent.tenant
        group.sampled_rows = None  # each row is at another place now
        if not rows.size:
            return tokens, NO_SLOTS
        further = self._until_stops(sent, rows, tokens, further)
        behind, length = further.slots, s.length[rows]
        accepted = np.bincount(behind, minlength=s.length.size)[rows]
        slots, newest = np.concatenate((rows, behind)), np.concatenate((tokens, further.tokens))
        at = np.concatenate((length, s.length[behind] + further.places))
        scores = np.concatenate((logprobs, further.logprobs))
        s.append_accepted(rows, length + accepted + ONE, slots, at, newest | GENERATED_MARK, scores)
        s.computed[rows] += accepted
        s.pending[rows] -= 1
        for slot in rows[running.fresh[rows]].tolist() if running.fresh_count else ():
            self._first_token(slot)
        self._requests.generated_tokens_total += slots.size
        self._count(group, rows, tenant)
        for own in (rows, behind) if behind.size else (rows,):  # apart, as sums of floats depend on their order
            if tenant >= 0:
                tenants.service[tenant] += own.size / tenants.weight.item(tenant)
            else:
                self._admission.waiting.charge_each(s.tenant[own])
        if behind.size and tenant >= 0:
            self._meters.observe(tenant, GAP, 0, behind.size)  # they came with the first one
        elif behind.size:
            self._meters.observe_gaps(s.tenant[behind], 0)
        streamed = StreamRows(s.request[slots], (at - running.base[slots]).astype(np.int32), newest, scores, None)
        self._stream_drafted(slots, streamed, top_logprobs, further)
        verified = self._learn(group, sent, rows, accepted)
        if running.stops_most:
            last = np.zeros(s.length.size, np.int32)
            last[slots] = newest  # of a row, the last one is kept
            tokens = last[rows]
        return tokens, verified

    def _until_stops(
        self, sent: SentStep, rows: Slots, tokens: npt.NDArray[np.int32], further: FurtherTokens
    ) -> FurtherTokens:
        """Return the tokens behind the first ones [n] of the rows, up to a stop token of each row."""
        running = self._admission.rows
        ended = running.stopped(rows, tokens) if running.stops_most else None
        if ended is not None:
            further = further.of(rows[~ended])
        elif rows is not sent.sampled:  # otherwise no row has left
            further = further.of(rows)
        if not running.stops_most or not further.slots.size:
            return further
        stops = running.stopped(further.slots, further.tokens)
        return further if stops is None else further.until(stops)

    def _stream_drafted(
        self, slots: Slots, rows: StreamRows, top_logprobs: TopLogprobs | None, further: FurtherTokens
    ) -> None:
        """Stream the first token of each row and then the others, with the top log-probabilities of both.

        Args:
            slots: The slot of each token, [n].
            rows: The tokens.
            top_logprobs: Of the first tokens; None if no row has any.
            further: The others.
        """
        parts = [(slots, rows)]
        if top_logprobs is not None or further.tops is not None:
            first, parts = slots.size - further.slots.size, []
            for part, tops in ((np.arange(first), top_logprobs), (np.arange(first, slots.size), further.tops)):
                recorded = None if tops is None else self._record_top_logprobs(slots[part], tops)
                if part.size:
                    parts.append((slots[part], rows.pick(part)._replace(tops=recorded)))
        for own, part_of in parts:
            readers = self._admission.rows.reader[own]
            if (reader := _common(readers)) > 0:
                self._streams.add_step(reader, part_of)
            elif reader < 0:
                self._streams.add_step_of_clients(readers, part_of)

    def _learn(self, group: Group, sent: SentStep, rows: Slots, accepted: Slots) -> Slots:
        """Account for the drafts of rows of which so many were accepted, [n]. Return those that had some."""
        s, each = self._cache.sequences, np.zeros(self._cache.sequences.length.size, np.int32)
        each[sent.slots] = sent.message.drafts
        drafted = each[rows]
        had = drafted > 0
        verified = rows[had]
        s.pending[verified] = 0
        s.scheduled[verified] = s.computed[verified]
        requests = [self._requests.live[request] for request in s.request[verified].tolist()]
        self._admission.drafts.learn(group, requests, drafted[had].tolist(), accepted[had].tolist())
        return verified

    def _take_checkpoints(self, group: Group, sent: SentStep, verified: Slots) -> None:
        """Take checkpoints of the rows that accepted drafts have brought to a position where one is wanted."""
        s, base = self._cache.sequences, self._admission.rows.base
        starts = dict(zip(sent.slots.tolist(), sent.message.starts.tolist(), strict=True))
        for slot in verified[s.scheduled[verified] % s.block_size == 0].tolist():
            self._cache.checkpoints.take_wanted(group, slot, int(base[slot]), starts[slot])

    def _sampled(self, rows: Slots) -> SampledRows:
        """Return rows with what their results need, before the next token of each is appended."""
        s, running = self._cache.sequences, self._admission.rows
        length = s.length[rows]
        offsets = (length - running.base[rows]).astype(np.int32)
        left = int(np.minimum.reduce(running.limit[rows] - length))
        cells = s.next_cells(rows, length)
        return SampledRows(rows, s.request[rows], length, offsets, cells, left, self._wants_top_logprobs(rows))

    def _read_readers(self, sampled: SampledRows) -> None:
        """Find out which client reads the rows."""
        running = self._admission.rows
        sampled.reader = _common(running.reader[sampled.rows])
        sampled.readers_changed = running.readers_changed

    def _count(self, group: Group, rows: Slots, tenant: int) -> None:
        """Record the time between tokens. Most steps repeat the rows of the step before, and share one gap."""
        now_us, token_us = self._clock.now_us, self._admission.rows.token_us
        if rows is group.last_sampled and tenant >= 0:
            self._meters.observe(tenant, GAP, now_us - group.last_sampled_us, rows.size)
        elif rows is group.last_sampled:
            self._meters.observe_gaps(self._cache.sequences.tenant[rows], now_us - group.last_sampled_us)
        elif tenant >= 0 and (since_us := _common(token_us[rows])) >= 0:  # as where each step has drafts
            self._meters.observe(tenant, GAP, now_us - since_us, rows.size)
        else:
            before_us = token_us[rows]
            gaps_us = np.where(before_us >= 0, now_us - before_us, -1)
            self._meters.observe_gaps(self._cache.sequences.tenant[rows], gaps_us)
        token_us[rows] = now_us
        group.last_sampled, group.last_sampled_us = rows, now_us


def _common(values: npt.NDArray[np.int64]) -> int:
    """Return the value of all items, [n > 0], or -1 if they differ."""
    first = values.item(0)
    return first if np.count_nonzero(values == values[0]) == values.size else -1


def _restored(error: ErrorInfo) -> KvforgeError:
    """Restore a row's error, limited to the sizes that this coordinator would send itself."""
    fields = {name: value[:FIELD_MAX] if isinstance(value, str) else value for name, value in error.fields.items()}
    return restore(error.code, error.message[:ERROR_TEXT_MAX], dict(list(fields.items())[:FIELDS_MAX]))


def _places(slots: npt.NDArray[np.int32], sampled: Slots) -> npt.NDArray[np.int64]:
    """Return the index of each sampled row in a result, -1 if missing.

    Raises:
        ProtocolError: The result has a row that did not sample.
    """
    where = {slot: i for i, slot in enumerate(slots.tolist())}
    expected = sampled.tolist()
    if not where.keys() <= set(expected):
        raise ProtocolError("step_result: a token for a row that did not sample")
    return np.array([where.get(slot, -1) for slot in expected], np.int64)
