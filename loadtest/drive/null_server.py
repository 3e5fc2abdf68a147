"""A null coordinator: it answers at once with made-up tokens, so that measurements show the driver alone.

    python -m kvforge.loadtest.drive.null_server --endpoint ipc://PATH [--pace TOKENS_PER_S] [--steps]

It speaks the client protocol. Each request gets all its tokens at once; with --pace they are spread evenly from its
start; with --steps as well, all requests get their next token in the same step, as from a worker with one large batch.
It prints `listening` when it is ready, and ends at SIGTERM.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from time import monotonic

import numpy as np
import zmq

from kvforge.protocol import messages as m
from kvforge.protocol import transport
from kvforge.protocol.codec import Decoder, encode
from kvforge.protocol.errors import RequestNotFound

TURN_MS = 1
VOCABULARY = 32_000
ROWS_MAX = 1024  # as many requests as it claims to run at once
CONTEXT_MAX = 1 << 20
MODEL = m.ModelInfo(
    name="null",
    source="",
    architecture="none",
    fingerprint="0",
    vocab_size=VOCABULARY,
    context_tokens_max=CONTEXT_MAX,
)


class _Job:
    """A request. `sent` counts its tokens so far."""

    __slots__ = ("began", "peer", "prompt_tokens", "request_id", "sent", "tokens")

    def __init__(self, peer: bytes, request_id: int, prompt_tokens: int, tokens: int) -> None:
        self.peer, self.request_id, self.prompt_tokens, self.tokens = peer, request_id, prompt_tokens, tokens
        self.sent = 0
        self.began = monotonic()


class NullServer:
    """The server.

    Args:
        endpoint: Where to listen.
        pace: Tokens per second of each request; 0 sends all at once.
        steps: Whether all requests advance in the same step.
    """

    def __init__(self, endpoint: str, *, pace: float = 0.0, steps: bool = False) -> None:
        self._gap_s = 1 / pace if pace else 0.0
        self._steps = steps
        self._boot = os.urandom(4).hex()
        self._socket = _router()
        self._socket.bind(endpoint)
        self._decoder = Decoder(m.CLIENT_MESSAGES)
        self._jobs: dict[int, _Job] = {}
        self._due: list[tuple[float, int]] = []  # when each request's next token is due; unused with steps
        self._next_step = 0.0
        self._last_id = 0
        self._counts: Counter[str] = Counter()
        self._rows: dict[bytes, list[tuple[int, int]]] = {}
        self._ended: dict[bytes, list[m.Ended]] = {}
        self.ending = False

    def serve(self) -> None:
        """Serve until `ending` is set."""
        while not self.ending:
            if self._socket.poll(self._wait_ms()):
                self._receive()
            self._generate()
            self._send_streams()

    def close(self) -> None:
        """Close the socket."""
        self._socket.context.destroy(linger=0)

    def _wait_ms(self) -> int:
        if not self._jobs:
            return 100
        due = self._next_step if self._steps else self._due[0][0]
        return max(TURN_MS, math.ceil((due - monotonic()) * 1000))

    def _receive(self) -> None:
        for _ in range(100):  # then send tokens
            try:
                peer, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._handle(peer, self._decoder.decode(frames))

    def _handle(self, peer: bytes, message: m.Message) -> None:
        match message:
            case m.Submit():
                self._submit(peer, message)
            case m.Hello(rid=rid):
                self._send(peer, m.Welcome(rid=rid, version=m.PROTOCOL_VERSION, boot=self._boot, tables_path="/none"))
            case m.GetHealth(rid=rid):
                self._send(peer, m.Health(rid=rid, live=True, ready=True, reason="", workers=(), model=MODEL))
            case m.FindPrefix(rid=rid):
                running = len(self._jobs)
                free = max(0, ROWS_MAX - running)
                self._send(peer, m.PrefixFound(rid=rid, ready=True, running=running, rows_free=free))
            case m.GetStats(rid=rid):
                self._send(peer, self._stats(rid))
            case m.Cancel(rid=rid, request_id=request_id):
                self._cancel(peer, rid, request_id)
            case m.Goodbye():
                self._forget(peer)
            case _:
                problem = m.ErrorInfo(code="unavailable", message="the null server does not support this message")
                self._send(peer, m.Refused(rid=getattr(message, "rid", 0), error=problem))

    def _submit(self, peer: bytes, message: m.Submit) -> None:
        self._last_id += 1
        job = _Job(peer, self._last_id, message.prompt.size, message.max_tokens)
        self._counts["accepted"] += 1
        self._counts["prompt"] += job.prompt_tokens
        self._send(peer, m.Accepted(rid=message.rid, request_id=job.request_id, seed=message.sampling.seed or 1))
        if not self._gap_s:
            self._make(job, job.tokens)
            return
        if self._steps and not self._jobs:
            self._next_step = job.began + self._gap_s
        self._jobs[job.request_id] = job
        if not self._steps:
            heappush(self._due, (job.began + self._gap_s, job.request_id))

    def _generate(self) -> None:
        """Generate the tokens that are due."""
        now = monotonic()
        if self._steps:
            if self._jobs and now >= self._next_step:
                for job in tuple(self._jobs.values()):
                    self._make(job, 1)
                self._next_step = max(now, self._next_step + self._gap_s)
            return
        while self._due and self._due[0][0] <= now:
            due, request_id = heappop(self._due)
            if (running := self._jobs.get(request_id)) is not None:
                self._make(running, 1)
                if request_id in self._jobs:
                    heappush(self._due, (due + self._gap_s, request_id))

    def _make(self, job: _Job, count: int) -> None:
        rows = self._rows.setdefault(job.peer, [])
        rows += [(job.request_id, offset) for offset in range(job.sent, job.sent + count)]
        job.sent += count
        self._counts["generated"] += count
        if job.sent == job.tokens:
            self._end(job, "length")

    def _end(self, job: _Job, reason: str) -> None:
        self._jobs.pop(job.request_id, None)
        self._counts["cancelled" if reason == "cancelled" else "finished"] += 1
        ended_us = int((monotonic() - job.began) * 1e6)
        ended = m.Ended(
            request_id=job.request_id,
            reason=reason,
            generated_tokens=job.sent,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=0,
            timings=m.Timings(first_scheduled_us=0, first_token_us=0 if job.sent else -1, ended_us=ended_us),
        )
        self._ended.setdefault(job.peer, []).append(ended)

    def _cancel(self, peer: bytes, rid: int, request_id: int) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            self._send(peer, m.Refused(rid=rid, error=m.ErrorInfo.of(RequestNotFound(request_id))))
            return
        self._end(job, "cancelled")
        self._send(peer, m.Done(rid=rid))

    def _forget(self, peer: bytes) -> None:
        """Drop the requests of a disconnected client."""
        for request_id in [id_ for id_, job in self._jobs.items() if job.peer == peer]:
            del self._jobs[request_id]
            self._counts["cancelled"] += 1

    def _send_streams(self) -> None:
        rows, ended = self._rows, self._ended
        for peer in rows | ended:
            made = rows.get(peer, ())
            ids = np.fromiter((row[0] for row in made), np.int64, len(made))
            offsets = np.fromiter((row[1] for row in made), np.int32, len(made))
            stream = m.Stream(
                request_ids=ids,
                offsets=offsets,
                tokens=((ids + offsets) % VOCABULARY).astype(np.int32),
                logprobs=np.zeros(len(ids), np.float32),
                ended=tuple(ended.get(peer, ())),
            )
            self._send(peer, stream)
        self._rows, self._ended = {}, {}

    def _send(self, peer: bytes, message: m.Message) -> None:
        try:
            self._socket.send_multipart([peer, *encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError:
            self._forget(peer)

    def _stats(self, rid: int) -> m.Stats:
        count = self._counts
        requests = m.RequestStats(
            pending=0,
            running=len(self._jobs),
            accepted_total=count["accepted"],
            finished_total=count["finished"],
            failed_total=0,
            cancelled_total=count["cancelled"],
            expired_total=0,
            refused_total=0,
            prompt_tokens_total=count["prompt"],
            cached_tokens_total=0,
            generated_tokens_total=count["generated"],
            computed_tokens_total=count["prompt"] + count["generated"],
        )
        return m.Stats(
            rid=rid,
            boot=self._boot,
            uptime_us=0,
            clients=0,
            sequences=len(self._jobs),
            requests=requests,
            pools=(),
            tenants=(),
        )


def _router() -> zmq.Socket[bytes]:
    """Return a socket that never blocks on a slow client."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, transport.HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, transport.HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, transport.HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvforge.loadtest.drive.null_server")
    parser.add_argument("--endpoint", required=True, metavar="ipc://PATH")
    parser.add_argument("--pace", type=float, default=0.0, metavar="TOKENS_PER_S")
    parser.add_argument("--steps", action="store_true")
    options = parser.parse_args(argv)
    server = NullServer(options.endpoint, pace=options.pace, steps=options.steps)

    def end(*_: object) -> None:
        server.ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    print("listening", flush=True)
    try:
        server.serve()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
