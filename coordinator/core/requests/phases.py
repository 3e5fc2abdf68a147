"""Phases of a request: it is in exactly one phase at a time, from its submission to its end.

The phases of a request add up to its age, to the microsecond. They change only with the state of the request and not
with each token, so they cost nothing in a decode step.
"""

from __future__ import annotations

QUEUE, PREFILL, DECODE, PREEMPTED, STALLED, RECOVERING, OVER = range(7)
NAMES = ("queue", "prefill", "decode", "preempted", "stalled", "recovering")


class Phases:
    """Time spent in each phase of one request, and separately how long its stream was paused.

    | phase | the request |
    |---|---|
    | queue | waits to start, or for a trial of its grammar |
    | prefill | runs, without a token |
    | decode | generates tokens |
    | preempted | lost its blocks to others, until its next token (before its first token: until it runs again) |
    | stalled | holds its row, but lacks blocks |
    | recovering | as preempted, after the loss of its worker or a restart, including the coordinator's downtime |

    Attributes:
        spent_us: Microseconds in each phase, [phases], up to since_us.
        preemptions: Number of preemptions.
        recoveries: Number of recoveries.
        queued_for: The limit that it ran into last before it started; "" if it only waited for its turn.
        begun: It has a token.
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
        """Enter prefill as the request runs; a request with a token stays in its phase until the next one."""
        if not self.begun:
            self._enter(PREFILL, now_us)

    def token(self, now_us: int) -> None:
        """Enter decode with the first token of a run."""
        self.begun = True
        self._enter(DECODE, now_us)

    def preempt(self, now_us: int) -> None:
        """Enter preempted, because others need the request's blocks."""
        self.preemptions += 1
        self._enter(PREEMPTED, now_us)

    def put_off(self, now_us: int) -> None:
        """Return to waiting, until the worker has tried the request's grammar."""
        self._enter(PREEMPTED if self.begun else QUEUE, now_us)

    def lose_worker(self, now_us: int) -> None:
        """Enter recovering, because the worker is gone. A request that is recovering already is not counted again."""
        if self.phase != RECOVERING:
            self.recoveries += 1
            self._enter(RECOVERING, now_us)

    def restart(self, running: bool, gone_us: int, now_us: int) -> None:
        """Account for the coordinator's downtime from `gone_us` until now. A waiting request continues to wait."""
        before = self.phase
        if running or before == RECOVERING:
            self.lose_worker(gone_us)
        else:
            self._enter(RECOVERING, gone_us)
            self._enter(before, now_us)

    def stall(self, now_us: int) -> None:
        """Enter stalled, because blocks are missing and no other request is preempted."""
        if self.phase in (PREFILL, DECODE):
            self._enter(STALLED, now_us)

    def unstall(self, now_us: int) -> None:
        """Leave stalled, because the request is tried again."""
        if self.phase == STALLED:
            self._enter(DECODE if self.begun else PREFILL, now_us)

    def end(self, now_us: int) -> None:
        """End the last phase."""
        self._enter(OVER, now_us)

    def pause(self, now_us: int) -> None:
        """Start counting the time for which the stream is paused."""
        if self.paused_since_us < 0:
            self.paused_since_us = now_us

    def resume(self, now_us: int) -> None:
        """Stop counting: the stream continues, or no client waits for it any more."""
        if self.paused_since_us >= 0:
            self.paused_us, self.paused_since_us = self.paused_us + now_us - self.paused_since_us, -1

    def paused_by(self, now_us: int) -> int:
        """Return for how long the stream has been paused in total.

        A pause that began after the end counts only once a client has asked for the missing part.
        """
        since_us = self.paused_since_us
        if since_us < 0 or (self.phase == OVER and since_us >= self.since_us):
            return self.paused_us
        return self.paused_us + now_us - since_us

    def spent_by(self, now_us: int) -> list[int]:
        """Return microseconds by phase, in the order of NAMES, including the present phase up to now."""
        spent = self.spent_us
        if self.phase != OVER:
            spent = spent.copy()
            spent[self.phase] += now_us - self.since_us
        return spent
