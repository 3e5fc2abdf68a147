"""The coordinator's state machine: apply(event, now_us) -> effects.

Deterministic: the same events at the same times give the same state and the same effects. A command that is refused
raises a typed error inside `apply`, has changed nothing, and leaves as a Refused to the one who sent it. The shell
calls apply for whatever has arrived, then once with Turn, and only then publishes tables and sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from protocol.errors import (
    Draining,
    InvalidRequest,
    KvforgeError,
    QueueFull,
    SequenceBusy,
)
from protocol.messages import (
    Accepted,
    Append,
    Cancel,
    CreateSequence,
    Done,
    Drain,
    ErrorInfo,
    Explain,
    FinishAt,
    Fork,
    GetBlock,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Health,
    ListRequests,
    Message,
    ModelInfo,
    Purged,
    PurgeFinished,
    RefBlock,
    Refused,
    RemoveSequences,
    RequestInfo,
    RequestList,
    Submit,
    UnrefBlock,
)

from . import statistics, validate
from .block_commands import BlockCommands
from .cache import Cache
from .events import (
    ClientGone,
    Effect,
    Event,
    FromClient,
    FromWorker,
    ToClient,
    ToWorker,
    Turn,
    WorkerGone,
)
from .explain import Explainer
from .limits import Limits
from .outcomes import Outcomes
from .requests import CANCELLED, NO_SLOT, Request, RequestTable
from .scheduler import Scheduler
from .sequence_commands import SequenceCommands
from .streams import Streams
from .worker_reports import WorkerReports

RETRY_AFTER_MS = 1000


class Machine:
    """Everything the coordinator knows."""

    def __init__(self, limits: Limits, boot: str, hash_key: bytes, start_us: int = 0) -> None:
        self.limits, self.boot, self.start_us = limits, boot, start_us
        self.cache = Cache(limits, hash_key)
        self.requests = RequestTable(limits)
        self.scheduler = Scheduler(self.cache, self.requests)
        self.scheduler.use_ids(self._next_sequence_id)
        self.streams = Streams()
        self.outcomes = Outcomes(self.cache, self.requests, self.scheduler, self.streams)
        self.sequences = SequenceCommands(self.cache, self.requests, self.outcomes, self._next_sequence_id)
        self.blocks = BlockCommands(self.cache)
        self.explainer = Explainer(self.cache, self.requests, self.scheduler, self.sequences, self.blocks)
        self._reports = WorkerReports(self.cache, self.requests, self.scheduler, self.outcomes, self.sequences)
        self.workers = self._reports.workers
        self.clients: set[int] = set()
        self.draining = False
        self.turns = 0
        self._request_ids = 0
        self._sequence_ids = 0
        self._effects: list[Effect] = []
        self._commands: dict[type[Message], Callable[[FromClient, Any, int], Message]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            FinishAt: self._finish_at,
            GetRequest: self._get_request,
            ListRequests: self._list_requests,
            GetStats: self._get_stats,
            GetHealth: self._get_health,
            CreateSequence: self.sequences.create,
            Append: self.sequences.append,
            Fork: self.sequences.fork,
            GetSequence: self.sequences.info,
            GetTokens: self.sequences.read,
            RemoveSequences: self.sequences.remove,
            GetBlock: self.blocks.info,
            RefBlock: self.blocks.ref,
            UnrefBlock: self.blocks.unref,
            Explain: self.explainer.explain,
            PurgeFinished: self._purge_finished,
            Drain: self._drain,
        }

    # ---------------------------------------------------------------------------------------------------------- apply

    def apply(self, event: Event, now_us: int) -> list[Effect]:
        """Applies one event at time `now_us` (microseconds, monotonic). Returns what is to be done, in order."""
        if isinstance(event, Turn):
            self._turn(now_us)
        elif isinstance(event, FromClient):
            self._from_client(event, now_us)
        elif isinstance(event, FromWorker):
            self._effects += self._reports.apply(event, now_us)
        elif isinstance(event, ClientGone):
            self._client_gone(event.client, now_us)
        elif isinstance(event, WorkerGone):
            self._effects += self._reports.gone(event.worker, now_us)
        effects, self._effects = self._effects, []
        return effects

    def _turn(self, now_us: int) -> None:
        self.turns += 1
        self.requests.purge(now_us, self.limits.finished_ttl_us)
        self.sequences.expire(now_us)
        for _ in self.scheduler.admit(now_us):
            pass
        for number in sorted(self.cache.groups):
            group = self.cache.groups[number]
            while (step := self.scheduler.plan(group, now_us)) is not None:
                self._effects.append(ToWorker(group.worker, step))
            if group.skip_step():
                self.cache.settle(group, group.last_step, now_us)
        self._effects += [ToClient(client, message) for client, message in self.streams.flush()]

    # -------------------------------------------------------------------------------------------------------- clients

    def _from_client(self, event: FromClient, now_us: int) -> None:
        message: Any = event.message
        self.clients.add(event.client)
        try:
            reply = self._commands[type(message)](event, message, now_us)
        except KvforgeError as error:
            if isinstance(message, Submit):
                self.requests.refused_total += 1
            reply = Refused(rid=message.rid, error=ErrorInfo.of(error))
        self._effects.append(ToClient(event.client, reply))

    def _submit(self, event: FromClient, message: Submit, now_us: int) -> Message:
        if self.draining:
            raise Draining("the coordinator is draining and admits nothing more; submit elsewhere or after its restart")
        cache, s = self.cache, self.cache.sequences
        slot = self.sequences.find(message.sequence_id) if message.sequence_id else NO_SLOT
        prompt, tenant, salt = message.prompt, message.tenant, message.salt
        if slot != NO_SLOT:
            if s.request[slot]:
                raise SequenceBusy(message.sequence_id, int(s.request[slot]))
            tenant = cache.tenants.names[int(s.tenant[slot])]
            prompt = np.concatenate([s.text(slot), message.prompt])
        cache.tenants.check(tenant)
        salt_number = int(s.salt[slot]) if slot != NO_SLOT else cache.salt(validate.salt_text(tenant, salt))
        validate.submit(message, prompt, tenant, self.limits, self.model, cache)
        if len(self.scheduler.waiting) >= self.limits.queue_max:
            raise QueueFull(self.limits.queue_max, RETRY_AFTER_MS)
        if slot != NO_SLOT and message.prompt.size:
            cache.append(np.array([slot]), message.prompt, np.array([message.prompt.size]), now_us)
        self._request_ids += 1
        request = Request(
            self._request_ids,
            event.client,
            cache.tenants.intern(tenant),
            prompt,
            message.max_tokens,
            message.sampling,
            event.entropy if message.sampling.seed is None else message.sampling.seed,
            message.stream,
            now_us,
            salt_number,
            message.sequence_id,
        )
        if slot != NO_SLOT:
            s.request[slot] = request.id
            s.touch(slot, now_us)
        self.requests.add(request)
        self.scheduler.enqueue(request)
        return Accepted(rid=message.rid, request_id=request.id, seed=request.seed)

    def _cancel(self, _event: FromClient, message: Cancel, now_us: int) -> Message:
        request = self.requests.find(message.request_id)
        if request.state != CANCELLED:  # cancelling twice is the same answer, not an error
            self.outcomes.end(request, "cancel", "cancelled", None, now_us)
        return Done(rid=message.rid)

    def _finish_at(self, _event: FromClient, message: FinishAt, now_us: int) -> Message:
        request = self.requests.find(message.request_id)
        self.outcomes.finish_at(request, message.tokens, self._generated(request), now_us)
        return Done(rid=message.rid)

    def _generated(self, request: Request) -> int:
        if request.slot == NO_SLOT:
            return int(request.tokens.size)
        return int(self.cache.sequences.length[request.slot] - self.scheduler.runs.base[request.slot])

    def _get_request(self, _event: FromClient, message: GetRequest, now_us: int) -> Message:
        request = self.requests.find(message.request_id)
        tokens = request.tokens
        if request.slot != NO_SLOT:
            tokens = self.cache.sequences.text(request.slot)[int(self.scheduler.runs.base[request.slot]) :]
        return RequestInfo(
            rid=message.rid,
            request_id=request.id,
            state=request.state,
            tenant=self.cache.tenants.names[request.tenant],
            prompt_tokens=request.prompt.size,
            max_tokens=request.max_tokens,
            generated_tokens=tokens.size,
            cached_tokens=request.cached_tokens,
            age_us=now_us - request.submitted_us,
            reason=request.reason,
            error=ErrorInfo.of(request.error) if request.error else None,
            timings=request.timings(),
            worker=request.worker,
            tokens=tokens if message.with_tokens else tokens[:0],
        )

    def _list_requests(self, _event: FromClient, message: ListRequests, now_us: int) -> Message:
        if not 1 <= message.count_max <= self.limits.list_max:
            raise InvalidRequest("count_max", f"must be 1 to {self.limits.list_max}")
        known = {**self.requests.finished, **self.requests.live}
        newest = sorted(known, reverse=True)[: message.count_max]
        names = self.cache.tenants.names
        rows = [statistics.row(known[i], self._generated(known[i]), names[known[i].tenant], now_us) for i in newest]
        return RequestList(rid=message.rid, requests=tuple(rows), total=len(known))

    def _get_stats(self, _event: FromClient, message: GetStats, now_us: int) -> Message:
        return statistics.stats(
            self.cache, self.requests, message.rid, self.boot, self.start_us, now_us, len(self.clients)
        )

    def _get_health(self, _event: FromClient, message: GetHealth, _now_us: int) -> Message:
        ready = bool(self.cache.groups) and not self.draining
        reason = "" if ready else self._why_not_ready()
        workers = tuple(worker.health() for worker in self.workers.values())
        return Health(
            rid=message.rid,
            live=True,
            ready=ready,
            reason=reason,
            workers=workers,
            model=self.model,
            draining=self.draining,
        )

    def _why_not_ready(self) -> str:
        if self.draining:
            return "draining: no new requests are admitted"
        if not self.workers:
            return "no worker has connected yet: start one with `python -m worker --config FILE` or `kvforge up`"
        loading = ", ".join(f"{w.name} ({w.phase}, {w.progress:.0%})" for w in self.workers.values())
        return f"workers are loading: {loading}"

    def _purge_finished(self, _event: FromClient, message: PurgeFinished, now_us: int) -> Message:
        if message.older_than_ms < 0:
            raise InvalidRequest("older_than_ms", "must be 0 or more")
        return Purged(rid=message.rid, count=self.requests.purge(now_us, message.older_than_ms * 1000))

    def _drain(self, _event: FromClient, message: Drain, _now_us: int) -> Message:
        self.draining = True
        return Done(rid=message.rid)

    def _client_gone(self, client: int, now_us: int) -> None:
        self.clients.discard(client)
        self.streams.forget(client)
        for request in [r for r in self.requests.live.values() if r.client == client]:
            self.outcomes.end(request, "cancel", "cancelled", None, now_us)
        self.sequences.client_gone(client, now_us)
        self.blocks.client_gone(client, now_us)
        self.streams.forget(client)

    # ---------------------------------------------------------------------------------------------------------- other

    def gauges(self, now_us: int) -> list[int]:
        """What the shared tables publish besides rows."""
        running = self.scheduler.running_total
        return statistics.gauges(self.cache, self.requests, running, self.turns, now_us - self.start_us)

    @property
    def model(self) -> ModelInfo | None:
        """What the workers serve; None until the first one is ready."""
        return self._reports.model

    @property
    def busy(self) -> bool:
        """Whether a Turn could find something to do without a new event."""
        return bool(self.requests.live) or any(g.sent or g.owes_copies for g in self.cache.groups.values())

    def check_invariants(self) -> None:
        """Everything of design section 3 that can be seen from here. For tests, simulation and idle times."""
        self.cache.check_invariants()
        self.requests.check_invariants()
        self.scheduler.check_invariants()

    def _next_sequence_id(self) -> int:
        self._sequence_ids += 1
        return self._sequence_ids
