"""What happens when a step's result arrives: tokens are appended, blocks indexed, requests ended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.errors import KvforgeError, ProtocolError, WorkerError, restore
from protocol.messages import Ended, ErrorInfo, StepResult

from .cache import Cache
from .groups import Group, SentStep
from .requests import NO_SLOT, Request, RequestTable
from .scheduler import Scheduler
from .sequences import Slots
from .streams import Streams


class Outcomes:
    """Applies step results and ends requests: the only place where a request reaches a terminal state."""

    def __init__(self, cache: Cache, requests: RequestTable, scheduler: Scheduler, streams: Streams) -> None:
        self._cache, self._requests, self._scheduler, self._streams = cache, requests, scheduler, streams

    def settle(self, group: Group, result: StepResult, now_us: int) -> None:
        """Applies the result of the oldest step under way. Raises ProtocolError where it does not fit that step."""
        sent = group.sent[0]
        tokens, logprobs, errors = self._aligned(group, sent, result)
        s, runs = self._cache.sequences, self._scheduler.runs
        group.sent.popleft()
        live = runs.serial[sent.slots] == sent.serials
        failed = np.isin(sent.slots, np.fromiter(errors, np.int64, len(errors)))
        good = live & ~failed
        slots = sent.slots[good]
        s.computed[slots] += sent.counts[good]
        sampled = (good & sent.samples)[sent.samples]
        rows = sent.slots[sent.samples][sampled]
        self._append(rows, tokens[sampled], logprobs[sampled], now_us)
        self._cache.index_filled(slots, now_us)
        self._cache.settle(group, sent.step_id, now_us)
        stopped = (runs.stops[rows] == tokens[sampled][:, None]).any(axis=1)
        full = s.length[rows] >= runs.limit[rows]
        for slot, by_stop in zip(rows[stopped | full].tolist(), stopped[stopped | full].tolist(), strict=True):
            request = self._requests.live[int(s.request[slot])]
            self.end(request, "finish", "stop" if by_stop else "length", None, now_us)
        for slot in sent.slots[live & failed].tolist():
            request = self._requests.live[int(s.request[slot])]
            self.end(request, "fail", "failed", errors[slot], now_us)

    def _aligned(
        self, group: Group, sent: SentStep, result: StepResult
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], dict[int, KvforgeError]]:
        """Tokens and log-probabilities of the sampled rows in the step's own order, and the errors by slot."""
        errors = {row.slot: restore(row.error.code, row.error.message, row.error.fields) for row in result.errors}
        expected = sent.slots[sent.samples]
        if not result.slots.size == result.tokens.size == result.logprobs.size:
            raise ProtocolError("step_result: slots, tokens and logprobs differ in length")
        if np.array_equal(result.slots, expected):
            tokens, logprobs = result.tokens, result.logprobs
        else:
            where = {slot: i for i, slot in enumerate(result.slots.tolist())}
            tokens = np.zeros(expected.size, np.int32)
            logprobs = np.zeros(expected.size, np.float32)
            for i, slot in enumerate(expected.tolist()):
                if slot in where:
                    tokens[i], logprobs[i] = result.tokens[where[slot]], result.logprobs[where[slot]]
                elif slot not in errors:
                    errors[slot] = WorkerError("the worker returned no token for this request")
            if not set(where) <= set(expected.tolist()):
                raise ProtocolError("step_result: a token for a row that did not sample")
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < group.model.vocab_size:
            raise ProtocolError(f"step_result: a token outside the vocabulary of {group.model.vocab_size}")
        return tokens, logprobs, errors

    def _append(
        self, rows: Slots, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], now_us: int
    ) -> None:
        """The sampled tokens become part of their sequences and are streamed: [n] each."""
        if not rows.size:
            return
        s, runs = self._cache.sequences, self._scheduler.runs
        at = s.length[rows]
        s.tokens[rows, at] = tokens
        s.logprobs[rows, at] = logprobs
        s.length[rows] += 1
        s.pending[rows] -= 1
        s.accessed_us[rows] = now_us
        s.changed_rows.append(rows)
        offsets = at - runs.base[rows]
        for slot in rows[offsets == 0].tolist():
            self._requests.live[int(s.request[slot])].first_token_us = now_us
        self._requests.generated_tokens_total += rows.size
        streamed = runs.stream[rows]
        if streamed.any():
            wanted = rows[streamed]
            self._streams.add_step(
                runs.client[wanted], s.request[wanted], offsets[streamed], tokens[streamed], logprobs[streamed]
            )

    def end(self, request: Request, event: str, reason: str, error: KvforgeError | None, now_us: int) -> None:
        """The one idempotent release: any terminal transition comes through here.

        Raises AlreadyFinished or InvalidTransition where the transition is not allowed, and then changes nothing.
        """
        request.move(event)
        if request.slot != NO_SLOT:
            self._scheduler.vacate(request, now_us)
        else:
            self._scheduler.waiting.remove(request)
            if request.sequence_id:
                slot = self._cache.sequences.slot_of.get(request.sequence_id)
                if slot is not None:
                    self._cache.sequences.request[slot] = 0
        request.reason, request.error = reason, error
        request.generated = request.tokens.size
        self._requests.retire(request, now_us)
        if not request.stream:
            self._streams.add_tokens(request.client, request.id, 0, request.tokens, request.logprobs)
        ended = Ended(
            request_id=request.id,
            reason=reason,
            generated_tokens=request.tokens.size,
            prompt_tokens=request.prompt.size,
            cached_tokens=request.cached_tokens,
            timings=request.timings(),
            error=ErrorInfo.of(error) if error is not None else None,
        )
        self._streams.add_end(request.client, ended)
