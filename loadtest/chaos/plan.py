"""The kill schedule: `worker:10s,coordinator:30s` or `worker:every=20s`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from math import isfinite

from kvforge.protocol.errors import InvalidRequest

COORDINATOR, WORKER = "coordinator", "worker"
EVERY = "every="
EVERY_S_MIN = 1.0
DAY_S = 86_400.0
HOW = "expected NAME:TIME, such as worker:10s,coordinator:30s, or NAME:every=TIME"


@dataclass(frozen=True, slots=True)
class Kill:
    """A scheduled kill.

    Attributes:
        name: `coordinator`, `worker` for the workers in turn, or one worker's own name.
        at_s: When, in seconds of the run.
        every_s: The interval of repetitions; 0 for none.
    """

    name: str
    at_s: float
    every_s: float = 0.0

    def times(self) -> Iterator[tuple[float, str]]:
        """Yield (second of the run, name) in order, forever if repeated."""
        at_s = self.at_s
        yield at_s, self.name
        while self.every_s:
            at_s += self.every_s
            yield at_s, self.name


def parse(texts: Sequence[str]) -> tuple[Kill, ...]:
    """Parse the values of `--kill`; each may list several kills.

    Raises:
        InvalidRequest: Names `kill`.
    """
    return tuple(_kill(part.strip()) for text in texts for part in text.split(","))


def schedule(kills: Sequence[Kill]) -> Iterator[tuple[float, str]]:
    """Merge the kills in the order of their times; endless if one is repeated."""
    return merge(*(kill.times() for kill in kills))


def _kill(text: str) -> Kill:
    name, colon, when = text.rpartition(":")
    if not colon or not name:
        raise InvalidRequest("kill", f"{text!r} lacks a name or a time: {HOW}")
    every = when.startswith(EVERY)
    value = when.removeprefix(EVERY)
    try:
        seconds = float(value.removesuffix("s"))
    except ValueError:
        raise InvalidRequest("kill", f"{text!r}: invalid time {value!r}: {HOW}") from None
    if not isfinite(seconds) or not 0 <= seconds <= DAY_S:
        raise InvalidRequest("kill", f"{text!r}: the time must be 0 to {DAY_S:g} seconds of the run")
    if every and seconds < EVERY_S_MIN:
        raise InvalidRequest(
            "kill", f"{text!r}: the interval must be at least {EVERY_S_MIN:g} s, so that processes can recover"
        )
    return Kill(name, seconds, seconds if every else 0.0)
