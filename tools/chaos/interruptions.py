"""Process faults of a chaos run, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

COORDINATOR, GATEWAY = "coordinator", "gateway"
KILL, STOP, TERM = "kill", "stop", "term"
PAUSE_S = 2.5  # mean pause between two faults
PAUSE_S_MIN = 0.5
AGAIN_S_MAX = 1.2  # delay of a second kill after a restart: covers imports, recovery, and reconnecting peers
SHORT_STOP_S = (0.05, 1.0)
DISK = ":disk"  # behind a worker's name: the process that copies for its disk tier
DOWN_S = (1.0, 4.0)  # how long a worker may stay dead while the coordinator dies and recovers


@dataclass(frozen=True)
class Interruption:
    """A fault that strikes some processes at once.

    Attributes:
        kind: `kill`, `stop` or `term`.
        members: the processes.
        for_s: duration of a stop.
        again_s: delay after the restart of each process until it is killed again, or None.
        down_s: how long processes other than the coordinator stay dead before their restart.
    """

    kind: str
    members: tuple[str, ...]
    for_s: float = 0.0
    again_s: float | None = None
    down_s: float = 0.0

    def __str__(self) -> str:
        for_s = f" for {self.for_s:.2f} s" if self.for_s else ""
        again = f", and again {self.again_s:.2f} s after their start" if self.again_s is not None else ""
        down = f", the second one dead for {self.down_s:.2f} s" if self.down_s else ""
        return f"{self.kind} {' and '.join(self.members)}{for_s}{again}{down}"


def draw(
    seed: int,
    workers: Sequence[str],
    clients: Sequence[str],
    gone_s: float,
    silent_s: float,
    mean_pause_s: float = PAUSE_S,
    disks: bool = False,
) -> Iterator[tuple[float, Interruption]]:
    """Yield (pause in seconds, fault) without end; each common kind occurs once before any occurs twice.

    Args:
        seed: the run's seed.
        workers: names of the worker processes.
        clients: names of the client processes.
        gone_s: idle timeout after which the coordinator drops a stopped worker or client.
        silent_s: idle timeout after which its peers drop the coordinator; by then it has given up a dead worker.
        mean_pause_s: mean pause between two faults, above PAUSE_S_MIN.
        disks: workers have disk tiers, and the processes of these are killed too.
    """
    rng = random.Random(f"misfortunes {seed}")
    everybody = (COORDINATOR, GATEWAY, *workers, *clients)

    def kill(*members: str, again: float = 0.2) -> Interruption:
        return Interruption(KILL, members, again_s=rng.uniform(0, AGAIN_S_MAX) if rng.random() < again else None)

    kinds: list[tuple[float, Callable[[], Interruption]]] = [
        (5, lambda: kill(COORDINATOR, again=0.3)),
        (4, lambda: kill(rng.choice(workers))),
        (2, lambda: kill(rng.choice(clients))),
        (3, lambda: kill(GATEWAY)),
        (1, lambda: kill(COORDINATOR, GATEWAY)),
        (1, lambda: kill(*workers)),
        (2, lambda: kill(COORDINATOR, rng.choice(everybody[1:]))),
        (1, lambda: Interruption(KILL, (COORDINATOR, rng.choice(workers)), down_s=rng.uniform(*DOWN_S))),
        (2, lambda: Interruption(TERM, (COORDINATOR,))),
        (1, lambda: Interruption(TERM, (rng.choice(workers),))),
        (1, lambda: Interruption(TERM, (GATEWAY,))),
        (1, lambda: Interruption(STOP, (COORDINATOR,), rng.uniform(*SHORT_STOP_S))),
        (1, lambda: Interruption(STOP, (rng.choice(workers),), rng.uniform(*SHORT_STOP_S))),
        (1, lambda: Interruption(STOP, (rng.choice(clients),), rng.uniform(*SHORT_STOP_S))),
        (1, lambda: Interruption(STOP, tuple(rng.sample(everybody, 2)), rng.uniform(*SHORT_STOP_S))),
        (1, lambda: Interruption(STOP, (rng.choice(workers),), gone_s * rng.uniform(1.2, 2.2))),
        (1, lambda: Interruption(STOP, (rng.choice(clients),), gone_s * rng.uniform(1.2, 2.2))),
        (1, lambda: Interruption(STOP, (GATEWAY,), gone_s * rng.uniform(1.2, 2.2))),
        (0.2, lambda: Interruption(KILL, (COORDINATOR, rng.choice(workers)), down_s=silent_s * rng.uniform(1.05, 1.3))),
        # Longer than the peers' idle timeout and step_timeout_s: the coordinator must not count this time against its
        # peers.
        (0.5, lambda: Interruption(STOP, (COORDINATOR,), silent_s * rng.uniform(1.05, 1.3))),
    ]
    if disks:
        kinds.append((3, lambda: kill(rng.choice(workers) + DISK, again=0.0)))
    first: list[Callable[[], Interruption]] = [kind for weight, kind in kinds if weight >= 1]
    rng.shuffle(first)
    weights = [weight for weight, _ in kinds]
    while True:
        pause_s = PAUSE_S_MIN + rng.expovariate(1 / (mean_pause_s - PAUSE_S_MIN))
        kind = first.pop() if first else rng.choices(kinds, weights)[0][1]
        yield pause_s, kind()
