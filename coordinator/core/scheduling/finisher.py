"""Request termination: every terminal transition, and the release of what the request held."""

from __future__ import annotations

from kvforge.protocol.errors import Field, KvforgeError, RequestNotFound
from kvforge.protocol.messages import Ended, ErrorInfo, Timings

from ..cache.kv_cache_manager import KVCacheManager
from ..events import Effect, Log
from ..requests.request import NO_SLOT, Request
from ..requests.streams import Streams
from ..requests.table import RequestTable
from .admission import Admission


class RequestFinisher:
    """Moves requests to terminal states. No other code does."""

    def __init__(
        self,
        cache: KVCacheManager,
        requests: RequestTable,
        admission: Admission,
        streams: Streams,
        effects: list[Effect],
    ) -> None:
        self._cache, self._requests, self._admission, self._streams = cache, requests, admission, streams
        self._effects = effects

    def end(
        self,
        request: Request,
        event: str,
        reason: str,
        error: KvforgeError | None,
        keep: int | None = None,
    ) -> None:
        """End a request and release what it holds. Every terminal transition comes through here.

        Args:
            request: The request.
            event: The transition.
            reason: The reason that the client gets.
            error: The error that ended the request, if any.
            keep: How many generated tokens to keep; the rest is cut off. None keeps all.

        Raises:
            AlreadyFinished: The request has ended; nothing has changed.
            InvalidTransition: The transition is not allowed; nothing has changed.
        """
        request.move(event)
        if request.slot != NO_SLOT:
            self._admission.vacate(request)
        else:
            self._admission.forget(request)
        if request.sequence_id:
            s = self._cache.sequences
            slot = s.slot_of.get(request.sequence_id)
            if slot is not None:
                s.request[slot] = 0
                s.is_idle(slot)
                self._cache.idle.began(slot)
        elif request.kept_id:
            self._cache.idle.began(self._cache.sequences.find(request.kept_id))
        request.reason, request.error = reason, error
        cut = request.cut = 0 if keep is None else request.tokens.size - keep
        if cut:
            request.tokens, request.logprobs = request.tokens[:keep].copy(), request.logprobs[:keep].copy()
        request.generated = request.tokens.size
        if request.tops is not None:
            request.tops.cut(request.generated)
        siblings = bool(request.siblings)
        self._requests.retire(request)
        if siblings:
            self._admission.prompt_is_known(request)
        self._effects.append(_entry(request))
        if request.paused:
            return  # the client resumes reading later, and then asks for what it lacks
        if not request.stream:
            self.stream_from(request, request.first_offset)
        self._streams.add_end(request.client, ended(request, cut if request.stream else 0, request.ended_us))

    def stream_from(self, request: Request, offset: int) -> None:
        """Stream the request's tokens from `offset` on to its client: of the prompt if it is negative, then generated.

        Args:
            request: The request.
            offset: As in `Stream`.
        """
        record = request.prompt_logprobs
        if record is not None and offset < 0:
            first = record.total + offset
            prompt, scored = record.known(first)
            columns = (prompt, scored.logprobs, scored.tops, scored.ranks)
            self._streams.add_tokens(request.client, request.id, offset, *columns)
        offset = max(0, offset)
        tokens, logprobs = self._admission.answer(request, offset)
        tops = request.tops.top_logprobs(offset) if request.tops is not None else None
        self._streams.add_tokens(request.client, request.id, offset, tokens, logprobs, tops)


def ended(request: Request, cut: int, now_us: int) -> Ended:
    """Build the final message of a request.

    Args:
        request: The request.
        cut: How many streamed tokens to discard.
        now_us: Time of the end.
    """
    return Ended(
        request_id=request.id,
        reason=request.reason,
        generated_tokens=request.generated,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        timings=request.timings(now_us),
        error=ErrorInfo.of(request.error) if request.error is not None else None,
        cut_tokens=cut,
        sequence_id=request.kept_id,
        pinned=request.pinned,
    )


def _entry(request: Request) -> Log:
    """Build the log entry for the end of a request: counts, names and times, but no tokens."""
    fields: dict[str, Field] = {
        "id": request.id,
        "tenant": request.tenant_name,
        "reason": request.reason,
        "tokens": request.generated,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "worker": request.worker or None,
        "queue_ms": _ms(request.since(request.first_scheduled_us)),
        "first_token_ms": _ms(request.since(request.first_token_us)),
        "total_ms": _ms(request.since(request.ended_us)),
    }
    if request.error is not None:
        fields["error"] = request.error.code
    return Log("info", "request ended", "request_ended", fields)


def _ms(time_us: int) -> float | None:
    """Convert microseconds since submission to milliseconds; None for an event that did not happen."""
    return time_us / 1000 if time_us >= 0 else None


def forgotten(request_id: int) -> Ended:
    """Build the final message of a request that the coordinator no longer remembers."""
    return Ended(
        request_id=request_id,
        reason="failed",
        generated_tokens=0,
        prompt_tokens=0,
        cached_tokens=0,
        timings=Timings(),
        error=ErrorInfo.of(RequestNotFound(request_id)),
    )
