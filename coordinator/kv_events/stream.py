"""The stream of event batches: numbered, sent once a turn, and kept for replay for a while.

Every batch gets the next number, whether or not it is delivered; the stream never waits for a subscriber. Numbers start
with the microsecond of the process start, and no process produces a batch each microsecond. They therefore increase
across restarts: a subscriber of the previous process sees a gap, requests the missing batches, and gets the new state.

A full resend clears all pools and then publishes their whole content. It occurs at startup, and when a subscriber
requests batches that are not kept any more. A subscriber that starts at `_whole`, the number of its first batch, ends
up correct, whatever it held before. Earlier batches are therefore never replayed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from kvforge.protocol.logs import log_event

from ..core.cache.changes import Change, Cleared, IndexChanges
from ..core.commands.validate import salt_text
from ..core.machine import Machine
from .format import Format
from .settings import KvEventsSection

END = (-1).to_bytes(8, "big", signed=True)
REQUESTS_MAX = 16
ANSWERS_A_TURN = 64
STUCK_S = 5.0  # a replay that makes no progress for this long is dropped
RESEND_S = 10.0  # minimum interval between full resends on request
log = logging.getLogger("coordinator")


class ReplayRequest(NamedTuple):
    """A request to replay all batches from a number on."""

    peer: bytes
    first: int


class BatchTransport(Protocol):
    """The transport of batches, which never blocks: `kvforge.coordinator.kv_events.sockets.Sockets`."""

    def publish(self, number: bytes, payload: bytes) -> None:
        """Send a batch to every subscriber with room in its queue."""

    def pop_requests(self) -> list[ReplayRequest]:
        """Return new replay requests, a bounded number."""

    def answer(self, peer: bytes, number: bytes, payload: bytes) -> bool | None:
        """Send one batch of a replay. Return False if the peer's queue is full, None if the peer is gone."""


class _Answer:
    """A replay in progress: the number of its next batch, and when the peer last accepted one."""

    def __init__(self, peer: bytes, first: int, now_s: float) -> None:
        self.peer, self.next, self.took_s = peer, first, now_s


class EventStream:
    """Publishes the content of a machine's prefix indexes. `now_s` returns the Unix time for batches."""

    def __init__(
        self, machine: Machine, transport: BatchTransport, settings: KvEventsSection, now_s: Callable[[], float]
    ) -> None:
        self._machine, self._transport, self._now_s = machine, transport, now_s
        self._batches_max, self._bytes_max = settings.replay_batches_max, settings.replay_bytes_max
        self._format = Format(settings.encoding, machine.cache.hasher.salt(salt_text(settings.tenant, "")))
        self._changed: IndexChanges | None = None
        self._next = int(now_s() * 1e6)
        self._whole = self._next
        self._resent_s = 0.0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._answers: list[_Answer] = []

    def turned(self) -> bool:
        """Publish the changes of a turn, and continue replays. Return whether a replay is unfinished."""
        changes = None if self._changed is None else self._changed.pop_changes()
        if changes is None:
            self._resend_all()
        elif changes:
            self._send(changes)
        self._accept_requests()
        if self._answers:
            self._serve()
            self._accept_requests()
        return bool(self._answers)

    def _resend_all(self) -> None:
        """Resend everything. All possible ranks are cleared, since a subscriber may have older state of any."""
        self._whole, self._resent_s = self._next, self._now_s()
        for pool in range(self._machine.limits.bounds.pools_max):
            self._send([Cleared(pool)])
        self._changed = self._machine.cache.record_changes()
        self._send(self._changed.pop_changes() or ())
        log_event(log, "debug", "KV events restarted", "kv_events_anew", {"batches": self._next - self._whole})
        if self._oldest > self._whole:
            log.warning("the content of all pools exceeds the replay buffer: raise kv_events.replay_bytes_max")

    def _send(self, changes: Iterable[Change]) -> None:
        for payload in self._format.batches(changes, self._now_s()):
            self._transport.publish(self._next.to_bytes(8, "big"), payload)
            self._next += 1
            self._kept.append(payload)
            self._kept_bytes += len(payload)
        while len(self._kept) > self._batches_max or self._kept_bytes > self._bytes_max:
            self._kept_bytes -= len(self._kept.popleft())

    # ---------------------------------------------------------------------------------------------------------- replay

    @property
    def _oldest(self) -> int:
        return self._next - len(self._kept)

    def _accept_requests(self) -> None:
        for request in self._transport.pop_requests():
            self._begin_replay(request)

    def _begin_replay(self, request: ReplayRequest) -> None:
        """Start a replay, at the latest full resend or later. Excess requests are dropped; the peers must retry."""
        if len(self._answers) >= REQUESTS_MAX:
            return
        first = max(request.first, self._whole)
        if first < self._oldest and self._now_s() - self._resent_s >= RESEND_S:
            self._resend_all()
            first = self._whole
        self._answers.append(_Answer(request.peer, first, self._now_s()))

    def _serve(self) -> None:
        """Continue all replays, with a bounded number of batches in total."""
        share = ANSWERS_A_TURN // len(self._answers)
        self._answers = [answer for answer in self._answers if self._serve_one(answer, share)]

    def _serve_one(self, answer: _Answer, most: int) -> bool:
        """Continue one replay. Return whether it is unfinished."""
        for _ in range(most):
            answer.next = max(answer.next, self._oldest)
            over = answer.next >= self._next
            number = END if over else answer.next.to_bytes(8, "big")
            payload = b"" if over else self._kept[answer.next - self._oldest]
            taken = self._transport.answer(answer.peer, number, payload)
            if taken is None or (taken and over):
                return False
            if not taken:
                return abs(self._now_s() - answer.took_s) < STUCK_S
            answer.next, answer.took_s = answer.next + 1, self._now_s()
        return True
