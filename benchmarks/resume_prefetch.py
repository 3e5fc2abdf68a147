"""Replay of agents' sessions: how often a sequence that moved down to the host is back before its next request.

    python -m benchmarks.resume_prefetch TRACE [--pool-tokens 4000000] [--sessions-hour 120] [--json FILE]

TRACE is a file of Claude Code sessions, or the name `claude-code` for the sample of the load test. Each session is a
sequence that is kept for an hour, and so is each of its sub-agents. Sequences are evicted least recently used first,
and other requests take a part of the pool at intervals. The program simulates the pool with sequences as wholes; the
coordinator's own learned idle times (`IdleTimes`) decide when one comes back. The seed fixes when sessions begin.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

from kvforge.coordinator.core.cache.idle_times import IdleCounts, IdleTimes
from kvforge.coordinator.core.cache.idle_tracker import RETRIES, RETRY_US
from kvforge.coordinator.core.scheduling.returning import LEFT, SHARE
from kvforge.loadtest.load.traces import find

from .report import report

SECOND = 1_000_000
BLOCK = 64  # tokens
KEPT_US = 3600 * SECOND
TURN, END, REMOVE, TRY, COPIED, BURST, CALM, CLAIM = range(8)
NEVER, ON_TIME, AT_ONCE = WAYS = ("never", "by learned idle times", "as soon as there is room")


@dataclass(eq=False)
class Sequence:
    """A session: for each request the idle time before and how long it runs, in us, and the blocks behind it."""

    turns: list[tuple[int, int, int]]
    at: int = 0
    blocks: int = 0
    resident: bool = False
    returned: bool = False
    moving: bool = False
    running: bool = False
    last_try: int = 0
    idle_since: int = -1
    number: int = 0


@dataclass
class Counts:
    """The counts of a replay; blocks are of 64 tokens."""

    resumes: int = 0
    resident: int = 0
    moved_down: int = 0
    brought_before: int = 0
    copied_blocks: int = 0
    wasted_blocks: int = 0
    read_on_demand_blocks: int = 0
    held_block_us: int = field(default=0, repr=False)
    mean_blocks_held: float = 0.0
    hit_share: float = 0.0
    brought_share: float = 0.0
    wasted_share: float = 0.0


def again_us(idle_us: int) -> int:
    """Return when a sequence that has been idle for so long is tried again."""
    return idle_us + max(RETRY_US, idle_us // RETRIES)


class Replay:
    """A pool with the sequences of sessions."""

    def __init__(self, way: str, pool_blocks: int, blocks_second: int, burst: tuple[float, float, float]) -> None:
        self._way, self._pool, self._rate = way, pool_blocks, blocks_second
        self._burst = int(burst[0] * pool_blocks), int(burst[1] * SECOND), int(burst[2] * SECOND)
        self._heap: list[tuple[int, int, int, Sequence | None]] = []
        self._order = self._now = self._used = self._held = self._bursting = 0
        self._idle: dict[int, Sequence] = {}  # least recently used first
        self._waiting: list[Sequence] = []
        self._copying = False
        self.times, self.counts = IdleTimes(), Counts()

    def run(self, sessions: list[Sequence], starts: list[int]) -> Counts:
        """Replay sessions from the times at which they begin."""
        for number, (sequence, start_us) in enumerate(zip(sessions, starts, strict=True)):
            sequence.number = number
            self._at(start_us, TURN, sequence)
        last_us = max(starts)
        if self._burst[0]:
            self._at(self._burst[2], BURST, None)
        while self._heap:
            us, _, kind, found = heapq.heappop(self._heap)
            if us > last_us:
                break
            self.counts.held_block_us += self._held * (us - self._now)
            self._now = us
            self._act(kind, found)
        c = self.counts
        c.mean_blocks_held = round(c.held_block_us / max(1, self._now), 1)
        c.hit_share = round(c.resident / max(1, c.resumes), 4)
        c.brought_share = round(c.brought_before / max(1, c.moved_down), 4)
        c.wasted_share = round(c.wasted_blocks / max(1, c.copied_blocks), 4)
        return c

    def _at(self, us: int, kind: int, sequence: Sequence | None) -> None:
        self._order += 1
        heapq.heappush(self._heap, (us, self._order, kind, sequence))

    def _act(self, kind: int, sequence: Sequence | None) -> None:
        if kind == BURST:
            self._make_room(self._burst[0])
            self._bursting = self._burst[0]
            self._at(self._now + self._burst[1], CALM, None)
        elif kind == CALM:
            self._bursting = 0
            self._at(self._now + self._burst[2] - self._burst[1], BURST, None)
            self._start_waiting()
        else:
            assert sequence is not None
            acts = {
                TURN: self._turn,
                END: self._end,
                REMOVE: self._remove,
                TRY: self._try,
                COPIED: self._copied,
                CLAIM: self._claim,
            }
            acts[kind](sequence)

    # ----------------------------------------------------------------------------------------------------- requests

    def _turn(self, sequence: Sequence) -> None:
        """A request comes."""
        if sequence.idle_since >= 0:
            self.times.returned(1, self._now - sequence.idle_since)
            c = self.counts
            c.resumes += 1
            c.resident += sequence.resident
            if sequence.returned or not sequence.resident:
                c.moved_down += 1
                c.brought_before += sequence.resident
                c.read_on_demand_blocks += 0 if sequence.resident else sequence.blocks
            self._used_return(sequence)
        sequence.idle_since, sequence.moving = -1, False
        self._idle.pop(sequence.number, None)
        if not self._start(sequence):
            self._waiting.append(sequence)

    def _start(self, sequence: Sequence) -> bool:
        _, runs_us, blocks = sequence.turns[sequence.at]
        had = sequence.blocks if sequence.resident else 0
        if not self._make_room(max(0, blocks - had)):
            if sequence.resident:
                self._used -= had
                sequence.resident = False
            return False
        self._used += blocks - had
        sequence.blocks, sequence.resident, sequence.running = blocks, True, True
        self._at(self._now + runs_us, END, sequence)
        return True

    def _start_waiting(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.pop(0)

    def _end(self, sequence: Sequence) -> None:
        sequence.at += 1
        sequence.running, sequence.idle_since, sequence.last_try = False, self._now, 0
        self._idle[sequence.number] = sequence
        if sequence.at < len(sequence.turns) and sequence.turns[sequence.at][0] < KEPT_US:
            self._at(self._now + sequence.turns[sequence.at][0], TURN, sequence)
        else:
            self._at(self._now + KEPT_US, REMOVE, sequence)
        self._start_waiting()

    def _remove(self, sequence: Sequence) -> None:
        self.times.removed(1, self._now - sequence.idle_since)
        self._idle.pop(sequence.number, None)
        self._release(sequence)
        sequence.idle_since = -1
        self._start_waiting()

    # --------------------------------------------------------------------------------------------------------- pool

    def _room(self) -> int:
        return self._pool - self._used - self._bursting

    def _make_room(self, blocks: int) -> bool:
        for sequence in [each for each in self._idle.values() if each.resident and not each.moving]:
            if self._room() >= blocks:
                break
            self._release(sequence)
            self._await(sequence)
        return self._room() >= blocks

    def _release(self, sequence: Sequence) -> None:
        if not sequence.resident:
            return
        self._used -= sequence.blocks
        sequence.resident = False
        if sequence.returned:
            self.counts.wasted_blocks += sequence.blocks
            self._used_return(sequence)

    def _used_return(self, sequence: Sequence) -> None:
        if sequence.returned:
            self._held -= sequence.blocks
            sequence.returned = False

    # ------------------------------------------------------------------------------------------------------- return

    def _expected(self) -> tuple[IdleCounts, int, int] | None:
        counts = self.times.of(1)
        window = counts.expected() if counts is not None else None
        return None if counts is None or window is None else (counts, *window)

    def _await(self, sequence: Sequence) -> None:
        """Try to bring a sequence back when it may be expected."""
        idle_us = self._now - sequence.idle_since
        if self._way == NEVER:
            return
        early_us = found[1] if self._way == ON_TIME and (found := self._expected()) is not None else 0
        self._at(sequence.idle_since + max(early_us, again_us(idle_us), 2 * sequence.last_try), TRY, sequence)

    def _try(self, sequence: Sequence) -> None:
        idle_us = self._now - sequence.idle_since
        if sequence.idle_since < 0 or sequence.resident or sequence.moving or idle_us < 2 * sequence.last_try:
            return
        claim_us = KEPT_US
        if self._way == ON_TIME:
            found = self._expected()
            if found is None:
                self._at(sequence.idle_since + 2 * max(SECOND, idle_us), TRY, sequence)
                return
            counts, _, late_us = found
            if idle_us >= late_us or not counts.is_likely(idle_us, late_us):
                return
            claim_us = late_us
        room = sequence.blocks + self._pool // LEFT <= self._room()
        room &= (self._held + sequence.blocks) * SHARE <= self._pool
        if self._waiting or self._copying or not room:
            self._at(sequence.idle_since + again_us(idle_us), TRY, sequence)
            return
        self._copying = sequence.resident = sequence.moving = sequence.returned = True
        self._used += sequence.blocks
        self._held += sequence.blocks
        self.counts.copied_blocks += sequence.blocks
        sequence.last_try = idle_us
        self._at(self._now + sequence.blocks * SECOND // self._rate, COPIED, sequence)
        self._at(sequence.idle_since + claim_us, CLAIM, sequence)

    def _copied(self, sequence: Sequence) -> None:
        self._copying = sequence.moving = False

    def _claim(self, sequence: Sequence) -> None:
        if sequence.returned and sequence.idle_since >= 0 and self._now - sequence.idle_since >= sequence.last_try:
            self._release(sequence)


def sessions_of(trace: str) -> Iterator[Sequence]:
    """Return the sessions of a trace, and those of their sub-agents."""
    with find(trace) as found:
        for _, line in found.lines():
            if line.strip():
                yield from _sequences(json.loads(line)["requests"])


def _sequences(requests: list[dict[str, Any]]) -> Iterator[Sequence]:
    own = [request for request in requests if request["type"] != "subagent"]
    turns, before_s = [], None
    for request in own:
        runs_s = max(0.1, request.get("api_time", 1.0))
        idle_s = 0.0 if before_s is None else max(0.0, request["t"] - before_s)
        turns.append((int(idle_s * SECOND), int(runs_s * SECOND), -(-(request["in"] + request["out"]) // BLOCK)))
        before_s = request["t"] + runs_s
    if turns:
        yield Sequence(turns)
    for request in requests:
        if request["type"] == "subagent":
            yield from _sequences(request["requests"])


def main(arguments: list[str] | None = None) -> int:
    """Replay a trace in each way and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", help="a file of Claude Code sessions, or claude-code")
    parser.add_argument("--pool-tokens", type=int, default=4_000_000, help="tokens that the pool has room for")
    parser.add_argument("--sessions-hour", type=float, default=120, help="sessions that begin in an hour")
    parser.add_argument("--copy-tokens", type=int, default=200_000, help="tokens copied from the host in a second")
    parser.add_argument("--burst", type=float, nargs=3, default=(0.5, 20.0, 120.0), metavar=("SHARE", "S", "EVERY_S"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the document to this file")
    options = parser.parse_args(arguments)
    rows = {}
    for way in WAYS:
        sessions, draw = list(sessions_of(options.trace)), Random(options.seed)
        draw.shuffle(sessions)
        starts = [int(draw.random() * len(sessions) / options.sessions_hour * 3600 * SECOND) for _ in sessions]
        replay = Replay(way, options.pool_tokens // BLOCK, options.copy_tokens // BLOCK, tuple(options.burst))
        counts = replay.run(sessions, starts)
        rows[way] = {each.name: getattr(counts, each.name) for each in fields(counts) if each.name != "held_block_us"}
    header = ("comes back", "resident at resume", "back of those moved down", "copied", "wasted", "blocks held")
    table = [
        (
            way,
            *(f"{100 * row[name]:.1f} %" for name in ("hit_share", "brought_share")),
            row["copied_blocks"],
            f"{100 * row['wasted_share']:.0f} %",
            row["mean_blocks_held"],
        )
        for way, row in rows.items()
    ]
    report(title(options), header, table, {"ways": rows, "options": vars(options)}, options.json)
    return 0


def title(options: argparse.Namespace) -> str:
    """Return what was replayed, in words."""
    share, lasts_s, every_s = options.burst
    others = (
        f"others take {share:.0%} of the pool for {lasts_s:g} s every {every_s:g} s" if share else "nothing else runs"
    )
    return f"{options.sessions_hour:g} sessions an hour, {options.pool_tokens} tokens of KV, {others}"


if __name__ == "__main__":
    sys.exit(main())
