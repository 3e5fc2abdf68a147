"""Disconnected workers, as the page shows them.

A worker that left on purpose is not shown. A lost one is restarted by its supervisor (`kvforge up`, systemd, a fleet):
it shows as "starting again" for a while, then as "gone".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvforge.protocol.messages import LEFT

STARTS_AGAIN_S = 180.0
STARTING, GONE = "starting again", "gone"


@dataclass(frozen=True, slots=True)
class DisconnectedWorker:
    """A lost worker.

    Attributes:
        name: Its name.
        state: STARTING or GONE.
        how: The coordinator's description of the loss.
    """

    name: str
    state: str
    how: str


@dataclass(slots=True)
class DisconnectedWorkers:
    """The lost workers of the last health answer. `since_s` holds when each was first seen to be lost."""

    since_s: dict[str, float] = field(default_factory=dict)

    def look(self, gone: Mapping[str, str], connected: Iterable[str], now_s: float) -> tuple[DisconnectedWorker, ...]:
        """Update with a health answer.

        Args:
            gone: `Health.gone`.
            connected: Names of connected workers.
            now_s: The monotonic clock.

        Returns:
            The lost workers in the order of `gone`.
        """
        there = set(connected)
        lost = {name: how for name, how in gone.items() if not how.startswith(LEFT) and name not in there}
        self.since_s = {name: self.since_s.get(name, now_s) for name in lost}
        return tuple(
            DisconnectedWorker(name, STARTING if now_s - self.since_s[name] < STARTS_AGAIN_S else GONE, how)
            for name, how in lost.items()
        )
