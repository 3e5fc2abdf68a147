"""The load of `benchmarks.load_capacity`: one connection that sends requests when they are due, whatever comes back.

It speaks the protocol itself and handles whole messages, not single tokens, so that one core is no bottleneck: a Stream
message holds the tokens of a whole turn of the coordinator.
"""

from __future__ import annotations

import select
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import zmq

from kvforge.protocol import codec
from kvforge.protocol.messages import CLIENT_REPLIES, Accepted, Hello, Refused, SamplingParams, Stream, Submit, Timings
from kvforge.protocol.transport import dealer

Floats = npt.NDArray[np.float64]
SAMPLING = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
LATE_S = 60e-6  # typical oversleep of a wait


@dataclass(frozen=True, kw_only=True)
class Load:
    """due: [requests] seconds from the start; prompts: [requests, prompt_tokens] int32; answer: tokens of each
    answer."""

    due: Floats
    prompts: npt.NDArray[np.int32]
    answer: int


@dataclass(kw_only=True)
class Seen:
    """Times of each request in seconds from the start (NaN: never): sent, first token received, end received; and
    queued, the wait in the coordinator for its first step. tokens_at, tokens: arrival time and token count of each
    message."""

    sent: Floats
    first: Floats
    ended: Floats
    queued: Floats
    refused: int = 0
    tokens_at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def nothing(cls, count: int) -> Seen:
        """Return the empty record of `count` requests."""
        sent, first, ended, queued = np.full((4, count), np.nan)
        return cls(sent=sent, first=first, ended=ended, queued=queued)


class Client:
    """One connection, for one load."""

    def __init__(self, endpoint: str, load: Load) -> None:
        self._load = load
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context)
        self._socket.connect(endpoint)
        self._decoder = codec.Decoder(CLIENT_REPLIES)
        self._socket.send_multipart(codec.encode(Hello(rid=1)))
        self._decoder.decode(self._socket.recv_multipart())
        self.seen = Seen.nothing(load.due.size)
        self._of: dict[int, int] = {}

    def run(self, end_s: float) -> Seen:
        """Send every request when it is due, and read until `end_s` or until all requests have ended."""
        seen, due, start = self.seen, self._load.due, time.monotonic()
        sent, over, count = 0, 0, due.size
        while over < count and (now := time.monotonic() - start) < end_s:
            while sent < count and due[sent] <= now:
                self._send(sent)
                seen.sent[sent] = now = time.monotonic() - start
                sent += 1
            over += self._read(start)
            next_s = due[sent] if sent < count else end_s
            left_s = min(next_s - (time.monotonic() - start) - LATE_S, 0.1)
            if left_s > 0 and not self._socket.poll(0):
                select.select([self._socket.FD], [], [], left_s)
        return seen

    def close(self) -> None:
        """Close the connection, which cancels the requests that still run."""
        self._context.destroy(linger=0)

    def _send(self, i: int) -> None:
        submit = Submit(rid=i + 2, max_tokens=self._load.answer, sampling=SAMPLING, prompt=self._load.prompts[i])
        self._socket.send_multipart(codec.encode(submit))

    def _read(self, start: float) -> int:
        """Read the pending messages; return how many requests ended."""
        over = 0
        while True:
            try:
                message = self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return over
            if isinstance(message, Stream):
                over += self._stream(message, time.monotonic() - start)
            elif isinstance(message, Accepted):
                self._of[message.request_id] = message.rid - 2
            elif isinstance(message, Refused):
                self.seen.refused += 1
                over += 1

    def _stream(self, message: Stream, now: float) -> int:
        seen = self.seen
        assert not message.paused, "the load does not read fast enough"
        seen.tokens_at.append(now)
        seen.tokens.append(message.offsets.size)
        for request in message.request_ids[message.offsets == 0].tolist():
            seen.first[self._of[request]] = now
        for ended in message.ended:
            i, timings = self._of.pop(ended.request_id), ended.timings
            assert isinstance(timings, Timings) and ended.error is None, ended
            seen.ended[i], seen.queued[i] = now, timings.first_scheduled_us / 1e6
        return len(message.ended)
