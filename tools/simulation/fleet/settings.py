"""Settings of a simulated fleet and its faults, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

# A lost replica is back within this time, and one replica has no faults, so an accepted request can always run.
BACK_S = 15.0


@dataclass(frozen=True)
class Settings:
    """Settings of one world.

    Attributes:
        replicas: number of replicas.
        delay_s: maximum delay of a message.
        rows: running requests per replica.
        waiting: queued requests per replica.
        cache_blocks: prompt blocks in a replica's cache.
        step_s: duration of a decode step.
        prefill_tokens: prompt tokens per step.
        lost_s: the gateways' timeout for a lost replica.
        answer_s: the gateways' timeout for a prefix query.
        gap_s: mean time between two faults.
        requests: number of requests.
        over_s: period in which they arrive.
    """

    replicas: int
    delay_s: float
    rows: int
    waiting: int
    cache_blocks: int
    step_s: float
    prefill_tokens: int
    lost_s: float
    answer_s: float
    gap_s: float
    requests: int
    over_s: float


def draw_settings(random: Random) -> Settings:
    """Draw the settings of one world."""
    return Settings(
        replicas=random.randint(2, 5),
        delay_s=random.choice((0.001, 0.02, 0.2)),
        rows=random.choice((2, 8, 64)),
        waiting=random.choice((4, 64)),
        cache_blocks=random.choice((8, 64, 512)),
        step_s=random.choice((0.005, 0.02, 0.1)),
        prefill_tokens=random.choice((32, 512)),
        lost_s=random.choice((1.0, 3.0)),
        answer_s=random.choice((0.1, 0.5)),
        gap_s=random.choice((0.5, 2.0, 5.0)),
        requests=random.choice((30, 80)),
        over_s=random.choice((5.0, 30.0)),
    )
