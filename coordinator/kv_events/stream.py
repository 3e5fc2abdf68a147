"""The stream of batches: numbered, sent once a turn, and kept for a while for those who missed some.

A batch has the next number whatever becomes of it; nobody is waited for. Numbers go on over a restart, since they begin
with the microsecond of the start, and no process tells a batch a microsecond: so a subscriber of the process before
sees a gap, asks for what it missed, and is told.

Told anew is everything: all pools cleared, then all that is there. That happens at the start, and when somebody asks
for what is not kept any more: from then on whoever begins at `_whole`, the number of its first batch, gets right,
whatever it held. So no more than that is ever sent again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from kvforge.protocol.logs import tell

from ..core.cache.changes import Change, Cleared, IndexChanges
from ..core.commands.validate import salt_text
from ..core.machine import Machine
from .format import Format
from .settings import KvEventsSection

END = (-1).to_bytes(8, "big", signed=True)
REQUESTS_MAX = 16
ANSWERS_A_TURN = 64
STUCK_S = 5.0  # somebody who asked and takes nothing for so long has to ask again
ANEW_S = 10.0  # it is not told anew more often because somebody asks
log = logging.getLogger("coordinator")


class Asked(NamedTuple):
    """Somebody wants all batches from a number on."""

    who: bytes
    first: int


class Post(Protocol):
    """What carries batches: `kvforge.coordinator.kv_events.sockets.Sockets`. Nothing of it waits."""

    def publish(self, number: bytes, payload: bytes) -> None:
        """To every subscriber that has room for it."""

    def asked(self) -> list[Asked]:
        """What came in since: not more than a turn has room for."""

    def answer(self, who: bytes, number: bytes, payload: bytes) -> bool | None:
        """One batch for one that asked. False: it has no room for now; None: it is gone."""


class _Answer:
    """next: the number of the batch that comes next. took_s: when it took one last."""

    def __init__(self, who: bytes, first: int, now_s: float) -> None:
        self.who, self.next, self.took_s = who, first, now_s


class EventStream:
    """Tells what a machine's prefix indexes hold. now_s: Unix time, of the batches."""

    def __init__(self, machine: Machine, post: Post, settings: KvEventsSection, now_s: Callable[[], float]) -> None:
        self._machine, self._post, self._now_s = machine, post, now_s
        self._batches_max, self._bytes_max = settings.replay_batches_max, settings.replay_bytes_max
        self._format = Format(settings.encoding, machine.cache.hasher.salt(salt_text(settings.tenant, "")))
        self._changed: IndexChanges | None = None
        self._next = int(now_s() * 1e6)
        self._whole = self._next
        self._told_s = 0.0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._answers: list[_Answer] = []

    def turned(self) -> bool:
        """What a turn changed leaves, and whoever asked gets some. Returns whether somebody waits for more."""
        changes = None if self._changed is None else self._changed.take()
        if changes is None:
            self._tell_anew()
        elif changes:
            self._send(changes)
        self._hear()
        if self._answers:
            self._serve()
            self._hear()
        return bool(self._answers)

    def _tell_anew(self) -> None:
        """Which ranks a subscriber knows of an earlier life nobody can say: all are cleared."""
        self._whole, self._told_s = self._next, self._now_s()
        for pool in range(self._machine.limits.bounds.pools_max):
            self._send([Cleared(pool)])
        self._changed = self._machine.cache.tell_changes()
        self._send(self._changed.take() or ())
        tell(log, "debug", "KV events begin anew", "kv_events_anew", {"batches": self._next - self._whole})
        if self._oldest > self._whole:
            log.warning("what all pools hold is more than is kept for who missed it: raise kv_events.replay_bytes_max")

    def _send(self, changes: Iterable[Change]) -> None:
        for payload in self._format.batches(changes, self._now_s()):
            self._post.publish(self._next.to_bytes(8, "big"), payload)
            self._next += 1
            self._kept.append(payload)
            self._kept_bytes += len(payload)
        while len(self._kept) > self._batches_max or self._kept_bytes > self._bytes_max:
            self._kept_bytes -= len(self._kept.popleft())

    # ---------------------------------------------------------------------------------------------------------- replay

    @property
    def _oldest(self) -> int:
        return self._next - len(self._kept)

    def _hear(self) -> None:
        for asked in self._post.asked():
            self._ask(asked)

    def _ask(self, asked: Asked) -> None:
        """What was before everything was told anew nobody needs. Where too many ask at once, they have to ask again."""
        if len(self._answers) >= REQUESTS_MAX:
            return
        first = max(asked.first, self._whole)
        if first < self._oldest and self._now_s() - self._told_s >= ANEW_S:
            self._tell_anew()
            first = self._whole
        self._answers.append(_Answer(asked.who, first, self._now_s()))

    def _serve(self) -> None:
        """Each of them gets as much as it takes, and together no more than a turn has room for."""
        share = ANSWERS_A_TURN // len(self._answers)
        self._answers = [answer for answer in self._answers if self._serve_one(answer, share)]

    def _serve_one(self, answer: _Answer, most: int) -> bool:
        """Returns whether there is more to come."""
        for _ in range(most):
            answer.next = max(answer.next, self._oldest)
            over = answer.next >= self._next
            number = END if over else answer.next.to_bytes(8, "big")
            payload = b"" if over else self._kept[answer.next - self._oldest]
            taken = self._post.answer(answer.who, number, payload)
            if taken is None or (taken and over):
                return False
            if not taken:
                return abs(self._now_s() - answer.took_s) < STUCK_S
            answer.next, answer.took_s = answer.next + 1, self._now_s()
        return True
