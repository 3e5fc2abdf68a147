"""vLLM's own scheduler under a load, as a simulation: device times come from a table, the scheduler's are measured.

Requests arrive at their due times on a simulated clock. A step costs the measured wall time of `schedule` and
`update_from_output` plus the table's device time: one after the other, as with asynchronous scheduling off; or
("ahead") a step is scheduled as soon as the previous one has begun and waits for its end, as with asynchronous
scheduling on (vLLM's scheduler then has a little more work than the one timed here). Everything around the scheduler
is free: sockets, encoding, hashing of prompts, detokenising, the API's process.
"""

from __future__ import annotations

import gc
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvforge.loadtest.fleet.step_times import StepTimes

from .capacity_client import Load, Seen
from .vllm_scheduler import make_request, make_scheduler

TOKEN = 7  # every answer token


class Replay:
    """One run. scale: factor of the table's times."""

    def __init__(self, load: Load, table: StepTimes, scale: float, rows: int, step_tokens: int, *, ahead: bool) -> None:
        self._load, self._table, self._scale, self._ahead = load, table, scale, ahead
        context = load.prompts.shape[1] + load.answer
        self._scheduler, hasher = make_scheduler(rows, table.blocks(16), step_tokens, context_tokens_max=context + 1)
        count = load.due.size
        self._requests = [make_request(str(i), load.prompts[i].tolist(), load.answer, hasher) for i in range(count)]
        self.seen = Seen.nothing(count)
        self._device_free_at = 0.0
        self._busy_s = 0.0
        self.busy_share = 0.0  # set by `run`
        self.steps = 0

    def run(self, end_s: float) -> Seen:
        """Simulate until all requests have ended or the clock reaches `end_s`."""
        due, count, now, came, over = self._load.due, self._load.due.size, 0.0, 0, 0
        gc.collect()
        gc.freeze()  # as its engine does
        while over < count and now < end_s:
            if came == over:
                now = max(now, due[came])  # nothing to do until then
            while came < count and due[came] <= now:
                began = perf_counter_ns()
                self._scheduler.add_request(self._requests[came])
                spent_s = (perf_counter_ns() - began) / 1e9
                self._busy_s += spent_s
                now += spent_s
                self.seen.sent[came] = due[came]
                came += 1
            now, ended = self._step(now)
            over += ended
        gc.unfreeze()
        self._scheduler.shutdown()
        self.busy_share = self._busy_s / now
        return self.seen

    def _step(self, now: float) -> tuple[float, int]:
        """Schedule a step; return when the next one is scheduled and how many requests this one ends."""
        from vllm.v1.outputs import ModelRunnerOutput

        began = perf_counter_ns()
        step = self._scheduler.schedule()
        scheduled_ns = perf_counter_ns() - began
        ids = list(step.num_scheduled_tokens)
        counts = np.fromiter(step.num_scheduled_tokens.values(), np.int32, len(ids))
        requests = [self._scheduler.requests[name] for name in ids]
        computed = np.fromiter((request.num_computed_tokens for request in requests), np.int32, len(ids))
        device_s = self._scale * self._table.step_s(computed - counts, counts)
        sampled = [[TOKEN] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        lengths = [request.num_output_tokens for request in requests]
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=sampled
        )
        began = perf_counter_ns()
        self._scheduler.update_from_output(step, output)
        scheduled_s, updated_s = scheduled_ns / 1e9, (perf_counter_ns() - began) / 1e9
        self._busy_s += scheduled_s + updated_s
        self.steps += 1
        begins = max(now + scheduled_s, self._device_free_at)
        self._device_free_at = ends = begins + device_s
        over = self._note(now, ends, ids, lengths, sampled)
        return (max(begins, now + scheduled_s + updated_s) if self._ahead else ends + updated_s), over

    def _note(self, now: float, then: float, ids: list[str], lengths: list[int], sampled: list[Any]) -> int:
        seen, over = self.seen, 0
        seen.tokens_at.append(then)
        seen.tokens.append(sum(map(len, sampled)))
        for name, length, tokens in zip(ids, lengths, sampled, strict=True):
            i = int(name)
            if length == 0 and np.isnan(seen.queued[i]):
                seen.queued[i] = now - self._load.due[i]
            if tokens and length == 0:
                seen.first[i] = then
            if tokens and length + 1 == self._load.answer:
                seen.ended[i] = then
                over += 1
        return over
