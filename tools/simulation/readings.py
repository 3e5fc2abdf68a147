"""What a client process knows of the requests that it reads, from what was really delivered to it."""

from __future__ import annotations

from typing import Any

from kvforge.protocol.messages import Stream
from tools.simulation.workers import Violation


class Reading:
    """One request. at: the offset of the next token; streamed: of the next one of the stream, which may have begun anew
    before that; reads: whether the coordinator streams it to this process."""

    def __init__(self, at: int) -> None:
        self.at = self.streamed = at
        self.reads = True


class Readings:
    """Every token must come once, in order; one that comes again after an Attach is ignored, a gap never is."""

    def __init__(self) -> None:
        self._of: dict[int, Reading] = {}

    def begin(self, request_id: int, offset: int) -> None:
        """The request is streamed to us from `offset` on. What we have of it we keep."""
        reading = self._of.setdefault(request_id, Reading(offset))
        reading.at, reading.streamed, reading.reads = max(reading.at, offset), offset, True

    def drop(self, request_id: int) -> None:
        """Nothing more is to be had of the request."""
        self._of.pop(request_id, None)

    def at(self, request_id: int) -> int:
        """How many of its tokens we hold."""
        reading = self._of.get(request_id)
        return reading.at if reading is not None else 0

    def unfinished(self) -> list[int]:
        """Requests of which we still expect something."""
        return [request_id for request_id, reading in self._of.items() if reading.reads]

    def stream(self, message: Stream) -> tuple[int, ...]:
        """Takes in a Stream. Returns the requests to attach to again, because their streams were paused."""
        for request_id, offset in zip(message.request_ids.tolist(), message.offsets.tolist(), strict=True):
            reading = self._mine(request_id)
            if offset > reading.at:
                raise Violation(f"request {request_id}: token {reading.at} was due, and {offset} was delivered")
            reading.at += offset == reading.at
            reading.streamed += offset == reading.streamed
        for ended in message.ended:
            self._end(ended)
        for request_id in message.taken:
            if request_id in self._of:
                self._of[request_id].reads = False
        return tuple(id_ for id_ in message.paused if id_ in self._of and self._of[id_].reads)

    def _mine(self, request_id: int) -> Reading:
        reading = self._of.get(request_id)
        if reading is None or not reading.reads:
            raise Violation(f"request {request_id} is streamed to a client that does not read it")
        return reading

    def _end(self, ended: Any) -> None:
        reading = self._of.get(ended.request_id)
        forgotten = ended.error is not None and ended.error.code == "request_not_found"
        if reading is None:
            if forgotten:  # and a refused Attach has told us so before
                return
            raise Violation(f"request {ended.request_id} ends for a client that does not read it")
        told = ended.generated_tokens + ended.cut_tokens
        if (told != reading.streamed or reading.at < ended.generated_tokens) and not forgotten:
            raise Violation(f"request {ended.request_id} ends with {told} tokens, not {reading.streamed}")
        reading.reads = False
