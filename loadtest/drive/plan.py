"""The share of a run that one driver process has."""

from __future__ import annotations

from dataclasses import dataclass

# The seed of a request depends on its session and turn; no session has more turns than this.
TURNS_MAX = 1 << 16
SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The share of process `index`: the sessions i with i % processes == index, and a part of each limit.

    Attributes:
        index: The process.
        processes: The number of processes.
        closed: The number of concurrent sessions; 0 for an open loop. With arrivals it is an upper bound; without, the
            next session starts when one ends.
        sessions_max: How many sessions of a closed loop begin; None for no limit.
        duration_s: No request is due later, also within sessions.
        timeout_s: The time limit of a request, from when it is due.
        concurrency_max: Requests in flight. Others wait, and their wait counts as latency.
        clients: The connections of the whole run.
        temperature: The temperature.
        seed: The seed of the run.
    """

    index: int = 0
    processes: int = 1
    closed: int = 0
    sessions_max: int | None = None
    duration_s: float | None = None
    timeout_s: float = 600.0
    concurrency_max: int = 10_000
    clients: int = 1
    temperature: float = 0.0
    seed: int = 0

    def part(self, whole: int) -> int:
        """Return this process's part of a limit: at least one, so that its sessions can continue."""
        return max(1, (whole + self.processes - 1 - self.index) // self.processes)

    def places(self) -> int:
        """Return this process's concurrent sessions of a closed loop; 0 if there are fewer than processes."""
        return (self.closed + self.processes - 1 - self.index) // self.processes

    def draw(self, session: int, turn: int) -> int:
        """Return the seed of a request: the same in every run of this seed, for any number of processes."""
        return (self.seed * 0x9E3779B97F4A7C15 + session * TURNS_MAX + turn) & SEED_BITS
