"""The lifecycle of requests: a transition table, a record for each request, and bounded tables.

pending ──schedule──> running ──finish──> finished
                      running ──preempt─> preempted ──schedule──> running
                                          preempted ──finish──> finished (by the client)
pending, running, preempted ──cancel──> cancelled   ──expire──> expired   ──fail──> failed
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import AlreadyFinished, InvalidTransition, KvforgeError, RequestNotFound
from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, SamplingParams, Submit, Timings
from kvforge.protocol.meters import (
    ACCEPTED,
    ANSWER_SIZE,
    DECODE,
    ENDED,
    PREFILL,
    PROMPT,
    PROMPT_SIZE,
    WAITING,
    WHOLE,
)

from ..cache.hashing import Hashes
from ..cache.tenants import Tenants
from ..clock import Clock
from ..limits import Bounds, microseconds
from ..waits import GRAMMAR, SIBLING, TENANT_CEILING, Wait
from .idempotency import IdempotencyKey, IdempotencyKeys
from .phases import Phases
from .top_logprobs import TopRecord

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
NO_SAMPLING = SamplingParams()
LOST = "it was lost: it dates from before the coordinator was started"


@dataclass(slots=True, eq=False)
class Request:
    """One request. `prompt` is its input; `tokens` is its output so far, while it holds no slot.

    Attributes:
        siblings: The live requests of one Submit with several answers, including this one.
        prompt_known: A sibling that has ended since had computed the prompt.
        client: The client that reads it, 0 for none.
        paused: Its stream is paused until the client attaches again.
        orphan_us: Since when its connection is gone; -1 if connected.
        passed: Requests that started before it while it had no room.
        kept_epoch: The group in which room is kept for it; 0 for none.
        wait: Its wait record; None if it has not been tried since something changed for it.
        computed: Tokens with computed KV when it was last preempted.
        redone_tokens: Tokens computed again so far.
        crashes: Workers that died in a row while running it, with no token in between.
        crash_length: Its length at that time.
        cut: Tokens that a FinishAt took back.
        token_us: Arrival of its latest token, while it holds no slot.
        model_defaults: Fields of `sampling` that the model will set once it is known.
        prompt_tokens: Length of the prompt; the prompt and the sampling parameters are dropped at the end.
    """

    id: int
    client: int
    tenant: int
    tenant_name: str
    prompt: npt.NDArray[np.int32]
    message: InitVar[Submit]
    seed: int
    submitted_us: int
    salt: int
    deadline_us: int
    prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    model_defaults: tuple[str, ...] = ()
    stream: bool = field(init=False)
    detached: bool = field(init=False)
    priority: int = field(init=False)
    sequence_id: int = field(init=False)
    siblings: list[Request] = field(default_factory=list)
    key: IdempotencyKey | None = None
    state: str = PENDING
    slot: int = NO_SLOT
    tokens: npt.NDArray[np.int32] = field(init=False)
    logprobs: npt.NDArray[np.float32] = field(init=False)
    tops: TopRecord | None = field(init=False)
    phases: Phases = field(init=False)
    generated: int = 0
    cut: int = 0
    cached_tokens: int = 0
    computed: int = 0
    redone_tokens: int = 0
    admitted_order: int = 0
    passed: int = 0
    preemptions: int = 0
    kept_epoch: int = 0
    crashes: int = 0
    crash_length: int = 0
    paused: bool = False
    prompt_known: bool = False
    wait: Wait | None = None
    hashes: Hashes | None = None
    reason: str = ""
    worker: str = ""
    error: KvforgeError | None = None
    first_scheduled_us: int = -1
    first_token_us: int = -1
    token_us: int = -1
    ended_us: int = -1
    orphan_us: int = -1

    def __post_init__(self, message: Submit) -> None:
        self.prompt_tokens = int(self.prompt.size)
        self.max_tokens, self.sampling = message.max_tokens, message.sampling
        self.stream, self.detached, self.priority = message.stream, message.detached, message.priority
        self.sequence_id = message.sequence_id
        self.tokens, self.logprobs = NO_INT32, NO_FLOAT32
        self.phases = Phases(self.submitted_us)
        self.tops = TopRecord(message.sampling.logprobs) if message.sampling.logprobs else None

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in TERMINAL

    @property
    def at_ceiling(self) -> bool:
        """Whether the request waits because of its tenant's ceiling."""
        return self.wait is not None and self.wait.limit == TENANT_CEILING

    @property
    def awaits_sibling(self) -> bool:
        """Whether the request waits for a sibling to compute the prompt."""
        return self.wait is not None and self.wait.limit == SIBLING

    @property
    def awaits_trial(self) -> bool:
        """Whether the request waits for its worker to try its grammar."""
        return self.wait is not None and self.wait.limit == GRAMMAR

    def move(self, event: str) -> None:
        """Take the transition for `event`.

        Raises:
            AlreadyFinished: The request has ended; nothing has changed.
            InvalidTransition: The transition is not allowed; nothing has changed.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            if self.ended:
                raise AlreadyFinished(self.id, self.state)
            raise InvalidTransition(self.id, self.state, event)
        self.state = target

    @property
    def kept_bytes(self) -> int:
        """Bytes of its answer: tokens, log-probabilities, and top log-probabilities if requested."""
        tops = self.tops.bytes if self.tops is not None else 0
        return int(self.tokens.nbytes + self.logprobs.nbytes) + tops

    def timings(self, now_us: int) -> Timings:
        """Return its timestamps in microseconds since submission, and the time spent in each phase."""
        queue, prefill, decode, preempted, stalled, recovering = self.phases.spent_by(now_us)
        return Timings(
            first_scheduled_us=self.since(self.first_scheduled_us),
            first_token_us=self.since(self.first_token_us),
            ended_us=self.since(self.ended_us),
            queue_us=queue,
            prefill_us=prefill,
            decode_us=decode,
            preempted_us=preempted,
            stalled_us=stalled,
            recovering_us=recovering,
            paused_us=self.phases.paused_by(now_us),
        )

    def since(self, at_us: int) -> int:
        """Return microseconds from its submission to `at_us`; -1 if that never happened."""
        return at_us - self.submitted_us if at_us >= 0 else -1


class RequestTable:
    """Live requests and the most recent finished ones.

    Attributes:
        kept_bytes: Bytes of the answers of finished requests.
        first_id: Ids up to this one belong to an earlier boot.
    """

    def __init__(self, clock: Clock, bounds: Bounds, tenants: Tenants, first_id: int = 0) -> None:
        self._clock, self._bounds, self._tenants, self.first_id = clock, bounds, tenants, first_id
        self.meters = tenants.meters
        self._ttl_us = microseconds(bounds.finished_ttl_s)
        self.live: dict[int, Request] = {}
        self.finished: OrderedDict[int, Request] = OrderedDict()
        self.kept_bytes = 0
        self.keys = IdempotencyKeys()
        self.ended_total = dict.fromkeys(TERMINAL, 0)
        self.accepted_total = 0
        self.refused_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.generated_tokens_total = 0
        self.computed_tokens_total = 0
        self.recomputed_tokens_total = 0
        self.preemptions_total = 0
        self.streams_paused_total = 0

    def known(self, request_id: int) -> Request | None:
        """Return a request that is live or finished recently, or None."""
        return self.live.get(request_id) or self.finished.get(request_id)

    def find(self, request_id: int) -> Request:
        """Return a request.

        Raises:
            RequestNotFound: The id is unknown.
        """
        request = self.known(request_id)
        if request is None:
            raise self.not_found(request_id)
        return request

    def of_client(self, client: int) -> list[Request]:
        """Return the requests that the client reads, including finished ones."""
        return [r for table in (self.live, self.finished) for r in table.values() if r.client == client]

    def not_found(self, request_id: int) -> RequestNotFound:
        """Build the error for an unknown request."""
        return RequestNotFound(request_id, LOST if 0 < request_id <= self.first_id else "")

    def add(self, request: Request) -> None:
        """Add an admitted request."""
        self.live[request.id] = request
        self._tenants.requests[request.tenant] += 1
        self.accepted_total += 1
        self.prompt_tokens_total += request.prompt_tokens
        for cell, amount in ((ACCEPTED, 1), (WAITING, 1), (PROMPT, request.prompt_tokens)):
            self.meters.count(request.tenant, cell, amount)

    def retire(self, request: Request) -> None:
        """Move a request in a terminal state to the finished table, which is bounded by age, number and bytes."""
        del self.live[request.id]
        self._tenants.requests[request.tenant] -= 1
        request.ended_us = self._clock.now_us
        request.phases.end(request.ended_us)
        request.hashes, request.prompt, request.sampling = None, NO_INT32, NO_SAMPLING
        if request.siblings:
            request.siblings.remove(request)
            for other in request.siblings:
                other.prompt_known |= request.first_token_us >= 0
            request.siblings = []
        self.ended_total[request.state] += 1
        self._count_end(request)
        self.finished[request.id] = request
        self.kept_bytes += request.kept_bytes
        most, most_bytes = self._bounds.finished_max, self._bounds.finished_bytes_max
        while len(self.finished) > most or (self.kept_bytes > most_bytes and len(self.finished) > 1):
            self._forget(next(iter(self.finished.values())))

    def _count_end(self, request: Request) -> None:
        """Update metrics at the end. Durations count only for finished requests; others would distort them."""
        self.meters.count(request.tenant, ENDED[request.reason])
        if request.state != FINISHED:
            return
        for what, value in (
            (WHOLE, request.ended_us - request.submitted_us),
            (PREFILL, request.first_token_us - request.first_scheduled_us),
            (DECODE, request.ended_us - request.first_token_us),
            (PROMPT_SIZE, request.prompt_tokens),
            (ANSWER_SIZE, request.generated),
        ):
            self.meters.observe(request.tenant, what, value)

    def purge(self, older_than_us: int, tenant: str = "") -> int:
        """Forget requests of a tenant ("": all) that ended at least `older_than_us` ago. Return how many."""
        old = []
        for request in self.finished.values():  # ordered by their end
            if self._clock.now_us - request.ended_us < older_than_us:
                break
            if tenant in ("", request.tenant_name):
                old.append(request)
        for request in old:
            self._forget(request)
        return len(old)

    def pass_time(self) -> None:
        """Forget finished requests that have reached their time to live."""
        if self.finished:
            self.purge(self._ttl_us)

    def due_us(self) -> int | None:
        """Return when the oldest finished request is due to be forgotten, or None."""
        oldest = next(iter(self.finished.values()), None)
        return None if oldest is None else oldest.ended_us + self._ttl_us

    def _forget(self, request: Request) -> None:
        del self.finished[request.id]
        self.kept_bytes -= request.kept_bytes
        if request.key is not None:
            self.keys.release(request.key)

    def check_invariants(self) -> None:
        """Check that the tables are disjoint, bounded, and agree with request states."""
        assert not any(request.ended for request in self.live.values()), "an ended request is live"
        assert all(request.ended and request.slot == NO_SLOT for request in self.finished.values()), "a finished one"
        assert not self.live.keys() & self.finished.keys(), "a request is both live and finished"
        living = np.bincount([r.tenant for r in self.live.values()], minlength=self._tenants.requests.size)
        assert (living == self._tenants.requests).all(), "the count of a tenant's requests is wrong"
        assert len(self.finished) <= self._bounds.finished_max, "the finished table is above its bound"
        kept = sum(request.kept_bytes for request in self.finished.values())
        assert kept == self.kept_bytes, "the count of kept bytes is wrong"
        assert kept <= self._bounds.finished_bytes_max or len(self.finished) == 1, "kept answers exceed their bound"
        known = [*self.live.values(), *self.finished.values()]
        self.keys.check_invariants([request.key for request in known if request.key is not None])
        for request in self.live.values():
            assert not request.siblings or request in request.siblings, "a request is not among its siblings"
        for request in known:
            until_us = request.ended_us if request.ended else self._clock.now_us
            spent = request.phases.spent_by(until_us)
            assert sum(spent) == until_us - request.submitted_us and min(spent) >= 0, "phases do not add up to the age"
        assert all((request.slot != NO_SLOT) == (request.state == RUNNING) for request in self.live.values()), "slots"
