"""Step results: tokens are appended, blocks indexed, requests ended."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import KvforgeError, ProtocolError, WorkerError, restore
from kvforge.protocol.messages import ERROR_TEXT_MAX, NO_INT32, ErrorInfo, StepResult
from kvforge.protocol.meters import PREFILLED

from ..cache.groups import Group, SentStep
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.sequences import NO_SLOTS, Slots
from ..deadlines import TRIAL
from ..requests.prompt_logprobs import ScoredTokens
from ..requests.streams import Streams
from ..requests.table import RequestTable
from ..requests.top_logprobs import TopLogprobs
from ..scheduling.admission import Admission
from ..scheduling.finisher import RequestFinisher
from .accepted import NOTHING_FURTHER, split
from .appending import TokenAppender

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
        self._appender = TokenAppender(cache, requests, admission, streams)

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
        if group.host is not None or result.host_copied.size or result.host_missed.size:
            missed = self._host_copied(group, sent, result)
            prompts = [scored for scored in prompts if scored[0] not in missed]
        group.sent.popleft()
        slots, rows, counts, running = sent.slots, sent.sampled, sent.counts, self._admission.rows
        if sent.message.drafts.size:
            counts = counts - sent.message.drafts  # of first tokens; `append_drafted` counts the others
        failing: dict[int, int] = {}
        if errors or sent.step_id <= group.left_step:  # some rows may have ended or been preempted
            good, sampled, failing = self._good_rows(sent, counts, result, errors)
            slots, rows, counts = slots[good], rows[sampled], counts[good]
            tokens, logprobs = tokens[sampled], logprobs[sampled]
            top_logprobs = None if top_logprobs is None else top_logprobs.pick(np.flatnonzero(sampled))
        if rows is not slots:  # otherwise each row samples, and `append` writes what was computed
            self._cache.sequences.computed[slots] += counts
        if prompts:
            self._record_prompts(prompts)
        verified = NO_SLOTS
        if sent.message.drafts.size:
            own = (rows, tokens, logprobs, top_logprobs)
            tokens, verified = self._appender.append_drafted(group, sent, *own, further)
        else:
            self._appender.append(group, sent, rows, tokens, logprobs, top_logprobs)
        if group.suspect:
            self._admission.look_at_suspect(group)
        self._update_blocks(group, sent, slots, verified)
        stopped = running.stopped(rows, tokens) if running.stops_most else None
        if stopped is not None or (rows.size and (group.sampled_rows is None or group.sampled_rows.left <= 0)):
            self._finish(rows, stopped)
        if verified.size and group.state_blocks:
            self._take_checkpoints(group, sent, verified)
        if running.scores_count:
            self._finish_scored(slots)
        if group.proposals or group.expected or result.draft_slots.size or sent.message.propose:
            drafts.take(group, sent, result)
        if failing:
            self._end_failing(failing, errors)

    def _good_rows(
        self, sent: SentStep, counts: Slots, result: StepResult, errors: dict[int, KvforgeError]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[int, int]]:
        """Find the rows of a step that did not fail, and whose requests were not preempted or ended meanwhile.

        Args:
            sent: The step.
            counts: Tokens of each row without its drafts, [rows].
            result: Its result.
            errors: The errors by slot.

        Returns:
            Which rows these are: [rows]; for the rows that sample, which get a token: [sampled]; running
            requests with an error, by slot: the milliseconds until they are tried again, 0 for never.
        """
        s, slots = self._cache.sequences, sent.slots
        again = {row.slot: row.again_ms for row in result.errors if row.again_ms > 0}
        live = self._admission.rows.run[slots] == sent.runs
        failed = np.isin(slots, np.fromiter(errors, np.int64, len(errors)))
        failing = {slot: again.get(slot, 0) for slot in slots[live & failed & s.running[slots]].tolist()}
        good = live & ~failed
        idle = live & ~s.running[slots]
        if np.count_nonzero(idle):
            good &= ~idle | self._idle_tails(sent, idle)
        if again:
            self._keep_prefill(slots, counts, live & np.isin(slots, list(again)))
        return good, (good & ~idle)[sent.samples], failing

    def _update_blocks(self, group: Group, sent: SentStep, slots: Slots, verified: Slots) -> None:
        """Index the blocks that a step has filled, and release what no later step reads.

        Args:
            group: The group.
            sent: The step.
            slots: The rows that count, [n].
            verified: Those with verified drafts, [m].
        """
        cache, windows, leaving, behind = self._cache, self._cache.windows, NO_SLOTS, NO_SLOTS
        if group.forming:
            cache.checkpoints.computed(group)
        if group.window_pages:
            leaving, behind = windows.out_of_sight(group, slots)
        # Blocks filled by decodes are indexed for several steps at once, which is cheaper.
        if (
            not sent.decodes
            or not group.sent
            or sent.step_id % INDEX_STEPS == 0
            or (leaving.size and windows.unindexed(leaving, behind))
        ):
            cache.indexing.filled(group)
        group.pool.step_done(sent.step_id)
        if verified.size:
            cache.residency.give_back(group, verified)
        if leaving.size:
            windows.release_behind(group, leaving, behind)
        if group.forming:
            cache.checkpoints.settle(group)
        if cache.sequences.quarantine:
            cache.sequences.step_done(group.number, sent.step_id)

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

    def _finish(self, rows: Slots, stopped: npt.NDArray[np.bool_] | None) -> None:
        """End requests that got a stop token or their last token.

        Args:
            rows: The rows that got a token, [n].
            stopped: Which got a stop token: [n]; None if none did.
        """
        s = self._cache.sequences
        done = s.length[rows] >= self._admission.rows.limit[rows]
        if stopped is not None:
            done |= stopped
        for i in np.flatnonzero(done).tolist() if np.count_nonzero(done) else ():
            request = self._requests.live[int(s.request[rows[i]])]
            self._finisher.end(request, "finish", "stop" if stopped is not None and stopped[i] else "length", None)

    def _end_failing(self, failing: dict[int, int], errors: dict[int, KvforgeError]) -> None:
        """End the requests of rows with an error, or put them off.

        Args:
            failing: The milliseconds until each is tried again, by slot; 0 for never.
            errors: Their errors by slot.
        """
        for slot, again_ms in failing.items():
            request = self._requests.live[int(self._cache.sequences.request[slot])]
            if again_ms:
                self._admission.put_off(request)
                self._deadlines.set(self._clock.now_us + 1000 * min(again_ms, AGAIN_MS_MAX), request.id, TRIAL)
            else:
                self._finisher.end(request, "fail", "failed", errors[slot])

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
        elif (
            before.tops if before is not None and before.rows is sampled else self._appender.wants_top_logprobs(sampled)
        ):
            top_logprobs = TopLogprobs.none(sampled.size)
        return tokens, logprobs, top_logprobs, errors

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

    def _take_checkpoints(self, group: Group, sent: SentStep, verified: Slots) -> None:
        """Take checkpoints of the rows that accepted drafts have brought to a position where one is wanted."""
        s, base = self._cache.sequences, self._admission.rows.base
        starts = dict(zip(sent.slots.tolist(), sent.message.starts.tolist(), strict=True))
        for slot in verified[s.scheduled[verified] % s.block_size == 0].tolist():
            self._cache.checkpoints.take_wanted(group, slot, int(base[slot]), starts[slot])


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
