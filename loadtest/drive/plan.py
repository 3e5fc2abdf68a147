"""What one driver process has to do of a run."""

from __future__ import annotations

from dataclasses import dataclass

# A request's draws are told apart by its session and turn; more turns than this have no session.
TURNS_MAX = 1 << 16
SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The share of process `index` of `processes`: sessions i with i % processes == index, and of each limit a part.

    closed: so many sessions at any time; 0: open loop. With arrivals it bounds them, without they follow each other,
    until `sessions_max` have begun; None: no bound. duration_s: nothing is due later, of a session neither. timeout_s:
    from when a request is due to its end. concurrency_max: requests under way at once; those beyond it wait, and are
    charged for it. clients: connections of the whole run.
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
        """What this process has of so many: at least one, so that its sessions can go on."""
        return max(1, (whole + self.processes - 1 - self.index) // self.processes)

    def places(self) -> int:
        """How many sessions of a closed loop this process has under way; none where there are fewer than processes."""
        return (self.closed + self.processes - 1 - self.index) // self.processes

    def draw(self, session: int, turn: int) -> int:
        """The seed of a request: the same one in every run of this seed, however many processes drive it."""
        return (self.seed * 0x9E3779B97F4A7C15 + session * TURNS_MAX + turn) & SEED_BITS
