"""Appending the sampled tokens of a result: they are charged to tenants, counted and streamed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.meters import FIRST_TOKEN, GAP, PREFILLED

from ..cache.groups import Group, SampledRows, SentStep
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.sequences import GENERATED_MARK, NO_SLOTS, ONE, ONE_32, Slots
from ..requests.request import Request
from ..requests.streams import StreamRows, Streams
from ..requests.table import RequestTable
from ..requests.top_logprobs import TopLogprobs
from ..scheduling.admission import Admission
from .accepted import FurtherTokens


class TokenAppender:
    """Appends the tokens of results to their sequences."""

    def __init__(self, cache: KVCacheManager, requests: RequestTable, admission: Admission, streams: Streams) -> None:
        self._cache, self._requests, self._admission, self._streams = cache, requests, admission, streams
        self._clock, self._meters = cache.clock, cache.tenants.meters

    def append(
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

    def append_drafted(
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
        assert rows is not sent.slots, "only a repeated step, without drafts, leaves counting to `append`"
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

    def wants_top_logprobs(self, rows: Slots) -> bool:
        """Return whether a request in these rows wants top log-probabilities."""
        return bool(np.count_nonzero(self._admission.rows.tops[rows]))

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

    def _sampled(self, rows: Slots) -> SampledRows:
        """Return rows with what their results need, before the next token of each is appended."""
        s, running = self._cache.sequences, self._admission.rows
        length = s.length[rows]
        offsets = (length - running.base[rows]).astype(np.int32)
        left = int(np.minimum.reduce(running.limit[rows] - length))
        cells = s.next_cells(rows, length)
        return SampledRows(rows, s.request[rows], length, offsets, cells, left, self.wants_top_logprobs(rows))

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
