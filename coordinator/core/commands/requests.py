"""Request commands: submit, attach, cancel, read; and the end of requests when a client or their time is gone."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol import codec
from kvforge.protocol.errors import (
    AlreadyFinished,
    CapacityExceeded,
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvforgeError,
    QueueFull,
    SequenceBusy,
)
from kvforge.protocol.messages import (
    NO_INT32,
    Accepted,
    Attach,
    Attached,
    Cancel,
    Done,
    ErrorInfo,
    FinishAt,
    GetRequest,
    ListRequests,
    Message,
    ModelInfo,
    Purged,
    PurgeFinished,
    RequestInfo,
    RequestList,
    RequestRow,
    SamplingParams,
    Stream,
    Submit,
)

from ..cache.kv_cache_manager import KVCacheManager
from ..deadlines import DEADLINE, DISK_WAIT, DRAIN, FIRST_TOKEN, LEASE, NEVER, TRIAL
from ..events import FromClient
from ..limits import microseconds
from ..requests.request import CANCELLED, FINISHED, NO_SLOT, Request
from ..requests.streams import Streams
from ..requests.table import RequestTable
from ..scheduling.admission import Admission
from ..scheduling.finisher import RequestFinisher, ended, forgotten
from ..sizes import LISTED_BYTES
from ..waits import trial_of
from . import validate
from .sequences import SequenceCommands

SEEDS = 1 << 64


class RequestCommands:
    """Handlers of the request messages."""

    def __init__(
        self,
        cache: KVCacheManager,
        requests: RequestTable,
        admission: Admission,
        finisher: RequestFinisher,
        streams: Streams,
        sequences: SequenceCommands,
    ) -> None:
        self._cache, self._requests, self._admission = cache, requests, admission
        self._finisher, self._streams, self._sequences = finisher, streams, sequences
        self._bounds, self._clock = cache.limits.bounds, cache.clock
        self._lease_us = microseconds(self._bounds.lease_s)
        self._deadlines = cache.clock.deadlines
        self.draining = False
        self.drain_deadline_us = 0
        self._request_ids = requests.first_id

    # --------------------------------------------------------------------------------------------------------- submit

    def submit(self, event: FromClient, message: Submit) -> Message:
        """Create one request, or several for one prompt; an idempotency key returns the existing ones.

        Raises:
            KvforgeError: The command is refused; nothing has changed.
        """
        cache, s = self._cache, self._cache.sequences
        slot = self._sequences.find(message.sequence_id) if message.sequence_id else NO_SLOT
        tenant = message.tenant if slot == NO_SLOT else cache.tenants.names[int(s.tenant[slot])]
        entry = self._requests.keys.find(tenant, message)
        if entry is not None:
            return self._again(event, message, entry.request_id, 0)
        if self.draining:
            raise Draining("the coordinator is draining and admits nothing more; submit elsewhere or after its restart")
        if slot != NO_SLOT and s.request[slot]:
            raise SequenceBusy(message.sequence_id, int(s.request[slot]))
        prompt = message.prompt if slot == NO_SLOT else np.concatenate([s.text(slot), message.prompt])
        cache.check_tenant(tenant)
        salt = int(s.salt[slot]) if slot != NO_SLOT else cache.hasher.salt(validate.salt_text(tenant, message.salt))
        validate.submit(message, prompt, tenant, cache)
        first = next(iter(self._requests.live.values()), None)
        if message.ahead and first is not None and not first.ahead:
            raise Conflict("other requests run or wait: nothing is computed ahead beside them")
        if message.continues:
            prompt = cache.continuing.marked(message.continues, tenant, salt, prompt)
        if len(self._admission.waiting) + message.count > self._bounds.queue_max:
            raise QueueFull(self._bounds.queue_max, self._admission.waiting.retry_after_ms())
        if first is not None and first.ahead and not message.ahead:
            self._end_ahead()
        if slot != NO_SLOT and message.prompt.size:
            self._append(slot, message.prompt)
        return self._accept(event, message, prompt, tenant, salt)

    def _end_ahead(self) -> None:
        """End the requests that compute ahead, which are all: none of them lives beside another request."""
        for request in list(self._requests.live.values()):
            self._finisher.end(request, "cancel", "cancelled", None)

    def _append(self, slot: int, prompt: npt.NDArray[np.int32]) -> None:
        """Append the prompt to the sequence, which releases its KV and waits if there is no room now."""
        slots, counts = np.array([slot]), np.array([prompt.size])
        try:
            self._cache.tables.append(slots, prompt, counts)
        except CapacityExceeded:
            self._cache.residency.release_kv(slot)
            self._cache.tables.append(slots, prompt, counts)

    def _accept(
        self, event: FromClient, message: Submit, prompt: npt.NDArray[np.int32], name: str, salt: int
    ) -> Message:
        seed = event.entropy if message.sampling.seed is None else message.sampling.seed
        deadline_us = self._clock.now_us + (message.deadline_ms * 1000 or microseconds(self._bounds.deadline_max_s))
        model = self._cache.model
        sampling, open_fields = message.sampling, message.model_defaults
        if model is not None:
            sampling, open_fields = with_model_defaults(sampling, open_fields, model), ()
        first = self._request_ids + 1
        self._request_ids += message.count
        tenant = self._cache.intern(name)
        entry = self._requests.keys.add(name, message, first) if message.key else None
        made = []
        for i in range(message.count):
            own_seed = (seed + i) % SEEDS
            request = Request(
                first + i, event.client, tenant, name, prompt, message, own_seed, self._clock.now_us, salt, deadline_us
            )
            request.key = entry
            request.sampling, request.model_defaults = sampling, open_fields
            if i and sampling.prompt_logprobs is not None:  # the first answer reports them for all
                request.sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
                request.prompt_logprobs = None
            made.append(request)
            if message.count > 1:
                request.siblings = made
            self._requests.add(request)
            self._admission.enqueue(request)
            self._deadlines.set(deadline_us, request.id, DEADLINE)
            if message.first_token_ms:
                self._deadlines.set(self._clock.now_us + message.first_token_ms * 1000, request.id, FIRST_TOKEN)
        if message.sequence_id:
            s = self._cache.sequences
            slot = s.find(message.sequence_id)
            s.request[slot] = first
            s.touch(slot)
            self._cache.idle.continued(slot)
        elif message.continues:
            self._cache.continuing.note(message.continues, name, salt, self._cache.idle)
        self._deadlines.sweep(self._requests.live)
        return Accepted(rid=message.rid, request_id=first, seed=seed, count=message.count)

    def again(self, event: FromClient, message: Submit, answer: Message) -> Message:
        """Answer a Submit that was accepted before and is sent again by a client that reconnected."""
        assert isinstance(answer, Accepted), "a Submit is accepted or refused"
        return self._again(event, message, answer.request_id, answer.seed)

    def _again(self, event: FromClient, message: Submit, first: int, seed: int) -> Message:
        """Stream existing requests to the client. `seed` is answered if all are forgotten."""
        requests = []
        for request_id in range(first, first + message.count):
            request = self._requests.known(request_id)
            if request is None:
                self._streams.restart(event.client, request_id)
                self._streams.add_end(event.client, forgotten(request_id))
            else:
                self._give(request, event.client, request.first_offset)
                requests.append(request)
        if requests:
            seed = (requests[0].seed - (requests[0].id - first)) % SEEDS
        return Accepted(rid=message.rid, request_id=first, seed=seed, count=message.count, repeated=True)

    # --------------------------------------------------------------------------------------------------------- attach

    def attach(self, event: FromClient, message: Attach) -> Message:
        """Stream a request to this client from an offset on.

        Raises:
            Conflict: Another connection reads the request, and the client only resumes.
            InvalidRequest: The offset is out of range.
        """
        request = self._requests.find(message.request_id)
        if message.resume and request.client != event.client:
            raise Conflict(
                f"request {request.id} is read by another connection now; attach again to take it back",
                request_id=request.id,
            )
        most = self._admission.generated(request) + request.cut
        in_prompt = request.known_offset < message.offset < 0
        if in_prompt or not request.first_offset <= message.offset <= most:
            problem = f"must be {request.first_offset} to {most}, the tokens generated so far, not {message.offset}"
            raise InvalidRequest("offset", problem)
        self._give(request, event.client, message.offset)
        return Attached(rid=message.rid, request_id=request.id, seed=request.seed, offset=message.offset)

    def _give(self, request: Request, client: int, offset: int) -> None:
        if request.client not in (0, client):
            self._streams.hand_over(request.client, request.id)
        request.client, request.orphan_us = client, -1
        request.stream, request.paused, request.reads_prompt = True, False, offset < 0 or not request.first_offset
        request.phases.resume(self._clock.now_us)
        self._streams.restart(client, request.id)
        if request.slot != NO_SLOT:
            self._admission.rows.set_reader(request.slot, client)
        self._finisher.stream_from(request, offset)
        if request.ended:
            cut = max(0, offset - request.generated)
            self._streams.add_end(client, ended(request, cut, self._clock.now_us))

    def client_full(self, client: int, lost: Stream) -> None:
        """Pause the requests with lost stream data, because the client's send buffer is full. It resumes by offset."""
        for request_id in self._streams.lost(client, lost):
            request = self._requests.known(request_id)
            self._requests.streams_paused_total += 1
            if request is not None and request.client == client:
                self._pause(request)

    # ------------------------------------------------------------------------------------------------------------ end

    def cancel(self, message: Cancel) -> Message:
        """Cancel a request. Repeating the command gives the same answer."""
        request = self._requests.find(message.request_id)
        if request.state != CANCELLED:
            self._finisher.end(request, "cancel", "cancelled", None)
        return Done(rid=message.rid)

    def finish_at(self, message: FinishAt) -> Message:
        """Finish a request after the given number of tokens. Repeating the command changes nothing.

        Raises:
            AlreadyFinished: The request has ended otherwise.
            InvalidRequest: The request has not generated that many tokens.
        """
        request = self._requests.find(message.request_id)
        generated = self._admission.generated(request)
        if request.state == FINISHED and request.reason == "stop" and generated == message.tokens:
            return Done(rid=message.rid)
        if request.ended:
            raise AlreadyFinished(request.id, request.state)
        if not 1 <= message.tokens <= generated:
            problem = f"must be 1 to {generated}, the tokens generated so far, not {message.tokens}"
            raise InvalidRequest("tokens", problem)
        self._finisher.end(request, "finish", "stop", None, keep=message.tokens)
        return Done(rid=message.rid)

    def client_away(self, client: int) -> None:
        """Pause the requests of a disconnected client that may reconnect; it then resumes each by offset."""
        for request in self._requests.of_client(client):
            self._pause(request)
        self._streams.forget(client)

    def _pause(self, request: Request) -> None:
        """Stop streaming the request until its client attaches again."""
        request.paused = True
        request.phases.pause(self._clock.now_us)
        if request.slot != NO_SLOT:
            self._admission.rows.set_reader(request.slot, 0)

    def client_gone(self, client: int, goodbye: bool) -> None:
        """End the requests of a client: at once after a goodbye, else after its lease. Detached requests stay."""
        lease_us = 0 if goodbye else self._lease_us
        for request in [r for r in self._requests.live.values() if r.client == client]:
            if not request.detached and not lease_us:
                self._finisher.end(request, "cancel", "cancelled", None)
                continue
            request.client, request.paused = 0, False
            request.phases.resume(self._clock.now_us)
            if request.slot != NO_SLOT:
                self._admission.rows.set_reader(request.slot, 0)
            if not request.detached:
                request.orphan_us = self._clock.now_us
                self._deadlines.set(self._clock.now_us + lease_us, request.id, LEASE)
        self._streams.forget(client)

    def pass_time(self) -> int:
        """End requests at their deadlines, leases and drain deadline. Return a drain deadline to come, or NEVER."""
        for request_id, kind in self._deadlines.due(self._clock.now_us):
            request = self._requests.live.get(request_id)
            if request is None:
                continue
            if kind == TRIAL:
                self._admission.waits.wake(trial_of(request_id))
                continue
            if kind == DISK_WAIT:
                self._admission.disk_waits.give_up(request)
                continue
            age = f"{(self._clock.now_us - request.submitted_us) / 1e6:.3g} s"
            if kind == DEADLINE:
                limit = (request.deadline_us - request.submitted_us) / 1e6
                self._expire(request, f"it had not ended within {limit:.6g} s")
            elif kind == FIRST_TOKEN:
                if request.first_token_us < 0:
                    self._expire(request, f"it had no token after {age}")
            elif 0 <= request.orphan_us <= self._clock.now_us - self._lease_us:
                self._finisher.end(request, "cancel", "cancelled", None)
        if self.drain_deadline_us and self._clock.now_us >= self.drain_deadline_us:
            for request in list(self._requests.live.values()):
                problem = f"request {request.id} was handed back: the coordinator is draining; submit it elsewhere"
                self._finisher.end(request, "fail", "failed", Draining(problem, request_id=request.id))
        return self.drain_deadline_us if self.drain_deadline_us and self._requests.live else NEVER

    def _expire(self, request: Request, what: str) -> None:
        state = request.state
        why = "no worker is ready" if state != "running" and not self._cache.groups else f"it was {state}"
        error = DeadlineExceeded(f"request {request.id} expired: {what}; {why}", request_id=request.id, state=state)
        self._finisher.end(request, "expire", "expired", error)

    # ---------------------------------------------------------------------------------------------------------- drain

    def begin_drain(self, deadline_us: int) -> None:
        """Stop admission. Requests that are alive at the deadline (0: none) are handed back."""
        self.draining = True
        if deadline_us:
            self.drain_deadline_us = min(deadline_us, self.drain_deadline_us or deadline_us)
            self._deadlines.arm(DRAIN, self.drain_deadline_us)
            self.pass_time()

    def end_drain(self) -> None:
        """Resume admission, in a process that took over the state of one that was draining."""
        self.draining, self.drain_deadline_us = False, 0

    # ----------------------------------------------------------------------------------------------------------- read

    def info(self, message: GetRequest) -> Message:
        """Return the state of a request."""
        request = self._requests.find(message.request_id)
        row = msgspec.structs.asdict(self._row(request))
        del row["first_token_us"], row["ended_us"]  # part of `timings`
        return RequestInfo(
            rid=message.rid,
            **row,
            cached_tokens=request.cached_tokens,
            error=ErrorInfo.of(request.error) if request.error else None,
            timings=request.timings(self._clock.now_us),
            priority=request.priority,
            preemptions=request.preemptions,
            detached=request.detached,
            tokens=self._admission.answer(request)[0] if message.with_tokens else NO_INT32,
        )

    def list(self, tenant: str, message: ListRequests) -> Message:
        """Return the newest requests of a tenant ("": all)."""
        if not 1 <= message.count_max <= self._bounds.list_max:
            raise InvalidRequest("count_max", f"must be 1 to {self._bounds.list_max}")
        known = {**self._requests.finished, **self._requests.live}
        if tenant:
            known = {i: request for i, request in known.items() if request.tenant_name == tenant}
        newest = sorted(known, reverse=True)[: message.count_max]
        newest = newest[: codec.BODY_BYTES_MAX // LISTED_BYTES]
        return RequestList(rid=message.rid, requests=tuple(self._row(known[i]) for i in newest), total=len(known))

    def _row(self, request: Request) -> RequestRow:
        """Build one line of the request list."""
        return RequestRow(
            request_id=request.id,
            state=request.state,
            tenant=request.tenant_name,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            generated_tokens=self._admission.generated(request),
            age_us=self._clock.now_us - request.submitted_us,
            reason=request.reason,
            worker=request.worker,
            first_token_us=request.since(request.first_token_us),
            ended_us=request.since(request.ended_us),
        )

    def purge(self, tenant: str, message: PurgeFinished) -> Message:
        """Forget requests of a tenant ("": all) that ended some time ago."""
        if message.older_than_ms < 0:
            raise InvalidRequest("older_than_ms", "must be 0 or more")
        return Purged(rid=message.rid, count=self._requests.purge(message.older_than_ms * 1000, tenant))

    def recheck(self) -> None:
        """Check waiting requests against the limits of a model that became known after they arrived."""
        model = self._cache.model
        for request in list(self._admission.waiting):
            try:
                if model is not None:
                    request.sampling = with_model_defaults(request.sampling, request.model_defaults, model)
                    request.model_defaults = ()
                validate.sampling(request.sampling, self._bounds, model)
                validate.fits(request.prompt, request.max_tokens, request.tenant_name, self._cache)
            except KvforgeError as error:
                self._finisher.end(request, "fail", "failed", error)


def with_model_defaults(sampling: SamplingParams, model_defaults: tuple[str, ...], model: ModelInfo) -> SamplingParams:
    """Return the sampling parameters with the model's defaults for the fields that the request left open."""
    if not model_defaults:
        return sampling
    return msgspec.structs.replace(sampling, **{name: getattr(model.sampling, name) for name in model_defaults})
