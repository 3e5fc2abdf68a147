"""Where a request's time goes: it is in exactly one phase at a time, from its submission to its end.

Kept here: the phases of a request add up to its age, to the microsecond. They change only where something happens to
the request, never for a token: what is counted costs a decode step nothing.
"""

from __future__ import annotations

QUEUE, PREFILL, DECODE, PREEMPTED, STALLED, RECOVERING, OVER = range(7)
NAMES = ("queue", "prefill", "decode", "preempted", "stalled", "recovering")


class Phases:
    """The phases of one request, and beside them how long its stream was paused, whatever it did meanwhile.

    queue: until it starts, and while its grammar is tried. prefill: until its first token. decode: while tokens come.
    preempted: since others took its blocks, until its next token: what is computed again is part of that (before its
    first token: until it runs again).
    stalled: it holds its row, and blocks are missing. recovering: the same as preempted, where its worker was lost or
    the coordinator was started again; and the time in which there was no coordinator.
    spent_us: [phases], up to since_us. preemptions, recoveries: how many. queued_for: the limit that it ran into last
    before it started, "" for none but its turn. begun: it has a token.
    """

    __slots__ = (
        "begun",
        "paused_since_us",
        "paused_us",
        "phase",
        "preemptions",
        "queued_for",
        "recoveries",
        "since_us",
        "spent_us",
    )

    def __init__(self, now_us: int) -> None:
        self.phase, self.since_us, self.spent_us = QUEUE, now_us, [0] * len(NAMES)
        self.preemptions = self.recoveries = 0
        self.paused_us, self.paused_since_us = 0, -1
        self.queued_for, self.begun = "", False

    def _enter(self, phase: int, now_us: int) -> None:
        if self.phase != OVER:
            self.spent_us[self.phase] += now_us - self.since_us
        self.phase, self.since_us = phase, now_us

    def start(self, now_us: int) -> None:
        """It runs, or runs again. One that has begun has to get to its next token first."""
        if not self.begun:
            self._enter(PREFILL, now_us)

    def token(self, now_us: int) -> None:
        """The first token of a run."""
        self.begun = True
        self._enter(DECODE, now_us)

    def preempt(self, now_us: int) -> None:
        """Others need its blocks."""
        self.preemptions += 1
        self._enter(PREEMPTED, now_us)

    def put_off(self, now_us: int) -> None:
        """It waits until its worker has tried its grammar."""
        self._enter(PREEMPTED if self.begun else QUEUE, now_us)

    def lose_worker(self, now_us: int) -> None:
        """What it ran on is gone. Whoever waits for its worker to come back since a restart is counted already."""
        if self.phase != RECOVERING:
            self.recoveries += 1
            self._enter(RECOVERING, now_us)

    def restart(self, running: bool, gone_us: int, now_us: int) -> None:
        """There was no coordinator from `gone_us` until now. Whoever waited goes on waiting."""
        before = self.phase
        if running or before == RECOVERING:
            self.lose_worker(gone_us)
        else:
            self._enter(RECOVERING, gone_us)
            self._enter(before, now_us)

    def stall(self, now_us: int) -> None:
        """Blocks are missing for its next tokens, and nobody gives way."""
        if self.phase in (PREFILL, DECODE):
            self._enter(STALLED, now_us)

    def unstall(self, now_us: int) -> None:
        """It is tried again."""
        if self.phase == STALLED:
            self._enter(DECODE if self.begun else PREFILL, now_us)

    def end(self, now_us: int) -> None:
        """It has ended."""
        self._enter(OVER, now_us)

    def pause(self, now_us: int) -> None:
        """Its stream stops."""
        if self.paused_since_us < 0:
            self.paused_since_us = now_us

    def resume(self, now_us: int) -> None:
        """Its stream goes on, or nobody waits for it any more."""
        if self.paused_since_us >= 0:
            self.paused_us, self.paused_since_us = self.paused_us + now_us - self.paused_since_us, -1

    def paused_by(self, now_us: int) -> int:
        """For how long its stream has been paused in all.

        A pause that began after its end counts once somebody has asked for what was missing: else nothing was.
        """
        since_us = self.paused_since_us
        if since_us < 0 or (self.phase == OVER and since_us >= self.since_us):
            return self.paused_us
        return self.paused_us + now_us - since_us

    def spent_by(self, now_us: int) -> list[int]:
        """Microseconds by phase, in the order of NAMES, of the present one up to now."""
        spent = self.spent_us
        if self.phase != OVER:
            spent = spent.copy()
            spent[self.phase] += now_us - self.since_us
        return spent
