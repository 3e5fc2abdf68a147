"""Workers that are not connected: what is shown of each.

A worker that left on purpose is stopped, and not shown. One that was lost is started again by what supervises it
(`kvforge up`, systemd, a fleet): it is "starting again" for a while, and then gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvforge.protocol.messages import LEFT

STARTS_AGAIN_S = 180.0
STARTING, GONE = "starting again", "gone"


@dataclass(frozen=True, slots=True)
class Absent:
    """state: STARTING or GONE. how: how it was lost, in the coordinator's words."""

    name: str
    state: str
    how: str


@dataclass(slots=True)
class Absences:
    """The lost workers of the last answer. since_s: when each was first seen to be lost, by its name."""

    since_s: dict[str, float] = field(default_factory=dict)

    def look(self, gone: Mapping[str, str], connected: Iterable[str], now_s: float) -> tuple[Absent, ...]:
        """Take in an answer.

        Args:
            gone: `Health.gone`.
            connected: names of workers that are there.
            now_s: of a monotonic clock.

        Returns:
            The lost workers in the order of `gone`.
        """
        there = set(connected)
        lost = {name: how for name, how in gone.items() if not how.startswith(LEFT) and name not in there}
        self.since_s = {name: self.since_s.get(name, now_s) for name in lost}
        return tuple(
            Absent(name, STARTING if now_s - self.since_s[name] < STARTS_AGAIN_S else GONE, how)
            for name, how in lost.items()
        )
