"""A client process's knowledge of the requests that it reads, from the messages delivered to it."""

from __future__ import annotations

from typing import Any

from kvforge.protocol.messages import Stream
from tools.simulation.workers import Violation


class Reading:
    """One request.

    Attributes:
        at: offset of the next missing token.
        streamed: offset of the next token in the current stream, which may have restarted before `at`.
        reads: whether the coordinator streams it to this process.
    """

    def __init__(self, at: int) -> None:
        self.at = self.streamed = at
        self.reads = True


class Readings:
    """Checks that every token arrives once and in order; a replay after an Attach is ignored, a gap never is."""

    def __init__(self) -> None:
        self._of: dict[int, Reading] = {}

    def begin(self, request_id: int, offset: int) -> None:
        """Start a stream at `offset`; earlier tokens are kept."""
        reading = self._of.setdefault(request_id, Reading(offset))
        reading.at, reading.streamed, reading.reads = max(reading.at, offset), offset, True

    def drop(self, request_id: int) -> None:
        """Drop a request without further tokens."""
        self._of.pop(request_id, None)

    def at(self, request_id: int) -> int:
        """Return how many of the request's tokens have arrived."""
        reading = self._of.get(request_id)
        return reading.at if reading is not None else 0

    def unfinished(self) -> list[int]:
        """Return the requests with tokens still to come."""
        return [request_id for request_id, reading in self._of.items() if reading.reads]

    def stream(self, message: Stream) -> tuple[int, ...]:
        """Process a Stream; return the paused requests, to attach to again."""
        for request_id, offset in zip(message.request_ids.tolist(), message.offsets.tolist(), strict=True):
            reading = self._reading_of(request_id)
            if offset > reading.at:
                raise Violation(f"request {request_id}: expected token {reading.at}, got {offset}")
            reading.at += offset == reading.at
            reading.streamed += offset == reading.streamed
        for ended in message.ended:
            self._end(ended)
        for request_id in message.taken:
            if request_id in self._of:
                self._of[request_id].reads = False
        return tuple(id_ for id_ in message.paused if id_ in self._of and self._of[id_].reads)

    def _reading_of(self, request_id: int) -> Reading:
        reading = self._of.get(request_id)
        if reading is None or not reading.reads:
            raise Violation(f"request {request_id} is streamed to a client that does not read it")
        return reading

    def _end(self, ended: Any) -> None:
        reading = self._of.get(ended.request_id)
        forgotten = ended.error is not None and ended.error.code == "request_not_found"
        if reading is None:
            if forgotten:  # a refused Attach has reported it before
                return
            raise Violation(f"request {ended.request_id} ends for a client that does not read it")
        counted = ended.generated_tokens + ended.cut_tokens
        least = -(1 << 31) if ended.reason in ("length", "stop") else 0  # others may end in the middle of a prompt
        streamed, at = max(least, reading.streamed), max(least, reading.at)
        if (counted != streamed or at < ended.generated_tokens) and not forgotten:
            raise Violation(f"request {ended.request_id} ends with {counted} tokens, expected {streamed}")
        reading.reads = False
