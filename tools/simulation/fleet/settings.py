"""What a simulated fleet is like, and what befalls it: drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

# A replica that is lost is back after at most this long, and at least one is never touched: an accepted request has
# always somewhere to go.
BACK_S = 15.0


@dataclass(frozen=True)
class Settings:
    """replicas: how many. delay_s: the longest way of a message. rows, waiting: how many requests one runs and lets
    wait. cache_blocks: of prompts. step_s: of a decode step. prefill_tokens: of one. lost_s, answer_s: the gateways'.
    gap_s: between two misfortunes, at the mean. requests: in all; over_s: within which they come."""

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
    """Of one world."""
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
