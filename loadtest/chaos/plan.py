"""What is to be killed, and when: `worker:10s,coordinator:30s`, `worker:every=20s`."""

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
HOW = "give WHO:TIME, as worker:10s,coordinator:30s, or WHO:every=TIME"


@dataclass(frozen=True, slots=True)
class Kill:
    """A process to be killed at `at_s` seconds of the run, and then every `every_s` seconds; 0: once.

    name: `coordinator`, `worker` for the workers in turn, or one worker's own name.
    """

    name: str
    at_s: float
    every_s: float = 0.0

    def times(self) -> Iterator[tuple[float, str]]:
        """(second of the run, name), in order; without an end where it is repeated."""
        at_s = self.at_s
        yield at_s, self.name
        while self.every_s:
            at_s += self.every_s
            yield at_s, self.name


def parse(texts: Sequence[str]) -> tuple[Kill, ...]:
    """Of the values of `--kill`, each of which may name several. Raises InvalidRequest naming `kill`."""
    return tuple(_kill(part.strip()) for text in texts for part in text.split(","))


def schedule(kills: Sequence[Kill]) -> Iterator[tuple[float, str]]:
    """All of them in the order of their times; without an end where one is repeated."""
    return merge(*(kill.times() for kill in kills))


def _kill(text: str) -> Kill:
    name, colon, when = text.rpartition(":")
    if not colon or not name:
        raise InvalidRequest("kill", f"{text!r} does not say whom and when: {HOW}")
    every = when.startswith(EVERY)
    value = when.removeprefix(EVERY)
    try:
        seconds = float(value.removesuffix("s"))
    except ValueError:
        raise InvalidRequest("kill", f"{text!r}: {value!r} is no time: {HOW}") from None
    if not isfinite(seconds) or not 0 <= seconds <= DAY_S:
        raise InvalidRequest("kill", f"{text!r}: the time must be 0 to {DAY_S:g} seconds of the run")
    if every and seconds < EVERY_S_MIN:
        raise InvalidRequest("kill", f"{text!r}: at most once every {EVERY_S_MIN:g} s, or nothing would come back")
    return Kill(name, seconds, seconds if every else 0.0)
