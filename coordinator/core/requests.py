"""The life of a request: one literal transition table, one record each, bounded tables.

pending ──schedule──> running ──finish──> finished
                      running ──preempt─> preempted ──schedule──> running
                                          preempted ──finish──> finished (its client has enough)
pending, running, preempted ──cancel──> cancelled   ──expire──> expired   ──fail──> failed
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from protocol.errors import AlreadyFinished, InvalidTransition, KvforgeError, RequestNotFound
from protocol.messages import NO_FLOAT32, NO_INT32, Sampling, Timings

from .hashing import Hashes
from .limits import Limits
from .tops import TopRecord

PENDING, RUNNING, PREEMPTED = "pending", "running", "preempted"
FINISHED, FAILED, CANCELLED, EXPIRED = "finished", "failed", "cancelled", "expired"
TERMINAL = (FINISHED, FAILED, CANCELLED, EXPIRED)

TRANSITIONS: dict[tuple[str, str], str] = {
    (PENDING, "schedule"): RUNNING,
    (PENDING, "fail"): FAILED,
    (PENDING, "cancel"): CANCELLED,
    (PENDING, "expire"): EXPIRED,
    (RUNNING, "preempt"): PREEMPTED,
    (RUNNING, "finish"): FINISHED,
    (RUNNING, "fail"): FAILED,
    (RUNNING, "cancel"): CANCELLED,
    (RUNNING, "expire"): EXPIRED,
    (PREEMPTED, "schedule"): RUNNING,
    (PREEMPTED, "finish"): FINISHED,
    (PREEMPTED, "fail"): FAILED,
    (PREEMPTED, "cancel"): CANCELLED,
    (PREEMPTED, "expire"): EXPIRED,
}

NO_SLOT = -1


class Request:
    """One request. `prompt` is what it started from; `tokens` what it has generated, while it holds no slot."""

    __slots__ = (
        "admitted_order",
        "cached_tokens",
        "client",
        "ended_us",
        "error",
        "first_scheduled_us",
        "first_token_us",
        "generated",
        "hashes",
        "id",
        "logprobs",
        "max_tokens",
        "prompt",
        "reason",
        "salt",
        "sampling",
        "seed",
        "sequence_id",
        "slot",
        "state",
        "stream",
        "submitted_us",
        "tenant",
        "tokens",
        "tops",
        "worker",
    )

    def __init__(
        self,
        request_id: int,
        client: int,
        tenant: int,
        prompt: npt.NDArray[np.int32],
        max_tokens: int,
        sampling: Sampling,
        seed: int,
        stream: bool,
        now_us: int,
        salt: int,
        sequence_id: int = 0,
    ) -> None:
        self.id, self.client, self.tenant = request_id, client, tenant
        self.prompt, self.max_tokens, self.sampling = prompt, max_tokens, sampling
        self.seed, self.stream, self.submitted_us = seed, stream, now_us
        self.sequence_id, self.salt = sequence_id, salt
        self.state = PENDING
        self.slot = NO_SLOT
        self.tokens: npt.NDArray[np.int32] = NO_INT32
        self.logprobs: npt.NDArray[np.float32] = NO_FLOAT32
        self.tops = TopRecord(sampling.logprobs) if sampling.logprobs else None
        self.generated = 0
        self.cached_tokens = 0
        self.admitted_order = 0
        self.hashes: Hashes | None = None
        self.reason = ""
        self.worker = ""
        self.error: KvforgeError | None = None
        self.first_scheduled_us = self.first_token_us = self.ended_us = -1

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in TERMINAL

    def move(self, event: str) -> None:
        """Takes the transition for `event`. Raises AlreadyFinished or InvalidTransition and changes nothing."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            if self.ended:
                raise AlreadyFinished(self.id, self.state)
            raise InvalidTransition(self.id, self.state, event)
        self.state = target

    def timings(self) -> Timings:
        """Microseconds since submission of what has happened so far."""

        def since(at_us: int) -> int:
            return at_us - self.submitted_us if at_us >= 0 else -1

        return Timings(
            first_scheduled_us=since(self.first_scheduled_us),
            first_token_us=since(self.first_token_us),
            ended_us=since(self.ended_us),
        )


class RequestTable:
    """Every request that is alive, and the most recent ones that ended."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.live: dict[int, Request] = {}
        self.finished: OrderedDict[int, Request] = OrderedDict()
        self.ended_total = dict.fromkeys(TERMINAL, 0)
        self.accepted_total = 0
        self.refused_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.generated_tokens_total = 0
        self.computed_tokens_total = 0
        self.recomputed_tokens_total = 0
        self.preemptions_total = 0

    def find(self, request_id: int) -> Request:
        """Raises RequestNotFound."""
        request = self.live.get(request_id) or self.finished.get(request_id)
        if request is None:
            raise RequestNotFound(request_id)
        return request

    def add(self, request: Request) -> None:
        """A request was admitted."""
        self.live[request.id] = request
        self.accepted_total += 1
        self.prompt_tokens_total += request.prompt.size

    def retire(self, request: Request, now_us: int) -> None:
        """A request reached a terminal state: it stays queryable, within bounds of age and number."""
        del self.live[request.id]
        request.ended_us = now_us
        request.hashes = None
        self.ended_total[request.state] += 1
        self.finished[request.id] = request
        while len(self.finished) > self._limits.finished_max:
            self.finished.popitem(last=False)

    def purge(self, now_us: int, older_than_us: int) -> int:
        """Forgets requests that ended at least `older_than_us` ago. Returns how many."""
        count = 0
        while self.finished:
            oldest = next(iter(self.finished.values()))
            if now_us - oldest.ended_us < older_than_us:
                break
            del self.finished[oldest.id]
            count += 1
        return count

    def check_invariants(self) -> None:
        """Live requests are alive, finished ones have ended, nobody is both, and both tables are bounded."""
        assert not any(request.ended for request in self.live.values()), "an ended request is live"
        assert all(request.ended and request.slot == NO_SLOT for request in self.finished.values()), "a finished one"
        assert not self.live.keys() & self.finished.keys(), "a request is both live and finished"
        assert len(self.finished) <= self._limits.finished_max, "the finished table is above its bound"
        assert all((request.slot != NO_SLOT) == (request.state == RUNNING) for request in self.live.values()), "slots"
