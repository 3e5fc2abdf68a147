"""Metrics in the shared tables: the names, the order and the buckets of the numbers that monitors read.

A tenant has one row of int64: TENANT_COUNTS, then the cells of each of TENANT_TIMES. The row's index is the tenant's
number with the coordinator, up to TENANT_ROWS; row 0 sums all other tenants, including those that the coordinator has
forgotten. A pool has one row: POOL_COUNTS, then the cells of STEP_TIME.

Each token of a request is either its first (FIRST_TOKEN) or follows another one after a gap (GAP), so that both
distributions together count tokens.

The cells of a distribution are the number of values in each bucket (not cumulative), the number of values above the
last bound, and the sum of all values. Times are in microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

TENANT_ROWS = 64
TENANT_TIERS = ("device", "host", "disk")  # columns of the blocks that a tenant is charged for
OTHERS = 0  # the row of tenants without a row of their own
NAME_LENGTH_MAX = 128
FACTS_BYTES, FACTS_POOL_BYTES = 1 << 16, 1 << 12

TENANT_COUNTS = (
    "running",
    "waiting",
    "accepted",
    "prompt_tokens",
    "prefilled_tokens",
    "queried_tokens",
    "hit_tokens",
    "recomputed_tokens",
    "preempted",
    "displaced",
    "length",
    "stop",
    "cancelled",
    "expired",
    "failed",
)
RUNNING, WAITING, ACCEPTED, PROMPT, PREFILLED, QUERIED, HIT, RECOMPUTED, PREEMPTED, DISPLACED = range(10)
REASONS = TENANT_COUNTS[10:]
ENDED = {reason: TENANT_COUNTS.index(reason) for reason in REASONS}
POOL_COUNTS = (
    "blocks",
    "free",
    "cached",
    "referenced",
    "quarantined",
    "running",
    "steps_in_flight",
    "steps",
    "allocated",
    "freed",
    "state_blocks",
    "checkpoint_blocks",
    "window_blocks",
    "host_blocks",
    "host_free",
    "host_cached",
    "host_quarantined",
    "host_saved",
    "host_loaded",
    "host_evicted",
    "host_unsaved",
    "host_missed_tags",
    "host_missed_checksums",
    "host_hit_tokens",
    "host_swapped",
    "host_unswapped",
    "host_swapped_blocks",
    "host_swap_saved_us",
    "host_skipped",
    "host_recomputed",
    "host_returns",
    "host_returns_used",
    "host_returns_wasted",
    "disk_blocks",
    "disk_free",
    "disk_cached",
    "disk_quarantined",
    "disk_recovered",
    "disk_saved",
    "disk_loaded",
    "disk_evicted",
    "disk_unsaved",
    "disk_failed",
    "disk_late",
    "disk_declined",
    "disk_missed_tags",
    "disk_missed_checksums",
    "device_idle_us",
)


class Distribution(NamedTuple):
    """A distribution of values by bucket.

    Attributes:
        name: The name of the metric.
        bounds: The largest value of each bucket, as integers.
        start: The index of its first cell in a row.
    """

    name: str
    bounds: tuple[int, ...]
    start: int

    @property
    def total(self) -> int:
        """Return the index of the cell with the sum of all values."""
        return self.start + len(self.bounds) + 1

    @property
    def end(self) -> int:
        """Return the index after its last cell."""
        return self.total + 1


def _us(*seconds: float) -> tuple[int, ...]:
    return tuple(round(each * 1e6) for each in seconds)


def _row(first: int, bounds: dict[str, tuple[int, ...]]) -> tuple[Distribution, ...]:
    row: list[Distribution] = []
    for name, each in bounds.items():
        row.append(Distribution(name, each, row[-1].end if row else first))
    return tuple(row)


_LATENCY = _us(
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
TENANT_TIMES = FIRST_TOKEN, GAP, WHOLE, QUEUE, PREFILL, DECODE, PROMPT_SIZE, ANSWER_SIZE = _row(
    len(TENANT_COUNTS),
    {
        "first_token": _us(
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
            *(20, 40, 80, 160, 640, 2560),
        ),
        "gap": _us(
            *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5),
            *(7.5, 10, 20, 40, 80),
        ),
        "whole": _LATENCY,
        "queue": _LATENCY,
        "prefill": _LATENCY,
        "decode": _LATENCY,
        "prompt_size": _TOKENS,
        "answer_size": _TOKENS,
    },
)
(STEP_TIME,) = _row(
    len(POOL_COUNTS),
    {"step": _us(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)},
)
TENANT_CELLS, POOL_CELLS = TENANT_TIMES[-1].end, STEP_TIME.end


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        name: Its name.
        pid: Its process id.
        state: connecting, loading, ready or away (not back yet since the coordinator restarted).
        pool: The number of its row, -1 before it is ready.
        block_bytes: The size of a block in bytes.
        kv_dtype: The type of the KV cache.
        device_bytes: Its device memory in bytes by purpose.
    """

    name: str
    pid: int
    state: str
    pool: int = -1
    block_bytes: int = 0
    kv_dtype: str = ""
    device_bytes: dict[str, int] = {}


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Values that are not numbers and rarely change.

    Attributes:
        model: The model's name, "" before there is one.
        tenants: The names of the rows from 1 on.
        workers: The workers.
    """

    model: str = ""
    tenants: tuple[str, ...] = ()
    workers: tuple[WorkerInfo, ...] = ()
