"""A coordinator for client tests: real sockets and messages, scripted behaviour, no model.

As a program (`python -m tests.kvforge.fake_coordinator ENDPOINT`) it prints its endpoint and `listening`, then the tag
of every message. A request's tenant selects its behaviour; see `Fake.submit`. The token at offset i is the sum of the
prompt plus i. `Running` starts and stops the program for a test, by a fork server, and waits, with a deadline, for its
output.

To simulate a coordinator that was killed and recovered, it closes its socket with every connection and opens it again:

- at SIGUSR1;
- at SIGUSR2, which also drops the sessions of its clients;
- at a submit of the tenant "dropped", instead of the answer.

Requests continue meanwhile. SIGHUP: it is unreachable until the next SIGHUP.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from kvforge.protocol import errors
from kvforge.protocol import messages as m
from kvforge.protocol.codec import Decoder, encode
from tests.router import router
from tools.cluster.fork_server import SERVICES, fork_server

MODULE = "tests.kvforge.fake_coordinator"
DEADLINE_S = 60.0
ASKED = ("count", "priority", "deadline_ms", "first_token_ms", "detached", "key")


@dataclass
class Known:
    """A session: its current connection, and the answers to its commands by rid."""

    peer: bytes
    answers: dict[int, m.Message] = field(default_factory=dict)


@dataclass
class Job:
    """A running request: it sends one token a turn up to `limit`, then `end` (None: it hangs)."""

    peer: bytes
    request_id: int
    prompt: list[int]
    max_tokens: int
    tenant: str
    seed: int = 7
    priority: int = 0
    detached: bool = False
    logprobs: int = 0
    sent: int = 0
    limit: int = 0
    reason: str = ""
    paused: bool = False
    ended: m.Ended | None = None
    end: Callable[[], None] | None = None

    def token(self, offset: int) -> int:
        return sum(self.prompt) + offset


@dataclass
class Fake:
    """The program's state: received commands and running jobs."""

    endpoint: str
    boot: str = field(default_factory=lambda: os.urandom(4).hex())
    jobs: dict[int, Job] = field(default_factory=dict)
    last_id: int = 0
    keys: dict[tuple[str, str], m.Accepted] = field(default_factory=dict)
    busy: int = 2
    draining: bool = False
    health_asked: int = 0
    greeted: set[bytes] = field(default_factory=set)
    sessions: dict[str, Known] = field(default_factory=dict)
    away: bool = False
    signals: list[int] = field(default_factory=list)
    version_min: int = field(default_factory=lambda: int(os.environ.get("KVFORGE_FAKE_VERSION", "1")))
    secret: str = field(default_factory=lambda: os.environ.get("KVFORGE_FAKE_SECRET", ""))

    def serve(self) -> None:
        """Answer messages until killed."""
        self.open()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.signals.append(number))
        print(self.endpoint, "listening", sep="\n", flush=True)
        decoder = Decoder(m.CLIENT_MESSAGES)
        while True:
            self.hear_signals()
            if not self.away and self.socket.poll(1 if self.running() else 50):
                peer, *frames = self.socket.recv_multipart()
                message = decoder.decode(frames)
                print(type(message).__name__, flush=True)
                self.handle(peer, message)
            self.turn()

    def open(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = router(self.context)
        if self.secret:
            self.socket.curve_server = True
            self.socket.curve_secretkey = self.secret.encode()
        self.socket.bind(self.endpoint)
        self.endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    def hear_signals(self) -> None:
        while self.signals:
            number = self.signals.pop(0)
            if number == signal.SIGUSR2:
                self.sessions.clear()
            if not self.away:
                self.hang_up()
            self.away = number == signal.SIGHUP and not self.away
            if not self.away:
                self.open()
            print("away" if self.away else "back", flush=True)

    def hang_up(self) -> None:
        """Drop all connections; requests continue."""
        self.context.destroy(linger=0)  # waits until they are closed
        self.greeted.clear()
        for job in self.jobs.values():
            job.peer = b""
            if job.tenant == "waits" and not job.ended:
                job.limit, job.reason, job.end = job.max_tokens, "", None
        for known in self.sessions.values():
            known.peer = b""

    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.reason and not job.paused]

    def send(self, peer: bytes, message: m.Message) -> None:
        for known in self.sessions.values():
            if known.peer == peer and not isinstance(message, m.Stream | m.Welcome):
                known.answers[message.rid] = message
        if not peer:
            return
        try:
            self.socket.send_multipart([peer, *encode(message)])
        except zmq.ZMQError:
            print("PeerGone", flush=True)

    def refuse(self, peer: bytes, rid: int, error: errors.KvforgeError) -> None:
        self.send(peer, m.Refused(rid=rid, error=m.ErrorInfo.of(error)))

    def handle(self, peer: bytes, message: m.Message) -> None:
        if not isinstance(message, m.Hello | m.Goodbye) and peer not in self.greeted:
            self.refuse(peer, message.rid, errors.ProtocolError("say hello first"))
            return
        if (answer := self.answered(peer, message)) is not None:
            print("again", flush=True)
            self.send(peer, answer)
            return
        match message:
            case m.Hello(boot=boot) if boot not in ("", self.boot):
                self.refuse(peer, message.rid, errors.StateLost(boot, self.boot))
            case m.Hello(version_max=newest) if newest < self.version_min:
                spoken = f"spoken here: {self.version_min} to {self.version_min + 1}; you speak {newest}"
                self.refuse(peer, message.rid, errors.VersionMismatch(spoken))
            case m.Hello():
                self.greeted.add(peer)
                self.welcome(peer, message)
            case m.Submit():
                self.submit(peer, message)
            case m.Attach():
                self.attach(peer, message)
            case m.Cancel(request_id=request_id):
                self.cancel(peer, message.rid, request_id)
            case m.FinishAt():
                self.finish_at(peer, message)
            case m.GetRequest():
                self.status(peer, message)
            case m.ListRequests():
                rows = tuple(self.row(job) for job in reversed(self.jobs.values()))
                self.send(
                    peer, m.RequestList(rid=message.rid, requests=rows[: message.count_max], total=len(self.jobs))
                )
            case m.GetStats():
                self.send(peer, sample_stats(message.rid, len(self.running()), len(self.jobs)))
            case m.GetHealth():
                self.health(peer, message.rid)
            case m.Explain():
                self.explain(peer, message)
            case m.Drain():
                self.draining = True
                print(f"deadline_ms={message.deadline_ms}", flush=True)
                self.send(peer, m.Done(rid=message.rid))
            case m.Goodbye():
                self.greeted.discard(peer)
                for job in self.jobs.values():
                    if job.peer == peer and job.reason in ("", "hanging") and not job.detached:
                        job.reason = "cancelled"

    def welcome(self, peer: bytes, message: m.Hello) -> None:
        known = self.sessions.get(message.session)
        if known is not None:
            known.peer = peer
            for job in self.jobs.values():  # tokens continue at once, without a pause
                job.peer = job.peer or peer
        elif message.session:
            self.sessions[message.session] = Known(peer)
        print(f"resumed={known is not None}", flush=True)
        reply = m.Welcome(rid=message.rid, version=1, boot=self.boot, tables_path="/none", resumed=known is not None)
        self.send(peer, reply)

    def answered(self, peer: bytes, message: m.Message) -> m.Message | None:
        """Return the earlier answer to a repeated command of this session."""
        rid = getattr(message, "rid", 0)
        found = [known.answers[rid] for known in self.sessions.values() if known.peer == peer and rid in known.answers]
        return found[0] if found else None

    def submit(self, peer: bytes, message: m.Submit) -> None:
        if message.tenant == "silent":
            return None
        if message.tenant == "refused":
            return self.refuse(peer, message.rid, errors.QueueFull(4, 250))
        if message.tenant == "busy" and self.busy > 0:
            self.busy -= 1
            return self.refuse(peer, message.rid, errors.QueueFull(4, 1))
        if message.tenant == "odd":
            return self.send(peer, m.Done(rid=message.rid))
        print("asked", *(f"{name}={getattr(message, name)}" for name in ASKED), flush=True)
        if message.key and (message.tenant, message.key) in self.keys:
            return self.repeat(peer, message)
        accepted = self.accept(peer, message)
        if message.key:
            self.keys[message.tenant, message.key] = accepted
        if message.tenant == "dropped":
            for known in self.sessions.values():
                if known.peer == peer:
                    known.answers[message.rid] = accepted
            self.hang_up()
            return self.open()
        if message.tenant != "late":
            return self.send(peer, accepted)
        # Answered only after the client has given up: after its next command.
        for request_id in range(accepted.request_id, accepted.request_id + accepted.count):
            self.jobs[request_id].reason = "late"
        self.late = accepted
        return None

    def accept(self, peer: bytes, message: m.Submit) -> m.Accepted:
        first, seed = self.last_id + 1, message.sampling.seed or 7
        count = 1 if message.tenant == "old" else message.count  # a coordinator without support for count
        for number in range(count):
            self.last_id += 1
            job = Job(peer, self.last_id, message.prompt.tolist(), message.max_tokens, message.tenant)
            job.limit, job.logprobs, job.seed = message.max_tokens, message.sampling.logprobs, seed + number
            job.priority, job.detached = message.priority, message.detached
            self.jobs[job.request_id] = job
            self.script(job)
        return m.Accepted(rid=message.rid, request_id=first, seed=seed, count=count)

    def script(self, job: Job) -> None:
        """Run the tenant's behaviour after two tokens."""
        ends: dict[str, Callable[[], None]] = {
            "hang": lambda: None,
            "waits": lambda: None,  # until the connection ends
            "garbage": lambda: self.garbage(job),
            "gap": lambda: self.rows(job, (job.sent + 1,)),
            "slow": lambda: self.pause(job),
            "expires": lambda: self.finish(job, "expired"),
        }
        job.end = ends.get(job.tenant)
        if job.end is not None:
            job.limit = min(2, job.max_tokens)

    def repeat(self, peer: bytes, message: m.Submit) -> None:
        made = self.keys[message.tenant, message.key]
        jobs = [self.jobs[made.request_id + number] for number in range(made.count)]
        if jobs[0].prompt != message.prompt.tolist():
            return self.refuse(peer, message.rid, errors.KeyReused(message.key, made.request_id))
        self.send(
            peer,
            m.Accepted(rid=message.rid, request_id=made.request_id, seed=made.seed, count=made.count, repeated=True),
        )
        for job in jobs:
            self.stream_to(job, peer, 0)
        return None

    def pause(self, job: Job) -> None:
        """Pause the stream as for a slow consumer until the client attaches; meanwhile generate the rest."""
        self.send(job.peer, m.Stream(paused=(job.request_id,)))
        job.paused, job.end, job.limit = True, None, job.max_tokens
        job.sent = job.max_tokens - 1

    def attach(self, peer: bytes, message: m.Attach) -> None:
        job = self.jobs.get(message.request_id)
        if job is None:
            return self.refuse(peer, message.rid, errors.RequestNotFound(message.request_id))
        print(f"offset={message.offset}", flush=True)
        attached = m.Attached(rid=message.rid, request_id=job.request_id, seed=job.seed, offset=message.offset)
        self.send(peer, attached)
        self.stream_to(job, peer, message.offset)
        return None

    def stream_to(self, job: Job, peer: bytes, offset: int) -> None:
        """Detach the previous reader; send all tokens from `offset` on to `peer` at once."""
        if job.peer != peer:
            self.send(job.peer, m.Stream(taken=(job.request_id,)))
        job.peer, job.paused = peer, False
        self.rows(job, tuple(range(offset, job.sent)))
        if job.ended is not None:
            self.send(peer, m.Stream(ended=(job.ended,)))

    def garbage(self, job: Job) -> None:
        self.socket.send_multipart([job.peer, b"\xc1 this is not a message"])

    def rows(self, job: Job, offsets: tuple[int, ...]) -> None:
        tokens = [job.token(offset) for offset in offsets]
        self.send(
            job.peer,
            m.Stream(
                request_ids=np.full(len(offsets), job.request_id, np.int64),
                offsets=np.array(offsets, np.int32),
                tokens=np.array(tokens, np.int32),
                logprobs=np.array([-0.5] * len(offsets), np.float32),
                top_counts=np.full(len(offsets) if job.logprobs else 0, job.logprobs, np.int32),
                top_tokens=np.array([token + i for token in tokens for i in range(job.logprobs)], np.int32),
                top_logprobs=np.array([-0.5 - i for _ in tokens for i in range(job.logprobs)], np.float32),
            ),
        )

    def turn(self) -> None:
        for job in self.running():
            if job.sent < job.limit:
                twice = job.tenant == "twice" and job.sent > 0
                self.rows(job, (job.sent - 1, job.sent, job.sent) if twice else (job.sent,))
                job.sent += 1
            elif job.end is not None:
                end, job.end = job.end, None
                end()
                job.reason = "" if job.paused else job.reason or "hanging"
            else:
                self.finish(job, "failed" if job.tenant == "fails" else "length")

    def finish(self, job: Job, reason: str, cut_tokens: int = 0) -> None:
        job.reason = reason
        error = errors.WorkerError("the worker broke", worker="w0") if reason == "failed" else None
        ended = m.Ended(
            request_id=job.request_id,
            reason=reason,
            generated_tokens=job.sent,
            prompt_tokens=len(job.prompt),
            cached_tokens=0,
            timings=m.Timings(first_scheduled_us=10, first_token_us=20, ended_us=30),
            error=m.ErrorInfo.of(error) if error else None,
            cut_tokens=cut_tokens,
        )
        job.ended = ended
        self.send(job.peer, m.Stream(ended=(ended,)))

    def cancel(self, peer: bytes, rid: int, request_id: int) -> None:
        job = self.jobs.get(request_id)
        if job is None:
            self.refuse(peer, rid, errors.RequestNotFound(request_id))
        elif job.reason in ("length", "failed"):
            self.refuse(peer, rid, errors.AlreadyFinished(request_id, "finished"))
        else:
            self.send(peer, m.Done(rid=rid))
            self.finish(job, "cancelled")

    def finish_at(self, peer: bytes, message: m.FinishAt) -> None:
        job = self.jobs[message.request_id]
        if job.reason not in ("", "hanging"):
            return self.refuse(peer, message.rid, errors.AlreadyFinished(message.request_id, "finished"))
        self.send(peer, m.Done(rid=message.rid))
        cut, job.sent = job.sent - message.tokens, message.tokens
        return self.finish(job, "stop", cut)

    def row(self, job: Job) -> m.RequestRow:
        return m.RequestRow(
            request_id=job.request_id,
            state="finished" if job.reason else "running",
            tenant=job.tenant,
            prompt_tokens=len(job.prompt),
            max_tokens=job.max_tokens,
            generated_tokens=job.sent,
            age_us=1_500_000,
            reason=job.reason,
        )

    def status(self, peer: bytes, message: m.GetRequest) -> None:
        job = self.jobs.get(message.request_id)
        if job is None:
            return self.refuse(peer, message.rid, errors.RequestNotFound(message.request_id))
        tokens = [job.token(i) for i in range(job.sent)] if message.with_tokens else []
        return self.send(
            peer,
            m.RequestInfo(
                rid=message.rid,
                request_id=job.request_id,
                state="finished" if job.reason else "running",
                tenant=job.tenant,
                prompt_tokens=len(job.prompt),
                max_tokens=job.max_tokens,
                generated_tokens=job.sent,
                reason=job.reason,
                priority=job.priority,
                detached=job.detached,
                tokens=np.array(tokens, np.int32),
            ),
        )

    def explain(self, peer: bytes, message: m.Explain) -> None:
        """Give the same explanation for every subject; requests above 1000 do not exist."""
        if message.request_id > 1000:
            self.refuse(peer, message.rid, errors.RequestNotFound(message.request_id))
            return
        ids = {"request": message.request_id, "block": message.block_id, "sequence": message.sequence_id}
        kind, given = next(((kind, at) for kind, at in ids.items() if at >= 0), ("tenant", message.tenant))
        sentences = ("it is the first in the queue", "12 blocks are missing on w0")
        told = m.Explanation(
            rid=message.rid, subject=f"{kind} {given}", sentences=sentences, facts={"blocks_short": 12}
        )
        self.send(peer, told)

    def health(self, peer: bytes, rid: int) -> None:
        """Report ready: always, from the third query on (KVFORGE_FAKE_READY=third), or never."""
        self.health_asked += 1
        if hasattr(self, "late"):
            self.send(peer, self.late)
        ready = self.health_asked >= {"third": 3, "never": 1 << 30}.get(os.environ.get("KVFORGE_FAKE_READY", ""), 0)
        worker = m.WorkerHealth(
            name="w0",
            pid=1,
            state="ready" if ready else "loading",
            phase="weights",
            progress=0.5,
            steps=17,
            since_step_us=2_500_000,
            device_bytes={"weights": 3 << 30, "pool": 5 << 20, "other": 1000} if ready else {},
            kernels={"prefill": "Triton, portable: this device is not a Hopper GPU"} if ready else {},
        )
        reason = "" if ready else "no worker is ready: w0 is loading"
        self.send(peer, m.Health(rid=rid, live=True, ready=ready, reason=reason, workers=(worker,)))


def sample_stats(rid: int, running: int, total: int) -> m.Stats:
    """Return statistics of one pool of 64 blocks."""
    return m.Stats(
        rid=rid,
        boot="b",
        uptime_us=5_000_000,
        clients=1,
        sequences=running,
        requests=m.RequestStats(
            pending=0,
            running=running,
            accepted_total=total,
            finished_total=total - running,
            failed_total=0,
            cancelled_total=0,
            expired_total=0,
            refused_total=0,
            prompt_tokens_total=30,
            cached_tokens_total=16,
            generated_tokens_total=12,
            computed_tokens_total=26,
            recomputed_tokens_total=1,
            preemptions_total=2,
        ),
        pools=(
            m.PoolStats(
                worker="w0",
                state="ready",
                blocks=64,
                free=60,
                cached=1,
                referenced=3,
                quarantined=0,
                referenced_peak=9,
                block_size=16,
                bytes_per_block=8192,
                kv_dtype="float32",
                allocated_total=11,
                freed_total=8,
                live_tokens=40,
                sequences=running,
                steps=17,
            ),
        ),
        tenants=(
            m.TenantStats(
                tenant="default",
                blocks=3,
                prefix_queried_tokens_total=32,
                prefix_hit_tokens_total=16,
                weight=2.5,
                pending=4,
            ),
        ),
    )


class Running:
    """The running program. Endpoint and process belong to the test."""

    def __init__(
        self, folder: Path, *, ready: bool = True, loads: bool = False, version_min: int = 1, secret: str = ""
    ) -> None:
        """Start the program: at a socket in `folder`, or with a CURVE secret at a TCP port of this host."""
        self.endpoint = "tcp://127.0.0.1:*" if secret else f"ipc://{folder}/clients.sock"
        when = ("third" if loads else "now") if ready else "never"
        variables = {
            "KVFORGE_FAKE_READY": when,
            "KVFORGE_FAKE_VERSION": str(version_min),
            "KVFORGE_FAKE_SECRET": secret,
        }
        self._env = {**os.environ, **variables}
        self._text = b""
        self.start()

    def start(self) -> None:
        own_errors = Path(f"/proc/{os.getpid()}/fd/2")
        self.process, self._output = fork_server(SERVICES).start_piped([self.endpoint], own_errors, self._env, MODULE)
        self.endpoint = self.expect("listening").strip()

    def expect(self, word: str) -> str:
        """Wait until the program prints this line; consume the output up to it, and return what came before it."""
        deadline = time.monotonic() + DEADLINE_S
        line = word.encode() + b"\n"
        while (b"\n" + self._text).find(b"\n" + line) < 0:
            left_s = deadline - time.monotonic()
            ready = select.select([self._output], [], [], max(0.0, left_s))[0]
            assert ready, f"{word!r} was not seen within {DEADLINE_S} s; seen: {self._text!r}"
            chunk = os.read(self._output.fileno(), 4096)
            assert chunk, f"the fake coordinator ended before {word!r}; seen: {self._text!r}"
            self._text += chunk
        at = (b"\n" + self._text).find(b"\n" + line)
        before, self._text = self._text[:at], self._text[at + len(line) :]
        return before.decode()

    def signal(self, number: int, word: str) -> None:
        """Send a signal, and wait until the program confirms it."""
        self.process.send_signal(number)
        self.expect(word)

    def seen(self) -> str:
        """Return the output that no `expect` has consumed so far."""
        while select.select([self._output], [], [], 0)[0]:
            self._text += os.read(self._output.fileno(), 4096)
        return self._text.decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()


if __name__ == "__main__":
    Fake(sys.argv[1]).serve()
