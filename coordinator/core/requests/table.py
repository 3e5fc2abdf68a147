"""The tables of requests: the live ones, and the most recent finished ones, bounded by age, number and bytes."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvforge.protocol.errors import RequestNotFound
from kvforge.protocol.messages import NO_INT32
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

from ..cache.tenants import Tenants
from ..clock import Clock
from ..deadlines import NEVER, OLD_REQUESTS
from ..limits import Bounds, microseconds
from .idempotency import IdempotencyKeys
from .request import FINISHED, NO_SAMPLING, NO_SLOT, RUNNING, TERMINAL, Request

LOST = "it was lost: it dates from before the coordinator was started"


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
        self.drafts_total = 0  # times that a request had drafts in a step
        self.drafted_tokens_total = 0
        self.accepted_drafts_total = 0

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
        self._clock.deadlines.arm(OLD_REQUESTS, request.ended_us + self._ttl_us)
        self.kept_bytes += request.kept_bytes
        most, most_bytes = self._bounds.finished_max, self._bounds.finished_bytes_max
        while len(self.finished) > most or (self.kept_bytes > most_bytes and len(self.finished) > 1):
            self._forget(next(iter(self.finished.values())))

    def _count_end(self, request: Request) -> None:
        """Update metrics at the end. Durations count only for finished requests; others would distort them."""
        self.meters.count(request.tenant, ENDED[request.reason])
        if request.state != FINISHED:
            return
        # A request without tokens, which only scores its prompt, ends with its prefill.
        prefilled_us = request.first_token_us if request.first_token_us >= 0 else request.ended_us
        for what, value in (
            (WHOLE, request.ended_us - request.submitted_us),
            (PREFILL, prefilled_us - request.first_scheduled_us),
            (DECODE, request.ended_us - prefilled_us),
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

    def pass_time(self) -> int:
        """Forget finished requests that have reached their time to live. Return when the next is due, or NEVER."""
        self.purge(self._ttl_us)
        oldest = next(iter(self.finished.values()), None)
        return NEVER if oldest is None else oldest.ended_us + self._ttl_us

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
